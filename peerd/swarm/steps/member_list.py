"""Delta transfer of the conductor's member list: each response contains changes since a version, of bounded size.

`MemberList` is the conductor's side: every change of an entry gets the next version, so a response may end after any
change, and the next response continues from there. A reader gets the whole list if the list never had its
version, or no longer remembers the removals since then. `KnownMembers` is the reader's side. Versions begin at a random
number, so that a version of another conductor's list is not mistaken for one of this list.

Invariants (`check`): versions are unique; a reader that asks until there are no more changes has the list.

Hostile input: a conductor may send changes to a list that the reader does not have (ignored: the next request names the
reader's version again), and more and more members (a list that exceeds a run's limit is requested anew).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from msgspec import structs

from peerd.core.addr import ip_of, is_relayed, parse_addr, reach
from peerd.core.errors import ConfigError
from peerd.core.limits import MEMBER_ADDRS, MEMBER_NEWS_BYTES, MEMBERS
from peerd.messages.encoding import encode
from peerd.messages.swarm import MemberInfo, MemberNews
from peerd.swarm.posts import post_name

_NAME_OVERHEAD_BYTES = 2  # of one name in a message


class MemberList:
    """The conductor's side of one member list, which begins empty."""

    def __init__(self, rng: random.Random, news_bytes: int = MEMBER_NEWS_BYTES, most: int = MEMBERS) -> None:
        self.version = self._first = rng.randrange(1 << 32, 1 << 61)
        self._news_bytes, self._most = news_bytes, most
        # By post: the version of each entry's last change or removal, oldest first; `_order` has the same as pairs.
        self._at: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []
        self._given: dict[str, MemberInfo] = {}  # as passed to `update`
        self._entries: dict[str, MemberInfo] = {}  # as sent
        self._sizes: dict[str, int] = {}  # bytes in a response
        self._follows = -1

    def follow(self, version: int, members: Callable[[], Sequence[MemberInfo]]) -> None:
        """Call `update` if the `version` of the list's source has changed."""
        if version != self._follows:
            self._follows = version
            self.update(members())

    def update(self, members: Sequence[MemberInfo]) -> None:
        """Set the current members (if too many, only the first), each with its best addresses (`best_addrs`)."""
        given = {post_name(m.peer, m.stage): m for m in members[: self._most]}
        changed = [post for post in self._entries if post not in given]
        for post in changed:
            del self._entries[post]
            self._sizes[post] = len(post) + _NAME_OVERHEAD_BYTES
        for post, member in given.items():
            before = self._given.get(post)
            if before == member:
                continue
            same = before is not None and before.addrs == member.addrs  # parsing addresses is slow
            best = self._entries[post].addrs if same else best_addrs(member.addrs)
            entry = structs.replace(member, addrs=best)
            if entry != self._entries.get(post):
                self._entries[post], self._sizes[post] = entry, len(encode(entry))
                changed.append(post)
        self._given = given
        if changed:
            for post in changed:
                self.version += 1
                self._at.pop(post, None)
                self._at[post] = self.version
            self._forget()
            self._order = [(version, post) for post, version in self._at.items()]

    def _forget(self) -> None:
        """Forget the oldest removals: no more are remembered than there may be members."""
        gone = [post for post in self._at if post not in self._entries]
        for post in gone[: max(0, len(gone) - self._most)]:
            self._first = self._at.pop(post)  # readers with older versions would not learn of this removal
            del self._sizes[post]

    def news(self, version: int) -> MemberNews | None:
        """The changes since `version` that fit into one response, or None if there are none."""
        if version == self.version:
            return None
        since = version if self._first <= version < self.version else 0
        changed, gone, left = list[MemberInfo](), list[str](), self._news_bytes
        reached, begin = self.version, bisect_right(self._order, (since, "\x7f"))
        for at in range(begin, len(self._order)):
            post = self._order[at][1]
            if not since and post not in self._entries:
                continue
            left -= self._sizes[post]
            if left < 0 and (changed or gone):
                reached = self._order[at - 1][0]
                break
            if post in self._entries:
                changed.append(self._entries[post])
            else:
                gone.append(post)
        return MemberNews(since, reached, changed, gone, more=reached != self.version)

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        versions = list(self._at.values())
        assert versions == sorted(set(versions))
        assert max([self._first, *versions]) <= self.version
        assert self._entries.keys() <= self._at.keys() == self._sizes.keys()
        assert len(self._entries) <= self._most
        assert len(self._at) <= 2 * self._most


class KnownMembers:
    """The reader's copy of the list. Send `version` with the next request; call `forget` before asking another peer."""

    def __init__(self) -> None:
        self.version = 0
        self.more = False  # True: more changes can be requested at once
        self._members: dict[str, MemberInfo] = {}

    def forget(self) -> None:
        """Request the list from its beginning; the known entries remain until then."""
        self.version, self.more = 0, False

    def take(self, news: MemberNews | None) -> list[MemberInfo] | None:
        """Apply a response. Returns the whole list, sorted, once it is complete, otherwise None."""
        if news is None:
            return None
        if news.since == 0:
            self._members = {}
        elif not news.since <= self.version <= news.version:
            return None  # changes to another list
        for post in news.gone:
            self._members.pop(post, None)
        self._members |= {post_name(member.peer, member.stage): member for member in news.changed}
        self.version, self.more = news.version, news.more
        if len(self._members) > MEMBERS:
            self.forget()
            return None
        if news.more:
            return None
        return [self._members[post] for post in sorted(self._members)]


def best_addrs(addrs: Iterable[str]) -> list[str]:
    """At most `MEMBER_ADDRS` of one peer's addresses, the first of each kind before the second of any.

    The kinds, in order: public IPv4 addresses and DNS names; public IPv6; relayed; same network; same machine.
    """
    kinds: list[list[str]] = [[] for _ in range(5)]
    if len(given := list(dict.fromkeys(addrs))) <= MEMBER_ADDRS:
        return given
    for text in given:
        kind = _kind(text)
        if kind is not None:
            kinds[kind].append(text)
    return [text for row in zip_longest(*kinds) for text in row if text is not None][:MEMBER_ADDRS]


def _kind(text: str) -> int | None:
    """Index of the kind of an address, or None if it is invalid."""
    try:
        addr = parse_addr(text)
    except ConfigError:
        return None
    if is_relayed(addr):
        return 2
    far, ip = reach(addr), ip_of(addr)
    if far == 2:
        return 1 if ip is not None and ip.version == 6 else 0
    return 3 if far == 1 else 4
