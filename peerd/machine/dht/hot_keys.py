"""Hot keys: copies of what others hold, kept for a while by a node that is asked for it often, on the way to them.

A node that several peers have asked for a key of which it holds nothing looks the key up itself, and for a while
answers with what it found those peers that say how old an answer may be. So the readers of a hot key are served by
more nodes the more they are, in fewer hops, and its holders hear from those nodes instead of from every reader.

Nobody can put anything here: what readers found is not taken from them, or one that signs records of its own could
leave them on every way to a key and nothing else. Copies come from this node's own look-up, which asks for no copies,
verified like any other; they have a memory of their own and take nothing from what the node is responsible for. They
are kept for `_LIFETIME_S`, half as long for each bit of distance beyond the key's holders, and no record for longer
than it lives. What a key holds is kept whole or not at all: a part would pass for the whole.

A hostile peer may ask for many keys, often: a look-up needs `_ASKERS` peers that ask within the time for which the copy
would be of use (with fewer it costs more questions than it saves). A place leads to `_LOOKUPS_PER_PLACE` of them a
minute, all places together to `_AT_ONCE` at once.
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
from peerd.machine.dht.store import answer_bytes

_LIFETIME_S = 480.0  # of a copy right beside the key's holders
_LEAST_S = 1.0  # a copy that is of use for less is not worth a look-up
_ASKERS = 4
_AT_ONCE = 8
_LOOKUPS_PER_PLACE = 16  # within
_MINUTE_S = 60.0
_PLACES = 1024  # of which look-ups are counted


@dataclass(frozen=True, slots=True)
class _Copy:
    """The records of one key as a look-up that began at `asked_at` found them; none: there was nothing."""

    asked_at: float
    until: float
    records: tuple[Record, ...]
    bytes: int


class HotKeys:
    """Copies by key. `now` is monotonic, `wall` corrected Unix time."""

    def __init__(self, keys: int = DHT_COPIED_KEYS, bytes_: int = DHT_COPIED_BYTES) -> None:
        self._most_bytes = bytes_
        self._copies = BoundedDict[Key, _Copy](keys + 1)  # `keep` makes room itself, so that the bytes stay counted
        self._keys = keys
        self._bytes = 0
        self._bytes_by: Counter[PeerId] = Counter()
        self._askers = BoundedDict[Key, dict[PeerId, float]](keys)  # the last few, oldest first
        self._under_way: dict[Key, float] = {}  # look-ups, since when
        self._begun = BoundedDict[str, list[float]](_PLACES)  # look-ups of the last minute that a place led to

    def __len__(self) -> int:
        return len(self._copies)

    def get(self, now: float, wall: float, key: Key, max_age_s: float, most_bytes: int = 0) -> list[Record]:
        """The live records under `key`, if they are known to be no older than that, and are no more than that."""
        copy = self._copies.get(key)
        if copy is None or now >= copy.until or now - copy.asked_at > max_age_s:
            return []
        if most_bytes and copy.bytes > most_bytes:
            return []  # whose part it should be, only a store knows
        self._copies.move_to_end(key)
        return [record for record in copy.records if record.is_live(wall)]

    def asked(self, now: float, key: Key, peer: PeerId, place: str, useful_s: float) -> bool:
        """Note that `peer`, in that place, asked for a key of which we hold nothing. True: look it up now, which is
        counted as under way until `keep`. `useful_s`: how long its readers could be answered with what is found.
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
        """The look-up that `asked` wished for ended with these, all that is under `key`."""
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
            self._drop(next(iter(self._copies)))  # the one that was asked for longest ago
        self._copies[key] = _Copy(asked_at, until, tuple(records), size)
        self._bytes += size
        self._bytes_by += by

    def purge(self, now: float) -> None:
        """Drop copies that are over."""
        for key in [key for key, copy in self._copies.items() if now >= copy.until]:
            self._drop(key)

    def check(self) -> None:
        """Raise LocalError when an invariant is broken."""
        by = Counter[PeerId]()
        for copy in self._copies.values():
            for record in copy.records:
                by[record.publisher] += answer_bytes(record)
        if by != self._bytes_by or by.total() != self._bytes:
            raise LocalError("the bytes of copies are miscounted")
        if len(self._copies) > self._keys or self._bytes > self._most_bytes or len(self._under_way) > _AT_ONCE:
            raise LocalError("more copies than there may be")
        if any(count > DHT_BYTES_PER_PUBLISHER for count in by.values()):
            raise LocalError("one publisher has more in copies than it may")

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
    """Lifetime of a copy, in seconds, where the key is so many bits farther away than its holders are."""
    return _LIFETIME_S / (1 << min(bits_beyond, 16))
