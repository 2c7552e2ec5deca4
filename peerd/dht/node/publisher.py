"""This peer's own records: what it published, for how long, and when each must be sent again.

A record's lease is at most an hour; a longer one is renewed. Each record is also offered again, unchanged, every
`repeat_s`, because the peers that held it may have left. A withdrawal creates a tombstone that outlives every copy of
the withdrawn record. Sends nothing and knows no peers.

Versions are corrected Unix time in milliseconds, so that a restarted peer supersedes what it published before. If its
clock was set back in between, the refusals contain the version that must be exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.ids import Key
from peerd.core.limits import RECORD_TTL_S
from peerd.core.record import Record, Signer

_MAX_LEAD_MS = 1 << 46  # greatest version that a store can credibly claim to hold: the year 4200


@dataclass(slots=True)
class _Own:
    record: Record
    until: float  # end of the publication, in corrected Unix seconds
    due: float  # when to offer it again
    copies_until: float  # when the last copy of any version that we sent out expires
    stays: bool = False  # others need the record after we have left


class Publisher:
    """Publishes and renews the records of `signer`. `wall` is corrected Unix time in seconds."""

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
        """A signed record that replaces the one published under this sub-key. Raises LocalError if it is too large.

        `stays`: `withdraw_all` keeps the record, so that it lives until it expires.
        """
        until = wall + ttl_s
        record = self._sign(wall, key, suffix, value, min(until, wall + RECORD_TTL_S))
        before = self._own.get((key, suffix))
        copies_until = max(record.expires, before.copies_until if before is not None else 0.0)
        self._own[key, suffix] = _Own(record, until, self._due(wall, record, until), copies_until, stays)
        return record

    def withdraw(self, wall: float, key: Key, suffix: bytes) -> Record | None:
        """The tombstone of the record published under this sub-key, or None if there is none."""
        own = self._own.get((key, suffix))
        if own is None or own.record.tombstone or own.copies_until <= wall:
            return None
        until = own.copies_until
        record = self._sign(wall, key, suffix, b"", until, tombstone=True)
        self._own[key, suffix] = _Own(record, until, self._due(wall, record, until), until)
        return record

    def withdraw_all(self, wall: float) -> list[Record]:
        """Tombstones of all published records except those that stay."""
        leaving = [place for place, own in self._own.items() if not own.stays]
        records = (self.withdraw(wall, key, suffix) for key, suffix in leaving)
        return [record for record in records if record is not None]

    def own(self, wall: float, key: Key) -> list[Record]:
        """Our own latest records under `key`, including tombstones."""
        return [own.record for (k, _), own in self._own.items() if k == key and own.record.is_live(wall)]

    def all(self, wall: float) -> list[Record]:
        """All our live records, including tombstones."""
        return [own.record for own in self._own.values() if own.record.is_live(wall)]

    def due(self, wall: float) -> list[Record]:
        """Records to offer to the swarm again now, with renewed leases if necessary."""
        records = []
        for place, own in list(self._own.items()):
            if own.until <= wall:
                # A peer may still hold an earlier version with a longer lease: end that one as well.
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
        """Time at which `due` next has something to do, in corrected Unix seconds, or None if nothing is published."""
        return min((min(own.due, own.until) for own in self._own.values()), default=None)

    def outbid(self, wall: float, record: Record, version: int) -> Record | None:
        """`record` signed again with a version above `version`, which a store holds, or None if it is outdated."""
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
        """Time of the next publication: the next repetition, or earlier if a lease must be renewed halfway."""
        renewal = wall + (record.expires - wall) / 2 if _ends_early(record, until) else until
        return min(wall + self._repeat_s, renewal)


def _ends_early(record: Record, until: float) -> bool:
    """Return True if the lease ends before `until`, by more than rounding to whole milliseconds explains."""
    return record.expires < until - 0.002
