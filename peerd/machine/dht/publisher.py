"""This peer's own records: what it announced, for how long, and when each must be sent out again.

A record's lease is at most an hour; a longer one is renewed. Each record is also offered again, unchanged, every
`repeat_s`, because the peers that held it may have left. A withdrawal leaves a tombstone that outlives every copy of
what it withdraws. Does not send anything and knows no peers.

Versions follow corrected time in milliseconds, so that a peer that starts anew outbids what it published before; if
its clock was set back meanwhile, the refusals say which version to outbid.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.ids import Key
from peerd.core.limits import RECORD_TTL_S
from peerd.core.record import Record, Signer

_MAX_LEAD_MS = 1 << 46  # a version that a store claims to hold is believed up to this: the year 4200


@dataclass(slots=True)
class _Own:
    record: Record
    until: float  # corrected Unix seconds: as long as it is wanted
    due: float  # when to offer it again
    copies_until: float  # when the last copy of any version that we sent out expires
    stays: bool = False  # True for a record that others need after we have left


class Publisher:
    """The records of `signer`. `wall` is corrected Unix time throughout."""

    def __init__(self, signer: Signer, repeat_s: float = 300.0) -> None:
        self._signer = signer
        self._repeat_s = repeat_s
        self._own: dict[tuple[Key, bytes], _Own] = {}
        self._last_version = 0

    def __len__(self) -> int:
        return sum(not own.record.tombstone for own in self._own.values())

    def publish(
        self, wall: float, key: Key, suffix: bytes, value: bytes, ttl_s: float, *, stays: bool = False
    ) -> Record:
        """A signed record that replaces what we published under this sub-key; LocalError when it is too large.

        `stays`: `withdraw_all` leaves it, so that it lives on to its end.
        """
        until = wall + ttl_s
        record = self._sign(wall, key, suffix, value, min(until, wall + RECORD_TTL_S))
        before = self._own.get((key, suffix))
        copies_until = max(record.expires, before.copies_until if before is not None else 0.0)
        self._own[key, suffix] = _Own(record, until, self._due(wall, record, until), copies_until, stays)
        return record

    def withdraw(self, wall: float, key: Key, suffix: bytes) -> Record | None:
        """The tombstone of what is published under this sub-key; None when nothing is."""
        own = self._own.get((key, suffix))
        if own is None or own.record.tombstone or own.copies_until <= wall:
            return None
        until = own.copies_until
        record = self._sign(wall, key, suffix, b"", until, tombstone=True)
        self._own[key, suffix] = _Own(record, until, self._due(wall, record, until), until)
        return record

    def withdraw_all(self, wall: float) -> list[Record]:
        """Tombstones of everything that is published, but for records that stay."""
        leaving = [place for place, own in self._own.items() if not own.stays]
        records = (self.withdraw(wall, key, suffix) for key, suffix in leaving)
        return [record for record in records if record is not None]

    def own(self, wall: float, key: Key) -> list[Record]:
        """Our own latest records under `key`, tombstones included."""
        return [own.record for (k, _), own in self._own.items() if k == key and own.record.is_live(wall)]

    def all(self, wall: float) -> list[Record]:
        """Every record of ours that counts, tombstones included."""
        return [own.record for own in self._own.values() if own.record.is_live(wall)]

    def due(self, wall: float) -> list[Record]:
        """Records to offer to the swarm again now, with leases renewed where that is due."""
        records = []
        for place, own in list(self._own.items()):
            if own.until <= wall:
                # An earlier version may have had a longer lease, and a peer that missed the later one: end that too.
                tombstone = self.withdraw(wall, *place)
                if tombstone is None:
                    del self._own[place]
                else:
                    records.append(tombstone)
            elif own.due <= wall:
                if _ends_early(own.record, own.until):
                    key, suffix = place
                    expires = min(own.until, wall + RECORD_TTL_S)
                    own.record = self._sign(wall, key, suffix, own.record.value, expires)
                    own.copies_until = max(own.copies_until, own.record.expires)
                own.due = self._due(wall, own.record, own.until)
                records.append(own.record)
        return records

    def due_at(self) -> float | None:
        """Time at which `due` next has something to do, in corrected Unix seconds; None: nothing is published."""
        return min((min(own.due, own.until) for own in self._own.values()), default=None)

    def outbid(self, wall: float, record: Record, version: int) -> Record | None:
        """`record` anew with a version above `version`, which a store holds; None when it is no longer our latest."""
        own = self._own.get((record.key, record.suffix))
        if own is None or own.record != record or not record.version <= version < _MAX_LEAD_MS:
            return None
        self._last_version = max(self._last_version, version)
        own.record = self._sign(wall, record.key, record.suffix, record.value, record.expires, record.tombstone)
        return own.record

    def _sign(
        self, wall: float, key: Key, suffix: bytes, value: bytes, expires: float, tombstone: bool = False
    ) -> Record:
        version = max(self._last_version + 1, int(wall * 1000))
        expires_ms = round(expires * 1000)
        record = Record(key, self._signer.peer_id, suffix, value, version, expires_ms, tombstone).signed(self._signer)
        self._last_version = version
        return record

    def _due(self, wall: float, record: Record, until: float) -> float:
        """Time of the next publication: half of what is left of the lease if it must be renewed, and no later than the
        next repetition.
        """
        renewal = wall + (record.expires - wall) / 2 if _ends_early(record, until) else until
        return min(wall + self._repeat_s, renewal)


def _ends_early(record: Record, until: float) -> bool:
    """True when the lease ends before it is meant to. Leases are in whole milliseconds: what rounding took is no
    reason.
    """
    return record.expires < until - 0.002
