"""Book: how much of this host's resources each peer, address and network uses, and how much it may use.

Identities are free, addresses cost something, and networks cost more. So every resource is bounded per peer, per place
(an IPv4 address or an IPv6 /64) and per region (a /24 or a /48), and a part of it is reserved for members of the run.
Strangers are bounded by all three, members by peer and by place. The members of one place may use half, because a
household or laboratory may have many, but one machine can also have any number of identities. Sans-IO: the caller
reports which user takes how much, and when it is returned. Invariants (`check`): no bound is exceeded; no user returns
more than it took; a user without any use is not stored. Hostile input: any number of identities at any number of
places; each user in a table has at least one unit of a bounded total, so the tables are bounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import Final, NamedTuple, TypeVar
from weakref import WeakMethod

from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import block_of, ip_of, is_relayed, place_of
from peerd.core.errors import LocalError

K = TypeVar("K")
NEAR: Final = "near "  # prefix of the region of private and loopback addresses
REGION: Final = 2  # result of `Book.scope`: the bound of the user's region is reached
EVERYBODY: Final = 3  # result of `Book.scope`: the total bound is reached


class Resource(StrEnum):
    """Resources that a host shares among its peers; the values are for display."""

    RECEIVING = "bytes being received"
    ANSWERS = "bytes of unread answers"
    STREAMS = "streams"
    CALLS = "calls"
    LINKS = "connections"
    DIRECTORY = "bytes in the directory"
    DIALS = "dials for others in a minute"
    UNPROVEN = "calls with a false proof in a minute"


class User(NamedTuple):
    """A user of resources: peer id ("" until proven), place (IPv4 address or IPv6 /64) and region (/24 or /48)."""

    peer: str
    place: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one resource: in total, per peer, and for strangers also per place and per region.

    The members of one place together have the limit of the strangers of one region.
    """

    total: int
    peer: int
    place: int
    region: int
    reserved: int = 0  # part of the total that only members may use


