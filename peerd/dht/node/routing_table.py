"""The routing table: known peers in buckets by xor distance from ourselves (Kademlia, section 2.2).

Bucket i holds up to k peers whose distance has bit length i. The farthest buckets, to which half, a quarter, ... of all
peers belong, may hold more, because each doubling saves every lookup there one bit of distance (as in libtorrent). Old
peers stay: a newcomer to a full bucket waits in the bucket's reserve until an old peer is removed. But if one network
crowds the bucket, its newest peer is replaced, so that an attacker with one network cannot fill our table; while there
is room, nobody is rejected. Does not decide which peers are alive: the caller probes the peers that `add` returns, and
removes silent ones.

Invariants (`check`): every peer is in the bucket of its distance; no bucket exceeds its size, nor k peers in reserve;
no peer is there twice; we are not in it ourselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import LocalError
from peerd.core.ids import Key, PeerId

KEY_BITS = 256
_NETWORK_SHARE = 4  # divisor: one network may hold a quarter of a full bucket


def place(key: Key) -> int:
    """The key as an integer; the distance of two places is their xor."""
    return int.from_bytes(key.raw, "big")


def network_of(addrs: Iterable[bytes]) -> bytes | None:
    """The network of a peer's first public address: an IPv4 /24 or IPv6 /48, or None if it has no public address."""
    for addr in addrs:
        if addr[:1] == b"\x04" and len(addr) >= 5 and not _is_private(addr[1], addr[2]):
            return addr[:4]
        if addr[:1] == b"\x29" and len(addr) >= 17 and addr[1] & 0xE0 == 0x20:  # 2000::/3, the global unicast range
            return addr[:7]
    return None


