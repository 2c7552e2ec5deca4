"""The records that this peer stores for the swarm: which it accepts, until when, and how much from each peer and place.

Every record is checked here, however it arrived: signature, expiry, version, quotas. Tombstones are kept like other
records until they expire, so that withdrawn records cannot return. If the store is full, the key farthest from us is
dropped for a nearer one, because its records belong on other peers. If a key is full, the region with most records
there makes room; within it the fullest place, and within that the fullest publisher (see `_to_give_way`). A member's
record makes room only for another member's. A record counts for the place from which its publisher offered it; if only
others have offered it, it counts for their place, because they may have made up its publisher.

Invariants (`check`): per sub-key the latest of all records offered; no quota exceeded; exact counts. Hostile input:
forged, replayed, expired or far-future records, records of others, floods. Each record gets its own verdict, and none
costs more than one signature check. Not prevented: an attacker with addresses in as many regions as the honest
publishers of a key.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from peerd.core.errors import LocalError
from peerd.core.ids import Key, PeerId
from peerd.core.limits import (
    CLOCK_TOLERANCE_S,
    DHT_BYTES_PER_KEY,
    DHT_BYTES_PER_KEY_AND_PUBLISHER,
    DHT_BYTES_PER_PUBLISHER,
    DHT_RECORDS_PER_KEY,
    DHT_RECORDS_PER_PUBLISHER,
    DHT_STORED_BYTES,
    DHT_STORED_RECORDS,
    DHT_SUFFIXES_PER_KEY,
)
from peerd.core.record import Record, Verifier
from peerd.dht.node.routing_table import place
from peerd.wire.budget.book import NEAR, Book, Bounds, Resource, User

_OVERHEAD_BYTES = 256  # memory of one record beyond its fields
_ANSWER_OVERHEAD_BYTES = 192  # of one record in an answer: header, signature, framing
_LARGE_BYTES = 512  # from this size on, not sending a record saves far more than its tag costs
_HERE = User("", "this peer", NEAR + "this peer")
N = TypeVar("N", str, bool)


class Verdict(enum.IntEnum):
    """A store's verdict on an offered record. The number is sent on the wire."""

    STORED = 0
    STALE = 1  # the store has a record that supersedes this one
    UNTIMELY = 2  # expired, or a lease longer than allowed: clocks may differ
    FORGED = 3  # not signed by its publisher
    OVER_QUOTA = 4  # too much of this publisher or under this key
    FULL = 5  # no key farther from us could make room
    FAR = 6  # others are much nearer to the key


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Quotas of a store. Byte quotas count values, suffixes and a fixed overhead per record."""

    records: int = DHT_STORED_RECORDS
    bytes: int = DHT_STORED_BYTES
    records_per_key: int = DHT_RECORDS_PER_KEY
    bytes_per_key: int = DHT_BYTES_PER_KEY
    records_per_publisher: int = DHT_RECORDS_PER_PUBLISHER
    bytes_per_publisher: int = DHT_BYTES_PER_PUBLISHER
    suffixes_per_key: int = DHT_SUFFIXES_PER_KEY  # of one publisher
    bytes_per_key_and_publisher: int = DHT_BYTES_PER_KEY_AND_PUBLISHER


@dataclass(slots=True)
class _Shelf:
    """The records under one key, by sub-key."""

    records: dict[bytes, Record] = field(default_factory=dict)
    users: dict[bytes, User] = field(default_factory=dict)  # each record's publisher, and the place it came from
    bytes: int = 0
    publishers: Counter[PeerId] = field(default_factory=Counter)
    bytes_by: Counter[PeerId] = field(default_factory=Counter)


@dataclass(slots=True)
class _Account:
    records: int = 0
    bytes: int = 0


class Store:
    """The records that peer `own` stores for the swarm. `wall` is corrected Unix time in seconds."""

    def __init__(
        self, own: PeerId, verifier: Verifier, limits: StoreLimits | None = None, book: Book | None = None
    ) -> None:
        """`book`: accounts for each user's share; without it, places are not bounded."""
        self._place = place(own.key)
        self._verifier = verifier
        self._limits = limits or StoreLimits()
        whole = self._limits.bytes
        self._book = book or Book({Resource.DIRECTORY: Bounds(total=whole, peer=whole, place=whole, region=whole)})
        self._shelves: dict[Key, _Shelf] = {}
        self._accounts: dict[PeerId, _Account] = {}
        self._bytes = 0
        self._records = 0
        self._expiries: list[tuple[int, Key, bytes]] = []  # (expires_ms, key, sub-key); outdated entries remain
        self._farthest: list[tuple[int, Key]] = []  # (minus distance, key); outdated entries remain

    def __len__(self) -> int:
        return self._records

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def keys(self) -> list[Key]:
        """Every key with records."""
        return list(self._shelves)

    def offer(self, wall: float, record: Record, sender: User = _HERE) -> tuple[Verdict, int]:
        """Store the record if it is acceptable. Returns the verdict and the version stored afterwards (0 if none).

        `sender`: the peer that sent it, whether or not it is the publisher.
        """
        held = self._held(record)
        version = held.version if held is not None else 0
        user = User(record.publisher.text, sender.place, sender.region)
        if held == record:
            if sender.peer == user.peer:
                self._settle(record, user)
            return Verdict.STORED, version
        if not record.is_timely(wall):
            return Verdict.UNTIMELY, version
        if held is not None and not record.beats(held):
            return Verdict.STALE, version
        if not self._verifier.genuine(record):
            return Verdict.FORGED, version
        self.purge(wall)
        held = self._held(record)
        refusal = self._make_room(record, held, user)
        if refusal is not None:
            return refusal, version
        if held is not None:
            self._drop(held)
        self._put(record, user)
        return Verdict.STORED, record.version

    def _settle(self, record: Record, user: User) -> None:
        """Charge a record, first offered by another peer, to the address from which its publisher now offers it."""
        users, size = self._shelves[record.key].users, _size(record)
        before = users[record.sub_key]
        if before != user and self._book.take(Resource.DIRECTORY, user, size) is None:
            self._book.give(Resource.DIRECTORY, before, size)
            users[record.sub_key] = user

    def get(self, wall: float, key: Key, most_bytes: int = 0) -> list[Record]:
        """Unexpired records under `key`, including tombstones, by sub-key.

        If the records exceed `most_bytes`, only a part that fits is returned. Members and strangers then take turns,
        within these the regions, within a region its places, and within a place its publishers: the next is always the
        one with the fewest bytes so far, so that neither large records nor many from one place exclude others'. The
        records are then in that order.
        """
        shelf = self._shelves.get(key)
        if shelf is None:
            return []
        held = [record for _, record in sorted(shelf.records.items()) if record.is_live(wall)]
        if not most_bytes or sum(map(answer_bytes, held)) <= most_bytes:
            return held
        chosen, left = list[Record](), most_bytes
        for record in self._in_turns(held, shelf.users):
            if (size := answer_bytes(record)) <= left:  # a later, smaller record may still fit
                chosen.append(record)
                left -= size
        return chosen

    def _in_turns(self, held: Iterable[Record], users: dict[bytes, User]) -> list[Record]:
        tree: dict[bool, dict[str, dict[str, dict[str, list[Record]]]]] = {}
        strange = {peer: not self._book.is_member(peer) for peer in {user.peer for user in users.values()}}
        for record in sorted(held, key=answer_bytes):
            user = users[record.sub_key]
            places = tree.setdefault(strange[user.peer], {}).setdefault(user.region, {})
            places.setdefault(user.place, {}).setdefault(user.peer, []).append(record)
        return _taking_turns(
            {
                strange: _taking_turns(
                    {
                        region: _taking_turns({name: _taking_turns(publishers) for name, publishers in places.items()})
                        for region, places in regions.items()
                    }
                )
                for strange, regions in tree.items()
            }
        )

    def purge(self, wall: float) -> int:
        """Drop records that have expired by more than the clock tolerance; returns their number."""
        before = self._records
        while self._expiries and self._expiries[0][0] / 1000 + CLOCK_TOLERANCE_S <= wall:
            expires_ms, key, sub_key = heapq.heappop(self._expiries)
            shelf = self._shelves.get(key)
            record = shelf.records.get(sub_key) if shelf is not None else None
            if record is not None and record.expires_ms == expires_ms:
                self._drop(record)
        if len(self._expiries) > 2 * self._records + 64:
            self._rebuild()
        return before - self._records

    def check(self) -> None:
        """Raise LocalError if an invariant is broken."""
        limits = self._limits
        records = [record for shelf in self._shelves.values() for record in shelf.records.values()]
        if len(records) != self._records or sum(map(_size, records)) != self._bytes:
            raise LocalError("the store's counts are wrong")
        if self._records > limits.records or self._bytes > limits.bytes:
            raise LocalError("the store exceeds its limits")
        for key, shelf in self._shelves.items():
            if not shelf.records or any(record.key != key for record in shelf.records.values()):
                raise LocalError("a shelf is empty or holds another key's record")
            if shelf.bytes != sum(map(_size, shelf.records.values())) or shelf.bytes > limits.bytes_per_key:
                raise LocalError("a shelf's bytes are wrong or too many")
            if len(shelf.records) > limits.records_per_key or shelf.publishers.total() != len(shelf.records):
                raise LocalError("a shelf's records are miscounted or too many")
            if (
                max(shelf.bytes_by.values()) > limits.bytes_per_key_and_publisher
                or shelf.bytes_by.total() != shelf.bytes
            ):
                raise LocalError("the store's count of a publisher's records is wrong or above its limit")
            if shelf.users.keys() != shelf.records.keys():
                raise LocalError("a shelf lacks the origin of some records")
        if self._book.used(Resource.DIRECTORY) != self._bytes:
            raise LocalError("the book and the store differ")
        for publisher, account in self._accounts.items():
            theirs = [record for record in records if record.publisher == publisher]
            if (len(theirs), sum(map(_size, theirs))) != (account.records, account.bytes):
                raise LocalError("a publisher's account is wrong")
            if account.records > limits.records_per_publisher or account.bytes > limits.bytes_per_publisher:
                raise LocalError("a publisher exceeds its limits")

    def _held(self, record: Record) -> Record | None:
        shelf = self._shelves.get(record.key)
        return shelf.records.get(record.sub_key) if shelf is not None else None

    def _make_room(self, record: Record, held: Record | None, user: User) -> Verdict | None:
        """Make room for the record, which replaces `held`. Returns None, or the verdict if it exceeds a quota."""
        limits, new = self._limits, 0 if held is not None else 1
        size = _size(record) - (_size(held) if held is not None else 0)
        shelf = self._shelves.get(record.key) or _Shelf()
        account = self._accounts.get(record.publisher) or _Account()
        if (
            shelf.publishers[record.publisher] + new > limits.suffixes_per_key
            or shelf.bytes_by[record.publisher] + size > limits.bytes_per_key_and_publisher
            or account.records + new > limits.records_per_publisher
            or account.bytes + size > limits.bytes_per_publisher
        ):
            return Verdict.OVER_QUOTA
        leaving = self._to_give_way(shelf, record, size, new, user)
        if leaving is None:
            return Verdict.OVER_QUOTA
        distance = place(record.key) ^ self._place
        while self._records + new > limits.records or self._bytes + size > limits.bytes:
            if not self._evict_beyond(distance):
                return Verdict.FULL
        moves = held is not None and shelf.users[held.sub_key] != user
        if self._book.objection(Resource.DIRECTORY, user, _size(record) if moves else max(size, 0)) is not None:
            return Verdict.OVER_QUOTA
        for other in leaving:
            self._drop(other)
        return None

    def _to_give_way(self, shelf: _Shelf, record: Record, size: int, new: int, user: User) -> list[Record] | None:
        """Records under this key to drop for `size` more bytes of `user`, or None if it may not displace others.

        Nothing is dropped if the user's region would then have more than the region that loses; within a region its
        places are compared, within a place its publishers. So repeated offers of the same records reach a stable state.
        """
        limits, leaving = self._limits, list[Record]()
        if len(shelf.records) + new <= limits.records_per_key and shelf.bytes + size <= limits.bytes_per_key:
            return leaving
        has: Counter[tuple[int, str]] = Counter()
        for sub_key, one in shelf.records.items():
            for scope, name in enumerate(shelf.users[sub_key]):
                has[scope, name] += _size(one)
        strange = {
            peer: not self._book.is_member(peer) for peer in {user.peer, *(u.peer for u in shelf.users.values())}
        }

        def fullness(of: User) -> tuple[bool, int, int, int]:
            return strange[of.peer], has[2, of.region], has[1, of.place], has[0, of.peer]

        rest = {sub_key: one for sub_key, one in shelf.records.items() if sub_key != record.sub_key}
        count, total = len(shelf.records) + new, shelf.bytes + size
        while count > limits.records_per_key or total > limits.bytes_per_key:
            # The largest record of a publisher first, so that few are dropped.
            most = max(rest, key=lambda sub_key: (*fullness(shelf.users[sub_key]), _size(rest[sub_key])), default=None)
            if most is None or not _outweighs(shelf.users[most], user, fullness, size):
                return None
            other = rest.pop(most)
            leaving.append(other)
            count, total = count - 1, total - _size(other)
            for scope, name in enumerate(shelf.users[most]):
                has[scope, name] -= _size(other)
        return leaving

    def _evict_beyond(self, distance: int) -> bool:
        """Drop the farthest key if it is farther than `distance`; returns True if it was dropped."""
        while self._farthest:
            minus_distance, key = self._farthest[0]
            if key in self._shelves and -minus_distance <= distance:
                return False
            heapq.heappop(self._farthest)
            if key in self._shelves:
                for record in list(self._shelves[key].records.values()):
                    self._drop(record)
                return True
        return False

    def _put(self, record: Record, user: User) -> None:
        shelf = self._shelves.get(record.key)
        if shelf is None:
            shelf = self._shelves[record.key] = _Shelf()
            heapq.heappush(self._farthest, (-(place(record.key) ^ self._place), record.key))
        account = self._accounts.setdefault(record.publisher, _Account())
        size = _size(record)
        if self._book.take(Resource.DIRECTORY, user, size) is not None:
            raise LocalError("no room for an accepted record")
        shelf.records[record.sub_key] = record
        shelf.users[record.sub_key] = user
        shelf.publishers[record.publisher] += 1
        shelf.bytes_by[record.publisher] += size
        shelf.bytes += size
        account.records += 1
        account.bytes += size
        self._records += 1
        self._bytes += size
        heapq.heappush(self._expiries, (record.expires_ms, record.key, record.sub_key))

    def _drop(self, record: Record) -> None:
        shelf, account, size = self._shelves[record.key], self._accounts[record.publisher], _size(record)
        del shelf.records[record.sub_key]
        self._book.give(Resource.DIRECTORY, shelf.users.pop(record.sub_key), size)
        shelf.publishers[record.publisher] -= 1
        shelf.bytes_by[record.publisher] -= size
        if not shelf.publishers[record.publisher]:
            del shelf.publishers[record.publisher], shelf.bytes_by[record.publisher]
        shelf.bytes -= size
        account.records -= 1
        account.bytes -= size
        self._records -= 1
        self._bytes -= size
        if not shelf.records:
            del self._shelves[record.key]
        if not account.records:
            del self._accounts[record.publisher]

    def _rebuild(self) -> None:
        """Remove outdated entries from the heaps, so that a publisher that renews often does not make them grow."""
        self._expiries = [
            (record.expires_ms, key, sub_key)
            for key, shelf in self._shelves.items()
            for sub_key, record in shelf.records.items()
        ]
        self._farthest = [(-(place(key) ^ self._place), key) for key in self._shelves]
        heapq.heapify(self._expiries)
        heapq.heapify(self._farthest)