def shared_out(total: int, peer: int, *, kept: bool = True) -> Bounds:
    """The usual bounds of a resource: a quarter for one place, half for one region, and a quarter reserved for members.

    `kept`: False if nothing is reserved.
    """
    place, region = max(1, total // 4), max(1, total // 2)
    return Bounds(total=total, peer=peer, place=place, region=region, reserved=total // 4 if kept else 0)


BOUNDS: Final[Mapping[Resource, Bounds]] = {
    Resource.RECEIVING: shared_out(limits.RPC_RECEIVING_BYTES, limits.RPC_RECEIVING_BYTES_PER_PEER),
    Resource.ANSWERS: shared_out(limits.ANSWER_BYTES, limits.ANSWER_BYTES_PER_PEER),
    Resource.STREAMS: shared_out(limits.STREAMS_HOST, limits.STREAMS_INBOUND),
    Resource.CALLS: shared_out(limits.CALLS_HOST, limits.CALLS_HOST // 8),
    Resource.LINKS: shared_out(limits.LINKS_INBOUND, limits.LINKS_PER_PEER),
    Resource.DIRECTORY: shared_out(limits.DHT_STORED_BYTES, limits.DHT_BYTES_PER_PUBLISHER, kept=False),
    Resource.DIALS: shared_out(limits.HEARSAY_PER_MINUTE, limits.HEARSAY_PER_MINUTE // 8),
    Resource.UNPROVEN: shared_out(limits.UNPROVEN_PER_MINUTE, limits.UNPROVEN_PER_MINUTE // 8),
}


def user_at(peer: str, remote: Multiaddr) -> User:
    """The user in whose account the resources of `peer`, connected from `remote`, are booked.

    The address of a peer that connects over a relay is unknown: all peers of one relay share the relay's place and
    region, under names of their own, so that they do not use up the share of the relay's neighbours. A private or
    loopback address more often belongs to many honest peers (a laboratory, a test on one machine) than to an attacker,
    who would need access to it. So a private place has the bound of a region, and a private region only the total bound
    of strangers.
    """
    ip = ip_of(remote)
    if ip is None:
        return User(peer, str(remote), str(remote))
    place, region = place_of(ip)
    if is_relayed(remote):
        return User(peer, f"over {place}", f"over {region}")
    return User(peer, place, region if block_of(ip) is None else NEAR + region)


@dataclass(frozen=True, slots=True)
class Use:
    """The largest users of one resource, and the bounds for strangers."""

    means: Resource
    bounds: Bounds
    used: int
    peer: tuple[str, int]  # "" and 0 if it is unused
    place: tuple[str, int]
    region: tuple[str, int]


class ShareAccount:
    """The use of one resource by user. `Book` has one account per resource, and each busy method one for its calls."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.used = 0
        self.by: dict[User, int] = {}
        self.sums: tuple[dict[str, int], dict[str, int], dict[str, int]] = {}, {}, {}  # by peer, place, region

    def objection(self, user: User, amount: int, member: bool) -> tuple[int, str] | None:
        """The first exceeded bound (0 peer, 1 place, REGION, EVERYBODY) and the amount in use within it, or None."""
        bounds, (peer, place, region) = self.bounds, (self.sums[n].get(name, 0) for n, name in enumerate(user))
        if user.peer and peer + amount > bounds.peer:
            return 0, f"this peer has {peer}"
        near = user.region.startswith(NEAR)
        if place + amount > self._of_place(near, member):
            return 1, f"{user.place} has {place}"
        if region + amount > bounds.region and not near and not member:
            return REGION, f"{user.region} has {region}"
        if self.used + amount > bounds.total - (0 if member else bounds.reserved):
            return EVERYBODY, f"all together have {self.used}"
        return None

    def _of_place(self, near: bool, member: bool) -> int:
        """The bound of one place; higher for members."""
        bounds = self.bounds
        if member:
            return bounds.total - bounds.reserved if near else bounds.region
        return bounds.region if near else bounds.place

    def add(self, user: User, amount: int) -> None:
        """Add `amount`, which may be negative, to the use of `user`."""
        self.used += amount
        _add(self.by, user, amount)
        for table, name in zip(self.sums, user, strict=True):
            _add(table, name, amount)


def _add(table: dict[K, int], name: K, amount: int) -> None:
    left = table.get(name, 0) + amount
    if left < 0:
        raise LocalError("more was returned than taken")
    if left:
        table[name] = left
    else:
        table.pop(name, None)


class Book:
    """The accounts of all resources of one host."""

    def __init__(self, bounds: Mapping[Resource, Bounds] | None = None) -> None:
        self._accounts = {means: ShareAccount(bound) for means, bound in (bounds or BOUNDS).items()}
        self._members: list[Callable[[], Callable[[str], bool] | None]] = []

    def members_by(self, knows: Callable[[str], bool]) -> None:
        """Register a function that returns True if a peer is proven to be a member of the run; a claim is not enough.

        A bound method is kept only as long as its object lives, because roles end and start again.
        """
        self._members = [known for known in self._members if known() is not None]
        self._members.append(WeakMethod(knows) if isinstance(knows, MethodType) else lambda: knows)

    def is_member(self, peer: str) -> bool:
        """Return True if a registered function knows the peer as a member."""
        return any((knows := known()) is not None and knows(peer) for known in self._members)

    def objection(self, means: Resource, user: User, amount: int = 1) -> str | None:
        """Reason why `user` may not use `amount` more, or None if it may."""
        closed = self._accounts[means].objection(user, amount, self.is_member(user.peer))
        return None if closed is None else closed[1]

    def scope(self, means: Resource, user: User) -> int | None:
        """The exhausted bound: 0 the peer's, 1 its place's, REGION, EVERYBODY; None if one more fits."""
        closed = self._accounts[means].objection(user, 1, self.is_member(user.peer))
        return None if closed is None else closed[0]

    def take(self, means: Resource, user: User, amount: int = 1) -> str | None:
        """Book `amount` more for `user` and return None, or return the reason if that would exceed a bound."""
        account = self._accounts[means]
        # Checked as a stranger first: most takes are far below those bounds, which saves looking up the members.
        closed = account.objection(user, amount, member=False)
        if closed and self.is_member(user.peer):
            closed = account.objection(user, amount, member=True)
        if closed is None:
            account.add(user, amount)
            return None
        return closed[1]

    def give(self, means: Resource, user: User, amount: int = 1) -> None:
        """Return `amount` of `user`. Raises LocalError if it did not have that much."""
        self._accounts[means].add(user, -amount)

    def used(self, means: Resource, user: User | None = None) -> int:
        """The amount in use by `user`, or in total."""
        account = self._accounts[means]
        return account.used if user is None else account.by.get(user, 0)

    def fullness(self, means: Resource, user: User) -> tuple[bool, int, int, int]:
        """Sort key of a user: the user with the greatest key loses resources first.

        True for a stranger, then the use of its region, of its place and of the peer itself.
        """
        peers, places, regions = self._accounts[means].sums
        strange = not self.is_member(user.peer)
        return strange, regions.get(user.region, 0), places.get(user.place, 0), peers.get(user.peer, 0)

    def told(self) -> list[Use]:
        """Values for the status: each resource's use and its largest users."""
        found = []
        for means, account in self._accounts.items():
            most = [max(table.items(), key=lambda item: (item[1], item[0]), default=("", 0)) for table in account.sums]
            found.append(Use(means, account.bounds, account.used, *most))
        return found

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for account in self._accounts.values():
            assert account.used == sum(account.by.values()) <= account.bounds.total
            assert all(amount > 0 for amount in account.by.values())
            for number, table in enumerate(account.sums):
                assert sum(table.values()) == account.used
                for name, amount in table.items():
                    assert amount == sum(has for user, has in account.by.items() if user[number] == name) > 0
