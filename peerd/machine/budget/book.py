"""The book: what each peer, address and network has of this host's means, and what each may have.

Identities are free, addresses cost something, networks more: so every means is bounded by peer, by place (an IPv4
address, an IPv6 /64) and by region (a /24, a /48), and a part of it is kept for members of the run. Strangers are
bounded by all three, members by peer and by place: those of one place may have half, for a household or a laboratory
may bring many, and one machine can be any number of identities. Sans-IO: the caller says which user takes what, and
gives it back. Invariants (`check`): no bound is exceeded; what is given back was taken; no user
that has nothing is remembered. Hostile input: any number of identities at any number of places; the table of each means
is as long as its users are many, and each has at least one unit of what is bounded in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
NEAR: Final = "near "  # begins the region of private and loopback addresses
REGION: Final = 2  # the number of a user's region in what `Book.scope` and `Book.fullness` say
EVERYBODY: Final = 3


class Means(StrEnum):
    """Resources that a host shares out; the values are how people read them."""

    RECEIVING = "bytes being received"
    ANSWERS = "bytes of unread answers"
    STREAMS = "streams"
    CALLS = "calls"
    LINKS = "connections"
    DIRECTORY = "bytes in the directory"
    DIALS = "dials for others in a minute"
    UNPROVEN = "calls with a false proof in a minute"


class User(NamedTuple):
    """A user of resources: the peer (text of its id; "" before it has proven one), and where it connects from."""

    peer: str
    place: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one resource: in total, of one peer, and, for strangers, of one place and region.

    Members of one place have the room that strangers of one region have.
    """

    total: int
    peer: int
    place: int
    region: int
    reserved: int = 0  # of the total, for members alone


