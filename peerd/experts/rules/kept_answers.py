"""Kept answers of update requests: a repeated request is applied once, and the repeat gets the first answer.

Sans-IO. A backward call has an id that its caller chose. The first call with an id is new; a repeat while that one
waits or runs joins it, and a later repeat gets the stored answer. Answers are bounded in time and bytes, and the oldest
are dropped first. If an answer is dropped for its bytes, the small record of its update stays until it expires, so that
a repeat is rejected instead of making a second update.

Invariants: each id of a caller starts one update, unless that was abandoned before it was applied; the bytes of all
stored answers never exceed the bound, and those of one caller never exceed its share.

A hostile caller may repeat requests at will, or send any number of new ids. It fills only its own share of the bytes,
in which its new answers displace its older ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

from peerd.core.errors import LocalError
from peerd.core.limits import EXPERT_KEPT_ANSWERS, EXPERT_KEPT_BYTES, EXPERT_KEPT_S

K = TypeVar("K", bound=Hashable)  # a request's name: its expert and id
A = TypeVar("A")  # an answer
R = TypeVar("R")  # a handle of an update under way

_SHARE: Final = 4  # one caller may use at most 1 / _SHARE of the bytes


class Known(Enum):
    """State of a request, which is identified by its caller and its name."""

    NEW = "new"  # nothing
    UNDER_WAY = "under way"
    KEPT = "kept"  # its answer
    FORGOTTEN = "forgotten"  # its update was made; the answer was dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBounds:
    """Bounds on the stored answers of completed updates."""

    seconds: float = EXPERT_KEPT_S
    total_bytes: int = EXPERT_KEPT_BYTES
    answers: int = EXPERT_KEPT_ANSWERS


@dataclass(slots=True)
class _Made(Generic[A]):
    """A completed update."""

    at: float
    size_bytes: int = 0
    answer: A | None = None


@dataclass(slots=True)
class KeptAnswers(Generic[K, R, A]):
    """Updates under way and completed, by caller and name."""

    bounds: KeptBounds = field(default_factory=KeptBounds)
    _under_way: dict[tuple[str, K], R] = field(default_factory=dict)
    _made: OrderedDict[tuple[str, K], _Made[A]] = field(default_factory=OrderedDict)  # oldest first
    _by_caller: dict[str, OrderedDict[K, None]] = field(default_factory=dict)  # of those with an answer
    _bytes_of: dict[str, int] = field(default_factory=dict)
    _bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all stored answers."""
        return self._bytes

    def look(self, now: float, caller: str, name: K) -> Known:
        """The state of a request, by its caller and name."""
        self._expire(now)
        made = self._made.get((caller, name))
        if made is not None:
            return Known.FORGOTTEN if made.answer is None else Known.KEPT
        return Known.UNDER_WAY if (caller, name) in self._under_way else Known.NEW

    def under_way(self, caller: str, name: K) -> R:
        """The handle of an update that waits or runs, which a repeated request joins."""
        return self._under_way[caller, name]

    def answer(self, caller: str, name: K) -> A:
        """The stored answer of a completed update."""
        made = self._made[caller, name].answer
        assert made is not None
        return made

    def begin(self, caller: str, name: K, under_way: R) -> None:
        """Record that an update waits or runs. Raises LocalError if it was begun before."""
        if (caller, name) in self._under_way or (caller, name) in self._made:
            raise LocalError(f"an update of {caller} was begun twice")
        self._under_way[caller, name] = under_way

    def give_up(self, caller: str, name: K) -> None:
        """Record that no update was made or will be made, so that a repeat counts as new."""
        del self._under_way[caller, name]

    def finish(self, now: float, caller: str, name: K, answer: A, size_bytes: int) -> None:
        """Record that the update was made, and store its answer."""
        del self._under_way[caller, name]
        share = self.bounds.total_bytes // _SHARE
        self._made[caller, name] = made = _Made[A](now)
        if size_bytes <= share:
            made.answer, made.size_bytes = answer, size_bytes
            self._by_caller.setdefault(caller, OrderedDict())[name] = None
            self._bytes += size_bytes
            self._bytes_of[caller] = self._bytes_of.get(caller, 0) + size_bytes
            while self._bytes_of[caller] > share:
                self._let_go(caller, next(iter(self._by_caller[caller])))
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._made:
            (caller, name), made = next(iter(self._made.items()))
            if made.at > now - self.bounds.seconds and len(self._made) <= self.bounds.answers:
                break
            self._let_go(caller, name)
            del self._made[caller, name]
        if self._bytes > self.bounds.total_bytes:
            for caller, name in list(self._made):
                self._let_go(caller, name)
                if self._bytes <= self.bounds.total_bytes:
                    break

    def _let_go(self, caller: str, name: K) -> None:
        """Drop the stored answer of this update."""
        made = self._made[caller, name]
        if made.answer is None:
            return
        self._bytes -= made.size_bytes
        self._bytes_of[caller] -= made.size_bytes
        made.answer, made.size_bytes = None, 0
        of_caller = self._by_caller[caller]
        del of_caller[name]
        if not of_caller:
            del self._by_caller[caller], self._bytes_of[caller]

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        kept = {key: made for key, made in self._made.items() if made.answer is not None}
        assert self._bytes == sum(made.size_bytes for made in kept.values()) <= self.bounds.total_bytes
        assert len(self._made) <= self.bounds.answers
        assert not self._made.keys() & self._under_way.keys()
        assert {(caller, name) for caller, names in self._by_caller.items() for name in names} == kept.keys()
        for caller in self._by_caller:
            mine = sum(made.size_bytes for (other, _), made in kept.items() if other == caller)
            assert self._bytes_of[caller] == mine <= self.bounds.total_bytes // _SHARE
        assert self._bytes_of.keys() == self._by_caller.keys()
