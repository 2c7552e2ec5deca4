"""Groups for averaging: how large they are, who is in them, and how one of them ends its round in time.

Size: DeDLOC's appendix C. Groups of m need d = log_m N rounds for the mean of all, and a group has no failure with
probability (1 - p)^m; the choice minimises d / (1 - p)^m. Members: the lines of `moshpit.Grid` under a conductor, or
`by_keys` where everyone announces a key. `GroupRound` is one group as its conductor sees it. Invariants: each attempt
is smaller than the one before; who commits holds the same sum as all others who commit; it ends before its deadline.
A hostile member may accuse others: the conductor believes its own ears, so a living peer is not dropped because one
other says so. A quarrel costs an attempt; who is in most quarrels leaves, of two alike the one who complained first.
"""

from __future__ import annotations

import decimal
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peerd.machine.moshpit import smallest_side

_EXACT = decimal.Context(prec=28)  # ln is rounded the same way on every machine, unlike a libm's


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Groups of `size` at most, met in `rounds` rounds; both 1 and 0 when there is nobody to meet."""

    size: int
    rounds: int
    why: str


def group_size(peers: int, failure: float, largest: int | None = None) -> GroupSize:
    """The best size for `peers` of which each fails a round with probability `failure` (0 up to below 1).

    `largest`: of a group, if there is such a bound (at least 2). Bandwidth does not enter: all-reduce moves two vectors
    per peer and round in groups of any size. Equal costs: fewer rounds. The same everywhere for the same numbers.
    """
    largest = peers if largest is None else largest
    if peers < 1 or not 0 <= failure < 1 or (peers > 1 and largest < 2):
        raise ValueError(f"no groups of up to {largest} for {peers} peers that fail with {failure}")
    if peers == 1:
        return GroupSize(1, 0, "nobody else is there")
    sizes = ((smallest_side(peers, rounds), rounds) for rounds in range(1, (peers - 1).bit_length() + 1))
    allowed = [(size, rounds) for size, rounds in sizes if size <= largest]
    alive = _ln(_EXACT.subtract(1, decimal.Decimal(repr(float(failure)))))

    def cost(choice: tuple[int, int]) -> decimal.Decimal:
        size, rounds = choice
        return _EXACT.subtract(_ln(decimal.Decimal(rounds)), _EXACT.multiply(size, alive))

    size, rounds = min(allowed, key=cost)  # the first of equals has the fewest rounds
    if rounds == 1:
        why = f"one group of all {peers}: " + ("nobody is expected to fail" if not failure else "few enough to try")
    else:
        why = f"{rounds} rounds in groups of {size}: a group of {size} is whole with {(1 - failure) ** size:.2f}"
        why += (
            f", one of {peers} with {(1 - failure) ** peers:.2f}"
            if largest >= peers
            else f", at most {largest} allowed"
        )
    return GroupSize(size, rounds, why)


@functools.lru_cache(256)
def _ln(value: decimal.Decimal) -> decimal.Decimal:
    return _EXACT.ln(value)


class FailureRate:
    """What share of peers fails in a round, from what the last rounds showed; older rounds fade.

    Begins at `prior`, which counts like `weight` peers seen.
    """

    def __init__(self, prior: float = 0.01, weight: float = 20.0, fade: float = 0.98) -> None:
        self._lost, self._seen, self._fade = prior * weight, weight, fade

    def observe(self, seen: int, lost: int) -> None:
        """A round with `seen` peers, `lost` of which did not end it."""
        if not 0 <= lost <= seen:
            raise ValueError(f"{lost} of {seen} peers cannot be lost")
        self._lost = self._lost * self._fade + lost
        self._seen = self._seen * self._fade + seen

    @property
    def rate(self) -> float:
        """Below 1, rounded to thousandths so that noise does not change the groups."""
        return min(0.999, round(self._lost / self._seen, 3))


def by_keys(waiting: Mapping[str, tuple[str, float]], largest: int) -> list[tuple[str, ...]]:
    """Groups of peers that announced the same key; `waiting`: peer -> (key, the instant it wants to start).

    The first of a group leads: who wants to start first. A key with too many makes several groups of nearly equal size,
    one with a single peer makes none. Everyone who has seen the same announcements finds the same groups.
    """
    keys: dict[str, list[tuple[float, str]]] = {}
    for peer, (key, start_s) in waiting.items():
        keys.setdefault(key, []).append((start_s, peer))
    groups = []
    for _, found in sorted(keys.items()):
        order = [peer for _, peer in sorted(found)]
        count = -(-len(order) // largest)
        cuts = [len(order) * i // count for i in range(count + 1)]
        groups += [tuple(order[cuts[i] : cuts[i + 1]]) for i in range(count)]
    return [group for group in groups if len(group) > 1]


# --- one round of one group, under a conductor ---------------------------------------------------------------------


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