def shared_out(total: int, peer: int, *, kept: bool = True) -> Bounds:
    """Bounds as nearly every means has them: a quarter for one place, half for one region, a quarter kept for members.

    `kept`: False where everybody may use all of it.
    """
    place, region = max(1, total // 4), max(1, total // 2)
    return Bounds(total=total, peer=peer, place=place, region=region, reserved=total // 4 if kept else 0)


BOUNDS: Final[Mapping[Means, Bounds]] = {
    Means.RECEIVING: shared_out(limits.RPC_RECEIVING_BYTES, limits.RPC_RECEIVING_BYTES_PER_PEER),
    Means.ANSWERS: shared_out(limits.ANSWER_BYTES, limits.ANSWER_BYTES_PER_PEER),
    Means.STREAMS: shared_out(limits.STREAMS_HOST, limits.STREAMS_INBOUND),
    Means.CALLS: shared_out(limits.CALLS_HOST, limits.CALLS_HOST // 8),
    Means.LINKS: shared_out(limits.LINKS_INBOUND, limits.LINKS_PER_PEER),
    Means.DIRECTORY: shared_out(limits.DHT_STORED_BYTES, limits.DHT_BYTES_PER_PUBLISHER, kept=False),
    Means.DIALS: shared_out(limits.HEARSAY_PER_MINUTE, limits.HEARSAY_PER_MINUTE // 8),
    Means.UNPROVEN: shared_out(limits.UNPROVEN_PER_MINUTE, limits.UNPROVEN_PER_MINUTE // 8),
}


def user_at(peer: str, remote: Multiaddr) -> User:
    """The user that the book knows `peer`, connected from `remote`, as.

    Over a relay nobody knows where it is: all who come over one relay share the relay's place and region, under a name
    of their own, so that they do not use up what peers beside the relay may have. A private or loopback address is one
    of many honest peers (a laboratory, a test on one machine) more often than one of an attacker, who would have to be
    there: such a place may have what a region has elsewhere, and such a region all that strangers may have.
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
    """The largest users of one means, and what each may have as a stranger."""

    means: Means
    bounds: Bounds
    used: int
    peer: tuple[str, int]  # "" and 0: nobody has any
    place: tuple[str, int]
    region: tuple[str, int]


class ShareAccount:
    """One resource: how much each user has. `Book` has one of each means, and each crowded method one of its calls."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.used = 0
        self.by: dict[User, int] = {}
        self.sums: tuple[dict[str, int], dict[str, int], dict[str, int]] = {}, {}, {}  # by peer, place, region

    def objection(self, user: User, amount: int, member: bool) -> tuple[int, str] | None:
        """The first bound that leaves no room (0 peer, 1 place, REGION, EVERYBODY), and what is in use within it."""
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
        """The most that one place may have: more for members, whatever strangers there have."""
        bounds = self.bounds
        if member:
            return bounds.total - bounds.reserved if near else bounds.region
        return bounds.region if near else bounds.place

    def add(self, user: User, amount: int) -> None:
        """`user` has so much more, or less."""
        self.used += amount
        _add(self.by, user, amount)
        for table, name in zip(self.sums, user, strict=True):
            _add(table, name, amount)


def _add(table: dict[K, int], name: K, amount: int) -> None:
    left = table.get(name, 0) + amount
    if left < 0:
        raise LocalError("more was given back than was taken")
    if left:
        table[name] = left
    else:
        table.pop(name, None)


class Book:
    """See the module's header. One for a host; all that share something out ask it."""

    def __init__(self, bounds: Mapping[Means, Bounds] | None = None) -> None:
        self._accounts = {means: ShareAccount(bound) for means, bound in (bounds or BOUNDS).items()}
        self._members: list[Callable[[], Callable[[str], bool] | None]] = []

    def members_by(self, knows: Callable[[str], bool]) -> None:
        """Ask `knows` too whether a peer is a member of the run: on evidence, not on the peer's own word.

        A method is asked for as long as its object lives: roles end, and begin anew.
        """
        self._members = [known for known in self._members if known() is not None]
        self._members.append(WeakMethod(knows) if isinstance(knows, MethodType) else lambda: knows)

    def is_member(self, peer: str) -> bool:
        """True when a registered source knows the peer as a member."""
        return any((knows := known()) is not None and knows(peer) for known in self._members)

    def objection(self, means: Means, user: User, amount: int = 1) -> str | None:
        """The reason why `user` cannot have so much more; None: there is room."""
        closed = self._accounts[means].objection(user, amount, self.is_member(user.peer))
        return None if closed is None else closed[1]

    def scope(self, means: Means, user: User, amount: int = 1) -> int | None:
        """The scope in which too much is in use for that: 0 the peer, 1 its place, REGION, EVERYBODY; None: there is
        room.
        """
        closed = self._accounts[means].objection(user, amount, self.is_member(user.peer))
        return None if closed is None else closed[0]

    def take(self, means: Means, user: User, amount: int = 1) -> str | None:
        """Write down that `user` has so much more, if there is room; else say why there is none."""
        account = self._accounts[means]
        # Most takes are far below every bound of a stranger, and then nobody needs to know the members.
        closed = account.objection(user, amount, member=False)
        if closed and self.is_member(user.peer):
            closed = account.objection(user, amount, member=True)
        if closed is None:
            account.add(user, amount)
            return None
        return closed[1]

    def give(self, means: Means, user: User, amount: int = 1) -> None:
        """`user` has so much less; LocalError when it never had it."""
        self._accounts[means].add(user, -amount)

    def used(self, means: Means, user: User | None = None) -> int:
        """The amount that `user` has, or all together."""
        account = self._accounts[means]
        return account.used if user is None else account.by.get(user, 0)

    def fullest(self, means: Means, among: Iterable[User]) -> User | None:
        """The first of these to lose something: of the fullest region the fullest place, of that the fullest peer.

        Strangers go before members; the first in order of those that are equal. None: nobody of them has any.
        """
        by = self._accounts[means].by
        return max((user for user in among if user in by), key=lambda user: self.fullness(means, user), default=None)

    def fullness(self, means: Means, user: User) -> tuple[bool, int, int, int]:
        """Sort key of `fullest`: stranger or not, then what its region, its place and the peer itself have."""
        peers, places, regions = self._accounts[means].sums
        strange = not self.is_member(user.peer)
        return strange, regions.get(user.region, 0), places.get(user.place, 0), peers.get(user.peer, 0)

    def told(self) -> list[Use]:
        """For people: of each resource, how much is in use, and its largest users."""
        found = []
        for means, account in self._accounts.items():
            most = [max(table.items(), key=lambda item: (item[1], item[0]), default=("", 0)) for table in account.sums]
            found.append(Use(means, account.bounds, account.used, *most))
        return found

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for account in self._accounts.values():
            assert account.used == sum(account.by.values()) <= account.bounds.total
            assert all(amount > 0 for amount in account.by.values())
            for number, table in enumerate(account.sums):
                assert sum(table.values()) == account.used
                for name, amount in table.items():
                    assert amount == sum(has for user, has in account.by.items() if user[number] == name) > 0