def answer_bytes(record: Record) -> int:
    """Upper bound on the bytes of a record in an answer."""
    return len(record.value) + len(record.suffix) + _ANSWER_OVERHEAD_BYTES


def is_large(record: Record) -> bool:
    """Return True if the record is so large that sending its tag instead pays off."""
    return answer_bytes(record) >= _LARGE_BYTES


def _taking_turns(queues: Mapping[N, list[Record]]) -> list[Record]:
    """Merge the queues: the next record is from the queue with the fewest bytes so far, of equals the first by name."""
    turns = [(answer_bytes(queue[0]), name, 0) for name, queue in queues.items()]
    heapq.heapify(turns)
    order = []
    while turns:
        given, name, index = heapq.heappop(turns)
        queue = queues[name]
        order.append(queue[index])
        if index + 1 < len(queue):
            heapq.heappush(turns, (given + answer_bytes(queue[index + 1]), name, index + 1))
    return order


def _size(record: Record) -> int:
    return len(record.value) + len(record.suffix) + _OVERHEAD_BYTES


def _outweighs(one: User, other: User, fullness: Callable[[User], tuple[bool, int, int, int]], size: int) -> bool:
    """Return True if `one` has more than `other` would with `size` more, in the widest scope that they do not share."""
    (strange, region, place_, peer), (others_strange, others_region, others_place, others) = (
        fullness(one),
        fullness(other),
    )
    if strange != others_strange:
        return strange
    if one.region != other.region:
        return region > others_region + size
    if one.place != other.place:
        return place_ > others_place + size
    return one.peer != other.peer and peer > others + size
