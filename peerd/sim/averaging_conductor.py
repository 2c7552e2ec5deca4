"""One group's round under failures, as its conductor sees it, in the simulated Moshpit averaging: a model.

No run uses it: there a round with a failure fails whole and is repeated (`machine/conductor`). Here a group goes on
without the lost until its deadline, as Moshpit has it. Invariants: each attempt is smaller than the one before; who
commits holds the same sum as all others who commit; it ends before its deadline. A hostile member may accuse others:
the conductor believes its own ears, so a living peer is not dropped because one other says so. A quarrel costs an
attempt; who is in most quarrels leaves, of two alike the one who complained first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Seconds. A round takes no longer than `deadline_s`, whatever happens."""

    deadline_s: float  # a member that has heard nothing by then keeps what it had
    patience_s: float  # with a member that is behind the others
    answer_s: float  # the longest that a message and its answer take


@dataclass(frozen=True, slots=True)
class Start:
    """Members sum their vectors, in this order, and report."""

    attempt: int
    group: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallOff:
    """Members forget the attempt; those who have not reported do it now."""

    attempt: int
    group: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """`group` has the sum of the attempt, and takes it; `counted` are in the sum and do not."""

    attempt: int
    group: tuple[str, ...]
    counted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """The round is over for these members: each keeps its own values."""

    group: tuple[str, ...]
    why: str


Output = Start | CallOff | Commit | Keep


class GroupRound:
    """One group's round. Feed it reports, `gone` and time; it is over when `over` says so."""

    def __init__(self, group: tuple[str, ...], times: RoundTimes) -> None:
        self.group = group  # those still in it
        self.attempt = 0
        self.over = False
        self._times = times
        self._gone: set[str] = set()
        self._clear()
        self._commit_by = 0.0

    def _clear(self) -> None:
        self._reports: dict[str, tuple[bool, tuple[str, ...]]] = {}  # (prepared, whom it misses), in order of arrival
        self._called_off_at: float | None = None
        self._first_ok_at: float | None = None

    def begin(self, now: float) -> list[Output]:
        """The deadline counts from here."""
        self._commit_by = now + self._times.deadline_s - self._times.answer_s
        if len(self.group) < 2:
            return self._keep("nobody else is in the group")
        return [Start(self.attempt, self.group)]

    def report(self, now: float, peer: str, attempt: int, ok: bool, lost: Iterable[str] = ()) -> list[Output]:
        """A member has the whole sum, or will not get it because it misses `lost` (itself: it cannot go on)."""
        if self.over or attempt != self.attempt or peer not in self.group or peer in self._reports:
            return []
        self._reports[peer] = (ok, tuple(sorted(set(lost) & set(self.group))))
        if ok and self._first_ok_at is None:
            self._first_ok_at = now
        return self._look(now, failed=not ok)

    def gone(self, now: float, peer: str) -> list[Output]:
        """The conductor itself saw this member vanish. What it has reported still stands."""
        if self.over or peer not in self.group or peer in self._gone:
            return []
        self._gone.add(peer)
        return self._look(now, failed=peer not in self._reports)

    def wake(self, now: float) -> list[Output]:
        """Time passed."""
        return [] if self.over else self._look(now, failed=False)

    def wake_at(self) -> float:
        """When `wake` is due."""
        if self.over:
            return float("inf")
        due = [self._commit_by]
        if self._called_off_at is not None:
            due.append(self._called_off_at + self._times.answer_s)
        elif self._first_ok_at is not None and self._again(self._first_ok_at + self._times.patience_s):
            due.append(self._first_ok_at + self._times.patience_s)
        return min(due)

    def _look(self, now: float, failed: bool) -> list[Output]:
        prepared = [peer for peer in self.group if self._reports.get(peer, (False,))[0]]
        if self._called_off_at is None:
            if len(prepared) == len(self.group) and now <= self._commit_by:
                return self._commit(prepared)
            if now >= self._commit_by:  # who has the sum may take it, even if somebody who is in it does not
                return self._commit(prepared) if len(prepared) > 1 else self._keep("the deadline")
            late = self._first_ok_at is not None and now >= self._first_ok_at + self._times.patience_s
            if not failed and not (late and self._again(now)):
                return []
            self._called_off_at = now
            return [CallOff(self.attempt, self.group), *self._decide(now)]
        return self._decide(now)

    def _decide(self, now: float) -> list[Output]:
        """After an attempt was called off: go on without whoever is silent, or else without one quarreller."""
        assert self._called_off_at is not None
        heard = all(peer in self._reports or peer in self._gone for peer in self.group)
        if not heard and now < min(self._called_off_at + self._times.answer_s, self._commit_by):
            return []
        silent = self._gone | (set(self.group) - self._reports.keys())
        rest = tuple(peer for peer in self.group if peer not in (silent or self._quarrellers()))
        if len(rest) < 2 or now >= self._commit_by:
            return self._keep("nobody is left to average with" if len(rest) < 2 else "no time for another attempt")
        left = tuple(peer for peer in self.group if peer not in rest)
        self.group = rest
        self.attempt += 1
        self._clear()
        return [Keep(left, "the others go on without it"), Start(self.attempt, rest)]

    def _quarrellers(self) -> set[str]:
        """Everyone answers, so somebody is wrong: those who give up themselves, else the one in most quarrels."""
        failed = {peer: lost for peer, (ok, lost) in self._reports.items() if not ok}
        resigned = {peer for peer, lost in failed.items() if peer in lost}
        if resigned:
            return resigned
        if not failed:  # all are ready after all, but the attempt is called off: who was ready last held it up
            return {list(self._reports)[-1]}
        pairs = {(one, other) for one, lost in failed.items() for other in lost}
        quarrels = Counter(one for one, _ in pairs | {(other, one) for one, other in pairs})
        order = [*failed, *sorted(quarrels.keys() - failed.keys())]
        return {max(order, key=lambda peer: quarrels[peer])}  # of equals, who complained first

    def _again(self, now: float) -> bool:
        """Is there time for another attempt?"""
        return now + self._times.patience_s + self._times.answer_s < self._commit_by

    def _commit(self, prepared: list[str]) -> list[Output]:
        self.over = True
        left = tuple(peer for peer in self.group if peer not in prepared)
        ends: list[Output] = [Commit(self.attempt, tuple(prepared), left)]
        return [*ends, Keep(left, "the deadline")] if left else ends

    def _keep(self, why: str) -> list[Output]:
        self.over = True
        return [Keep(self.group, why)]