def _is_private(first: int, second: int) -> bool:
    """Return True for RFC 1918, loopback, link-local and carrier-grade NAT addresses, by their first two bytes."""
    return (
        first in (10, 127)
        or (first, second) in ((192, 168), (169, 254))
        or (first == 172 and 16 <= second < 32)
        or (first == 100 and 64 <= second < 128)
    )


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer and its addresses, as it states them: multiaddrs in binary form, opaque here."""

    peer: PeerId
    addrs: tuple[bytes, ...] = ()
    place: int = field(init=False, compare=False, repr=False)
    network: bytes | None = field(init=False, compare=False, repr=False)  # see `network_of`

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", place(self.peer.key))
        object.__setattr__(self, "network", network_of(self.addrs))


@dataclass(slots=True)
class _Seat:
    contact: Contact
    bucket: int
    since: float  # when it entered the table
    seen: float  # when it last sent us a message


@dataclass(slots=True)
class _Bucket:
    reserve: BoundedDict[bytes, Contact]  # latest newcomer last
    seats: dict[bytes, _Seat] = field(default_factory=dict)  # by raw peer id; least recently seen first
    refreshed: float = 0.0


class Table:
    """The routing table of peer `own`. Times are monotonic, in seconds."""

    def __init__(self, own: PeerId, k: int = 20, wide: Sequence[int] = ()) -> None:
        """`wide`: sizes of the farthest buckets, the farthest first."""
        self._own = own
        self._place = place(own.key)
        self.k = k
        self._wide = {KEY_BITS - i: max(k, room) for i, room in enumerate(wide)}
        self._buckets: dict[int, _Bucket] = {}
        self._seats: dict[bytes, _Seat] = {}  # of all buckets, by raw peer id

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, peer: PeerId) -> bool:
        return peer.raw in self._seats

    def __iter__(self) -> Iterator[Contact]:
        return (seat.contact for seat in self._seats.values())

    def room(self, index: int) -> int:
        """Size limit of bucket `index`."""
        return self._wide.get(index, self.k)

    def contact(self, peer: PeerId) -> Contact | None:
        """The contact of a peer in the table, or None."""
        seat = self._seats.get(peer.raw)
        return seat.contact if seat is not None else None

    def seen_at(self, peer: PeerId) -> float | None:
        """Time of the last message from a peer in the table, or None if it is not there."""
        seat = self._seats.get(peer.raw)
        return seat.seen if seat is not None else None

    def add(self, now: float, contact: Contact) -> tuple[bool, Contact | None]:
        """Add a peer that sent us a message itself, or update its contact and the time of its last message.

        Returns whether it newly entered the table, and if the bucket is full, its least recently seen peer, to be
        probed.
        """
        raw = contact.peer.raw
        if raw == self._own.raw:
            return False, None
        if raw in self._seats:
            self._seats[raw].contact = contact
            self.seen(now, contact.peer)
            return False, None
        index = self._index(contact.place)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket(BoundedDict(self.k), refreshed=now)
        if len(bucket.seats) >= (room := self.room(index)) and not self._make_room(bucket, contact, room):
            bucket.reserve[raw] = contact
            return False, next(iter(bucket.seats.values())).contact
        bucket.reserve.pop(raw, None)
        bucket.seats[raw] = self._seats[raw] = _Seat(contact, index, now, now)
        return True, None

    def seen(self, now: float, peer: PeerId) -> None:
        """Record a sign of life of a peer in the table."""
        seat = self._seats.get(peer.raw)
        if seat is not None:
            seat.seen = now
            seats = self._buckets[seat.bucket].seats
            seats[peer.raw] = seats.pop(peer.raw)  # to the end

    def remove(self, peer: PeerId) -> Contact | None:
        """Remove a peer; returns the latest newcomer in the bucket's reserve, to be probed and added, or None."""
        seat = self._seats.pop(peer.raw, None)
        if seat is None:
            bucket = self._buckets.get(self._index(place(peer.key)))
            if bucket is not None:
                bucket.reserve.pop(peer.raw, None)
            return None
        bucket = self._buckets[seat.bucket]
        del bucket.seats[peer.raw]
        return bucket.reserve.popitem(last=True)[1] if bucket.reserve else None

    def closest(self, target: int, count: int, usable: Callable[[PeerId], bool] | None = None) -> list[Contact]:
        """Up to `count` contacts of the table that are `usable`, nearest to `target` first."""
        index = self._index(target)
        # Bucket `index` is on the target's side of the tree, lower ones are nearer to us, higher ones farther away: no
        # peer of a later group is nearer to the target than a peer of an earlier group.
        groups = [[index], [i for i in self._buckets if i < index]]
        groups += [[i] for i in sorted(i for i in self._buckets if i > index)]
        found: list[Contact] = []
        for group in groups:
            members = [
                (seat.contact.place ^ target, seat.contact)
                for i in group
                if (bucket := self._buckets.get(i)) is not None
                for seat in bucket.seats.values()
                if usable is None or usable(seat.contact.peer)
            ]
            members.sort()  # distances differ, so contacts are never compared
            found += [contact for _, contact in members]
            if len(found) >= count:
                break
        return found[:count]

    def longest_unseen(self) -> list[tuple[float, Contact]]:
        """The least recently seen peer of each k-bucket, with the time of its last message."""
        firsts = (next(iter(bucket.seats.values()), None) for bucket in self._buckets.values())
        return [(seat.seen, seat.contact) for seat in firsts if seat is not None]

    def refresh_due(self, now: float, every_s: float) -> list[int]:
        """Indexes of buckets without a search for `every_s`, from the nearest occupied one outwards; marks them
        searched.

        Includes empty buckets beyond the nearest occupied one, because peers may have joined there.
        """
        if not self._seats:
            return []
        nearest = min(i for i, bucket in self._buckets.items() if bucket.seats)
        due = []
        for index in range(nearest, KEY_BITS + 1):
            bucket = self._buckets.get(index)
            if bucket is None:
                bucket = self._buckets[index] = _Bucket(BoundedDict(self.k), refreshed=now - every_s)
            if now - bucket.refreshed >= every_s:
                bucket.refreshed = now
                due.append(index)
        return due

    def searched(self, now: float, target: int) -> None:
        """Record a lookup towards `target`: its bucket needs no refresh for a while."""
        bucket = self._buckets.get(self._index(target))
        if bucket is not None:
            bucket.refreshed = now

    def key_in(self, index: int, rng: random.Random) -> Key:
        """A random key in bucket `index`."""
        if not 1 <= index <= KEY_BITS:
            raise LocalError(f"there is no bucket {index}")
        distance = (1 << (index - 1)) | rng.getrandbits(index - 1) if index > 1 else 1
        return Key((self._place ^ distance).to_bytes(32, "big"))

    def check(self) -> None:
        """Raise LocalError if an invariant is broken."""
        seats: dict[bytes, _Seat] = {}
        for index, bucket in self._buckets.items():
            seats |= bucket.seats
            if len(bucket.seats) > self.room(index) or len(bucket.reserve) > self.k:
                raise LocalError(f"bucket {index} holds {len(bucket.seats)} peers and {len(bucket.reserve)} in reserve")
            if bucket.seats.keys() & bucket.reserve.keys():
                raise LocalError(f"bucket {index} holds a peer twice")
            members = [seat.contact for seat in bucket.seats.values()] + list(bucket.reserve.values())
            if any(self._index(c.place) != index or c.peer == self._own for c in members):
                raise LocalError(f"bucket {index} holds a peer that does not belong there")
            times = [seat.seen for seat in bucket.seats.values()]
            if times != sorted(times):
                raise LocalError(f"bucket {index} is not in the order of last messages")
        if seats != self._seats:
            raise LocalError(f"{len(self._seats)} peers are seated, {len(seats)} in buckets")

    def _index(self, target: int) -> int:
        return (self._place ^ target).bit_length()

    def _make_room(self, bucket: _Bucket, newcomer: Contact, room: int) -> bool:
        """Remove the newest peer of a network that crowds the full `bucket`, if the newcomer's network is rarer."""
        networks = Counter(seat.contact.network for seat in bucket.seats.values())
        del networks[None]
        if not networks:
            return False
        crowd, size = networks.most_common(1)[0]
        share = max(1, room // _NETWORK_SHARE)
        if size <= share or networks[newcomer.network] >= share:
            return False
        crowded = [seat for seat in bucket.seats.values() if seat.contact.network == crowd]
        newest = max(crowded, key=lambda seat: seat.since).contact.peer.raw
        del bucket.seats[newest], self._seats[newest]
        return True
