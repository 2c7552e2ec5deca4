"""Delta transfer of the conductor's member list: each answer holds changes since a version, in bounded bytes.

`MemberList` is the conductor's side: every change of an entry gets the next version, so an answer may end after any of
them, and the next one goes on from there. A reader that asks from a version that this list never had, or that is older
than the removals it remembers, gets the whole list. `KnownMembers` is the reader's side. Versions begin at a random
number: one of another conductor's list is then not taken for one of this list. Invariants (`check`): versions are
unique; a reader that has asked until nothing more was to come has the list. Hostile input: a conductor may send changes
to a list that the reader has not (left alone: the next request names again the version it has), and ever more members
(a list that grows beyond what a run may have begins anew).
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
from peerd.core.messages.encoding import encode
from peerd.core.messages.swarm import MemberInfo, MemberNews
from peerd.machine.swarm.posts import post_name

_NAME_OVERHEAD_BYTES = 2  # of one in a message


class MemberList:
    """See the module's header. One for each list that begins empty."""

    def __init__(self, rng: random.Random, news_bytes: int = MEMBER_NEWS_BYTES, most: int = MEMBERS) -> None:
        self.version = self._first = rng.randrange(1 << 32, 1 << 61)
        self._news_bytes, self._most = news_bytes, most
        # By post: the version in which each entry changed, oldest first, gone ones too; the same as pairs.
        self._at: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []
        self._given: dict[str, MemberInfo] = {}  # as `update` was told
        self._entries: dict[str, MemberInfo] = {}  # as it travels
        self._sizes: dict[str, int] = {}  # in an answer
        self._follows = -1

    def follow(self, version: int, members: Callable[[], Sequence[MemberInfo]]) -> None:
        """Call `update` when the source of the list has another `version`."""
        if version != self._follows:
            self._follows = version
            self.update(members())

    def update(self, members: Sequence[MemberInfo]) -> None:
        """Set the members of now; of too many the first. Their addresses are cut to the best."""
        given = {post_name(m.peer, m.stage): m for m in members[: self._most]}
        changed = [post for post in self._entries if post not in given]
        for post in changed:
            del self._entries[post]
            self._sizes[post] = len(post) + _NAME_OVERHEAD_BYTES
        for post, member in given.items():
            before = self._given.get(post)
            if before == member:
                continue
            same = before is not None and before.addrs == member.addrs  # reading addresses takes long
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
            self._first = self._at.pop(post)  # older lists would keep this one
            del self._sizes[post]

    def news(self, version: int) -> MemberNews | None:
        """The changes since `version`, as many as one answer holds; None: none."""
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
        """Raise AssertionError when an invariant is broken."""
        versions = list(self._at.values())
        assert versions == sorted(set(versions))
        assert max([self._first, *versions]) <= self.version
        assert self._entries.keys() <= self._at.keys() == self._sizes.keys()
        assert len(self._entries) <= self._most
        assert len(self._at) <= 2 * self._most


class KnownMembers:
    """The reader's copy of the list. `version` goes into the next request; `forget` when another peer is asked."""

    def __init__(self) -> None:
        self.version = 0
        self.more = False  # there are changes to ask for at once
        self._members: dict[str, MemberInfo] = {}

    def forget(self) -> None:
        """Ask for the list from its beginning; what is known of it stays until then."""
        self.version, self.more = 0, False

    def take(self, news: MemberNews | None) -> list[MemberInfo] | None:
        """Apply an answer's changes; returns the whole list, sorted, once it is complete, else None."""
        if news is None:
            return None
        if news.since == 0:
            self._members = {}
        elif not news.since <= self.version <= news.version:
            return None  # of a list that is not this one
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


def best_addrs(addrs: Iterable[str], most: int = MEMBER_ADDRS) -> list[str]:
    """At most `most` of one peer's addresses, the first of each kind before the second of any.

    The kinds: public by IPv4, or by name; public by IPv6; over a relay; of the same network; of the same machine.
    """
    kinds: list[list[str]] = [[] for _ in range(5)]
    if len(given := list(dict.fromkeys(addrs))) <= most:
        return given
    for text in given:
        kind = _kind(text)
        if kind is not None:
            kinds[kind].append(text)
    return [text for row in zip_longest(*kinds) for text in row if text is not None][:most]


def _kind(text: str) -> int | None:
    """The kind of an address; None: it is not one."""
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
