"""The accounting of calls, sans-IO: the load of each method, and which calls wait for an answer.

No clock and no streams: `now` and `user` are arguments. Everything is bounded by `core/limits` and by the methods'
declarations. Hostile input: a peer may call too often, under many identities, or answer calls that were never made. The
memory that it makes us use is accounted for in `wire/budget/book`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import RPC_NAME_BYTES, RPC_PENDING
from peerd.rpc.methods.declaration import Declaration
from peerd.wire.budget.book import ShareAccount, User

_METHOD = re.compile(r"([a-z][a-z0-9_-]{0,31})/([1-9][0-9]{0,3})/([a-z][a-z0-9_-]*)")
E = TypeVar("E")


class MethodName(NamedTuple):
    """A parsed method name, such as `dht/4/find` with protocol `/peerd/dht/4` and `name` `find` in wire form."""

    full: str
    service: str
    protocol: str
    name: bytes


def method_name(full: str) -> MethodName:
    """Parse "service/version/name". Raises LocalError for any other form."""
    match = _METHOD.fullmatch(full)
    if match is None or len(match[3]) > RPC_NAME_BYTES:
        raise LocalError(f"{full!r} is not a method: service/version/name")
    service = f"{match[1]}/{match[2]}"
    return MethodName(full, service, f"/peerd/{service}", match[3].encode())


@dataclass(slots=True)
class Counters:
    """Counters of the calls of one method or service, on one side."""

    calls: int = 0
    failed: int = 0  # calls that ended with an error on either side
    refused: int = 0  # of these, refused before any work
    gave_way: int = 0  # of the failed ones, ended in favour of others because their callers made no progress
    busy_s: float = 0.0  # total time of the finished calls


class Crowd(NamedTuple):
    """Which limit on a method's slots is reached (0: the peer's, 1: its place's, REGION, EVERYBODY), and the reason."""

    scope: int
    why: str


class MethodLoad:
    """Load of a method: the running calls, and the cost of the finished ones.

    Each peer, place and network has a share of the method's slots, and some slots are reserved for members. While fewer
    calls run than any share allows they are only counted by user, which is cheap; above that, an account keeps the
    sums. Invariant (`check`): no share is exceeded.
    """

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self.counters = Counters()
        self.running = 0
        self.by_user: dict[User, int] = {}
        self._share = declared.share
        self._calm = min(self._share.peer, self._share.place)
        self._account: ShareAccount | None = None  # only while many calls run

    def enter(self, user: User, is_member: Callable[[str], bool]) -> Crowd | None:
        """Count one more call of `user` and return None, or return the share that is exhausted."""
        if self.running >= self._calm or self._account is not None:
            account = self._account or self._counted()
            full = account.objection(user, 1, member=False)
            if full is not None and is_member(user.peer):
                full = account.objection(user, 1, member=True)
            if full is not None:
                return Crowd(*full)
            account.add(user, 1)
        self.running += 1
        self.by_user[user] = self.by_user.get(user, 0) + 1
        self.counters.calls += 1
        return None

    def leave(self, user: User, took_s: float) -> None:
        """Record that an entered call has ended."""
        self.running -= 1
        self.counters.busy_s += took_s
        mine = self.by_user[user] - 1
        if mine:
            self.by_user[user] = mine
        else:
            del self.by_user[user]
        if self._account is not None:
            if self.running <= self._calm // 2:
                self._account = None
            else:
                self._account.add(user, -1)

    def _counted(self) -> ShareAccount:
        """Create the account of the running calls."""
        account = self._account = ShareAccount(self._share)
        for user, count in self.by_user.items():
            account.add(user, count)
        return account

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self.running == sum(self.by_user.values()) <= self._share.total
        assert self._account is None or self._account.by == self.by_user

    def retry_after_s(self) -> float:
        """Seconds after which a retry is worthwhile: about the time that one call takes."""
        finished = self.counters.calls - self.running
        mean_s = self.counters.busy_s / finished if finished else 0.1
        return min(max(mean_s, 0.02), 5.0)


class PendingCalls(Generic[E]):
    """The calls that wait for an answer on one stream: ids ascend, each entry has a deadline.

    `due` is never later than the earliest deadline; it may be earlier, after calls were answered. So a driver that
    wakes at `due` and calls `overdue` misses nothing, and a call that is answered in time costs no timer.
    """

    def __init__(self, most: int = RPC_PENDING) -> None:
        self.due = math.inf
        self._most = most
        self._next_id = 1
        self._entries: dict[int, tuple[float, E]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, deadline: float, entry: E) -> int | None:
        """The new call's id, or None if too many calls already wait."""
        if len(self._entries) >= self._most:
            return None
        call_id = self._next_id
        self._next_id = call_id + 1
        self._entries[call_id] = (deadline, entry)
        if deadline < self.due:
            self.due = deadline
        return call_id

    def get(self, call_id: int) -> E | None:
        """Like `pop`, but the call continues to wait."""
        found = self._entries.get(call_id)
        if found is not None:
            return found[1]
        self.pop(call_id)
        return None

    def pop(self, call_id: int) -> E | None:
        """Remove and return the entry of an answered call, or None if it no longer waits.

        Raises ProtocolViolation if there was no such call.
        """
        found = self._entries.pop(call_id, None)
        if found is not None:
            return found[1]
        if not 0 < call_id < self._next_id:
            raise ProtocolViolation(f"an answer to call {call_id}, which was never made")
        return None

    def overdue(self, now: float) -> list[tuple[int, E]]:
        """Remove and return the calls whose deadline has passed, and update `due`."""
        late = [(call_id, entry) for call_id, (deadline, entry) in self._entries.items() if deadline <= now]
        for call_id, _ in late:
            del self._entries[call_id]
        self.due = min((deadline for deadline, _ in self._entries.values()), default=math.inf)
        return late

    def drain(self) -> list[E]:
        """Remove and return all calls, because the stream is closed."""
        entries = [entry for _, entry in self._entries.values()]
        self._entries.clear()
        self.due = math.inf
        return entries
