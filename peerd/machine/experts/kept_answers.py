"""Kept answers: an update that is asked for again counts once, and its caller gets the answer that was made.

Sans-IO. A backward has an id that its caller chose. The first call with it is new; a repeat while that one waits or
runs joins it, and a repeat afterwards finds the answer. Answers are bounded in time and bytes, the oldest go first;
what is remembered of an update without its answer is so little that it stays, so that a late repeat is refused and
never makes a second update.

Invariants: an id of a caller is begun once, unless what it began was given up without an update; the bytes of the
answers kept are never above the bound, nor those of one caller above its share.

A hostile caller may repeat as often as it likes, use any ids, and never repeat: it has the host keep its share of
bytes, and pushes out answers of its own first.
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
R = TypeVar("R")  # what stands for an update under way

_SHARE: Final = 4  # of the bytes, one caller has one of so many parts at most


class Known(Enum):
    """What is known of a request's name."""

    NEW = "new"  # nothing
    UNDER_WAY = "under way"
    KEPT = "kept"  # its answer
    FORGOTTEN = "forgotten"  # its update was made; the answer is not kept any more


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBounds:
    """The most that is kept of updates that were made."""

    seconds: float = EXPERT_KEPT_S
    total_bytes: int = EXPERT_KEPT_BYTES
    answers: int = EXPERT_KEPT_ANSWERS


@dataclass(slots=True)
class _Made(Generic[A]):
    """An update that was made."""

    at: float
    size_bytes: int = 0
    answer: A | None = None


@dataclass(slots=True)
class KeptAnswers(Generic[K, R, A]):
    """Updates under way and made, by caller and name."""

    bounds: KeptBounds = field(default_factory=KeptBounds)
    _under_way: dict[tuple[str, K], R] = field(default_factory=dict)
    _made: OrderedDict[tuple[str, K], _Made[A]] = field(default_factory=OrderedDict)  # oldest first
    _by_caller: dict[str, OrderedDict[K, None]] = field(default_factory=dict)  # of those with an answer
    _bytes_of: dict[str, int] = field(default_factory=dict)
    _bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all answers that are kept."""
        return self._bytes

    def look(self, now: float, caller: str, name: K) -> Known:
        """The state of a request."""
        self._expire(now)
        made = self._made.get((caller, name))
        if made is not None:
            return Known.FORGOTTEN if made.answer is None else Known.KEPT
        return Known.UNDER_WAY if (caller, name) in self._under_way else Known.NEW

    def under_way(self, caller: str, name: K) -> R:
        """What stands for the update that a repeat joins."""
        return self._under_way[caller, name]

    def answer(self, caller: str, name: K) -> A:
        """The answer that is kept."""
        made = self._made[caller, name].answer
        assert made is not None
        return made

    def begin(self, caller: str, name: K, under_way: R) -> None:
        """An update waits, or runs; LocalError when it was begun before."""
        if (caller, name) in self._under_way or (caller, name) in self._made:
            raise LocalError(f"an update of {caller} was begun twice")
        self._under_way[caller, name] = under_way

    def give_up(self, caller: str, name: K) -> None:
        """No update was made, nor will be: a repeat is new."""
        del self._under_way[caller, name]

    def finish(self, now: float, caller: str, name: K, answer: A, size_bytes: int) -> None:
        """The update was made."""
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
        """Keep no answer of this update."""
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
        """The invariants, for tests."""
        kept = {key: made for key, made in self._made.items() if made.answer is not None}
        assert self._bytes == sum(made.size_bytes for made in kept.values()) <= self.bounds.total_bytes
        assert len(self._made) <= self.bounds.answers
        assert not self._made.keys() & self._under_way.keys()
        assert {(caller, name) for caller, names in self._by_caller.items() for name in names} == kept.keys()
        for caller in self._by_caller:
            mine = sum(made.size_bytes for (other, _), made in kept.items() if other == caller)
            assert self._bytes_of[caller] == mine <= self.bounds.total_bytes // _SHARE
        assert self._bytes_of.keys() == self._by_caller.keys()
