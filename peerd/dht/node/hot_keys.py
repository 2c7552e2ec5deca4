"""Cache of hot keys: a node that is often asked for a key that it does not hold caches the records for a while.

If several peers ask a node for a key of which it holds nothing, the node looks the key up itself. For a while it then
answers from this copy those peers that state how old an answer may be. So a hot key is served by more nodes the more
readers it has, in fewer hops, and its holders are asked by those nodes instead of by every reader.

Nobody can insert records here. Readers' results are not accepted, because a reader could place only its own signed
records on every path to a key. Copies come from this node's own lookup, which does not accept copies itself and whose
records are verified as usual. They have their own memory budget and do not reduce that of the node's own keys. A copy
is kept for `_LIFETIME_S`, halved for each bit of distance beyond the key's holders, and no record is kept beyond its
expiry. The records of a key are kept completely or not at all, because a part would look like the whole.

Hostile input: a peer may ask for many keys, often. A lookup is started only if `_ASKERS` peers ask within the time for
which the copy would be useful (with fewer it would cost more requests than it saves). One place can cause at most
`_LOOKUPS_PER_PLACE` lookups a minute; all places together at most `_AT_ONCE` at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import LocalError
from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_BYTES_PER_PUBLISHER, DHT_COPIED_BYTES, DHT_COPIED_KEYS
from peerd.core.record import Record
from peerd.dht.node.store import answer_bytes

_LIFETIME_S = 480.0  # of a copy next to the key's holders
_LEAST_S = 1.0  # a copy that is useful for less time is not worth a lookup
_ASKERS = 4  # peers that must ask for a key
_AT_ONCE = 8  # concurrent lookups
_LOOKUPS_PER_PLACE = 16  # per minute
_MINUTE_S = 60.0
_PLACES = 1024  # places whose lookups are counted


@dataclass(frozen=True, slots=True)
class _Copy:
    """The records of one key, found by a lookup that began at `asked_at`; empty if there were none."""

    asked_at: float
    until: float
    records: tuple[Record, ...]
    bytes: int


class HotKeys:
    """Cached records of hot keys. `now` is monotonic time, `wall` corrected Unix time, both in seconds."""

    def __init__(self, keys: int = DHT_COPIED_KEYS, bytes_: int = DHT_COPIED_BYTES) -> None:
        self._most_bytes = bytes_
        self._copies = BoundedDict[Key, _Copy](keys + 1)  # never evicts: `keep` makes room and counts bytes
        self._keys = keys
        self._bytes = 0
        self._bytes_by: Counter[PeerId] = Counter()
        self._askers = BoundedDict[Key, dict[PeerId, float]](keys)  # times of the last few requests, oldest first
        self._under_way: dict[Key, float] = {}  # start times of running lookups
        self._begun = BoundedDict[str, list[float]](_PLACES)  # start times of lookups in the last minute, by place

    def __len__(self) -> int:
        return len(self._copies)

    def get(self, now: float, wall: float, key: Key, max_age_s: float, most_bytes: int = 0) -> list[Record]:
        """The live records under `key`, or an empty list if there is no copy that young and that small.

        `most_bytes`: 0 for any size.
        """
        copy = self._copies.get(key)
        if copy is None or now >= copy.until or now - copy.asked_at > max_age_s:
            return []
        if most_bytes and copy.bytes > most_bytes:
            return []  # only a store can choose a fair part of the records
        self._copies.move_to_end(key)
        return [record for record in copy.records if record.is_live(wall)]

    def asked(self, now: float, key: Key, peer: PeerId, place: str, useful_s: float) -> bool:
        """Record that `peer` at address `place` asked for a key that we do not hold; return True to start a lookup now.

        The lookup counts as running until `keep` is called. `useful_s`: how long its result could serve the readers.
        """
        if useful_s < _LEAST_S:
            return False
        askers = self._askers.get(key) or {}
        askers.pop(peer, None)
        askers[peer] = now
        while len(askers) > _ASKERS:
            del askers[next(iter(askers))]
        self._askers[key] = askers
        if len(askers) < _ASKERS or now - min(askers.values()) > useful_s:
            return False
        copy = self._copies.get(key)
        if (
            (copy is not None and now - copy.asked_at < useful_s)
            or key in self._under_way
            or len(self._under_way) >= _AT_ONCE
        ):
            return False
        begun = [at for at in self._begun.get(place, ()) if now - at < _MINUTE_S]
        if len(begun) >= _LOOKUPS_PER_PLACE:
            return False
        self._begun[place] = [*begun, now]
        self._under_way[key] = now
        return True

    def keep(self, now: float, key: Key, records: Sequence[Record], bits_beyond: int) -> None:
        """Store the result of a lookup that `asked` started: all records under `key`.

        `bits_beyond`: how many bits of distance we are farther away than the key's holders.
        """
        asked_at = self._under_way.pop(key, now)
        until = asked_at + lifetime_s(bits_beyond)
        self._drop(key)
        size = sum(map(answer_bytes, records))
        if size > self._most_bytes:
            return
        by = Counter[PeerId]()
        for record in records:
            by[record.publisher] += answer_bytes(record)
        if any(self._bytes_by[publisher] + count > DHT_BYTES_PER_PUBLISHER for publisher, count in by.items()):
            return
        while len(self._copies) >= self._keys or self._bytes + size > self._most_bytes:
            self._drop(next(iter(self._copies)))  # the least recently requested one
        self._copies[key] = _Copy(asked_at, until, tuple(records), size)
        self._bytes += size
        self._bytes_by += by

    def purge(self, now: float) -> None:
        """Drop expired copies."""
        for key in [key for key, copy in self._copies.items() if now >= copy.until]:
            self._drop(key)

    def check(self) -> None:
        """Raise LocalError if an invariant is broken."""
        by = Counter[PeerId]()
        for copy in self._copies.values():
            for record in copy.records:
                by[record.publisher] += answer_bytes(record)
        if by != self._bytes_by or by.total() != self._bytes:
            raise LocalError("the bytes of copies are miscounted")
        if len(self._copies) > self._keys or self._bytes > self._most_bytes or len(self._under_way) > _AT_ONCE:
            raise LocalError("there are more copies than allowed")
        if any(count > DHT_BYTES_PER_PUBLISHER for count in by.values()):
            raise LocalError("the copies of one publisher exceed its limit")

    def _drop(self, key: Key) -> None:
        copy = self._copies.pop(key, None)
        if copy is None:
            return
        self._bytes -= copy.bytes
        for record in copy.records:
            self._bytes_by[record.publisher] -= answer_bytes(record)
            if not self._bytes_by[record.publisher]:
                del self._bytes_by[record.publisher]


def lifetime_s(bits_beyond: int) -> float:
    """Lifetime of a copy in seconds, on a node that is this many bits farther from the key than its holders."""
    return _LIFETIME_S / (1 << min(bits_beyond, 16))
