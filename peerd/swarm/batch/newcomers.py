"""Newcomers: trainers that have not yet helped to make a step. How much they get, and how long steps wait for them.

A newcomer has one microbatch at a time, until a step has counted one. All newcomers together get a quarter of a batch,
before the others take their turns, so that they finish in time. If the others are idle, newcomers get the whole batch.
Steps wait for them as `NewcomerWaits` allows. `Probation` keeps out those that failed. As long as no trainer has
helped, nobody counts as a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LEASHED_TRAINERS
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.batch.probation import SEVERAL, Probation

WAIT_S: Final = 2.0  # that a step waits for a newcomer at first,
_WAIT_TURNS: Final = 4  # or this many times the others' time for a microbatch
_LONGER: Final = 1.5  # factor of the wait after each failure, as the newcomer may be slow
_LONGEST: Final = 10.0  # largest factor
_FAILURES_MOST: Final = 16
_PART: Final = 4  # newcomers get one in this many microbatches, and at least one

_SHARE: Final = 1 / 16  # of the time that passes
_MOST_S: Final = 120.0  # that can be saved up, in half an hour without newcomers,
_MOST_TURNS: Final = 100  # or this many times the others' time for a microbatch
_FIRST_S: Final = 8.0  # available at first,
_FIRST_TURNS: Final = 16  # likewise
_TURN_KEEP: Final = 0.9  # weight of the earlier value in the others' mean time for a microbatch
_WAIT_PART: Final = 1 / 2  # of what is left, for one step


class Newcomers:
    """The newcomers of one run, as its conductor knows them."""

    def __init__(self) -> None:
        self.probation = Probation()
        self._waits = NewcomerWaits()
        self._helped = BoundedDict[str, None](LEASHED_TRAINERS)  # trainers that helped to make a step, even if gone
        self._others: set[str] = set()  # connected ones of these
        self._failures = BoundedDict[str, int](LEASHED_TRAINERS)  # of newcomers, never forgotten: one may be slow
        self._idle_since: float | None = None  # time since which the others have been idle, or None

    @property
    def others(self) -> Set[str]:
        """The connected trainers that have helped to make a step."""
        return self._others

    def __contains__(self, trainer: str) -> bool:
        return trainer not in self._helped and bool(self._others)

    def arrived(self, trainer: str) -> None:
        """Record that the trainer is connected."""
        if trainer in self._helped:
            self._others.add(trainer)

    def gone(self, trainer: str) -> None:
        """Record that the trainer is no longer connected."""
        self._others.discard(trainer)

    def has_helped(self, trainer: str) -> bool:
        """True if the trainer has helped to make a step."""
        return trainer in self._helped

    def step_made(self, helped: Iterable[str], here: Iterable[str]) -> None:
        """Record that these trainers helped to make a step; `here`: all connected trainers."""
        for trainer in helped:
            if trainer not in self._helped:
                self.probation.helped(trainer)
                self._failures.pop(trainer, None)
            self._helped[trainer] = None
        self._others = {trainer for trainer in here if trainer in self._helped}

    def failed(self, now: float, newcomer: str, *, proven: bool) -> int:
        """Record that a newcomer held up a step; returns its failures so far. `proven`: as in `Probation.failed`."""
        self.probation.failed(now, newcomer, proven=proven)
        self._failures[newcomer] = min(self._failures.get(newcomer, 0) + 1, _FAILURES_MOST)
        return self._failures[newcomer]

    def finished(self, trainer: str, turn_s: float) -> None:
        """Record that a trainer finished a microbatch `turn_s` seconds after it was admitted."""
        if trainer in self._others:
            self._waits.turn(turn_s)

    # --- places in the batch ----------------------------------------------------------------------------------

    def why_nothing(self, now: float, newcomer: str) -> str:
        """Reason that a newcomer gets no microbatch now, or "" if it gets one."""
        if self.probation.own_reason(now, newcomer):
            return "this trainer did not finish its microbatch in time, and sits out the next steps"
        if told := self.probation.places_reason(now, newcomer):
            return told
        if self._has_all(now):
            return ""  # nobody waits
        if newcomer in self._failures and self._waits.most_s(now) < self.lease_s(newcomer):
            return "this trainer did not finish its microbatch in time, and gets another when steps can wait for it"
        return "steps have waited for newcomers for long enough, for now" if self._waits.most_s(now) < 0 else ""

    def look_at_others(self, now: float, work: bool) -> None:
        """Record whether the others (trainers that have helped) compute, or request what they may have."""
        self._idle_since = None if work else now if self._idle_since is None else self._idle_since

    def _has_all(self, now: float) -> bool:
        """True if the others have been idle for a while: newcomers then get the whole batch."""
        return self._idle_since is not None and now - self._idle_since >= self.usual_s

    def room(self, now: float, ledger: BatchLedger) -> int:
        """Number of slots in a batch that newcomers may have now."""
        if self._has_all(now):
            return ledger.capacity - len(ledger.entries)
        return max(1, ledger.capacity // _PART) - ledger.newcomers

    def in_turn(self, now: float, newcomers: Iterable[str]) -> list[str]:
        """These newcomers in the order of their turns: those from addresses with few failures come first."""
        return sorted(newcomers, key=lambda name: sum(self.probation.times(now, name)))

    def let_in(self, now: float, newcomer: str, ledger: BatchLedger) -> None:
        """Record that a newcomer gets a slot in the batch."""
        ledger.newcomers += 1
        self.probation.let_in(now, newcomer)

    # --- waiting ----------------------------------------------------------------------------------------------

    @property
    def are_waited_for(self) -> bool:
        """True while the step waits for newcomers alone, or for others that compute instead of them."""
        return self._waits.is_on

    def look(self, now: float, due: BatchLedger, would: Callable[[str], bool]) -> None:
        """Record whether the step waits because of newcomers. `would(trainer)`: True if it would compute more."""
        waits = due.full and bool(due.open)
        if waits and not self._waits.is_on:
            waits = all(map(self.__contains__, due.open)) and any(map(would, self._others))
        self._waits.look(now, waits)

    def lease_s(self, newcomer: str) -> float:
        """Seconds that steps wait for a newcomer, which grow with its own failures."""
        longer = _LONGER ** self._failures.get(newcomer, 0)
        return self.usual_s * min(longer, _LONGEST)

    @property
    def usual_s(self) -> float:
        """Seconds without a finished microbatch after which a trainer is late."""
        return max(WAIT_S, _WAIT_TURNS * self._waits.turn_s)

    def wait_ends(self, now: float, newcomer: str) -> float:
        """Time until which the current step waits for a newcomer alone.

        There is no wait if several others from its address have failed (`SEVERAL`).
        """
        _, others = self.probation.times(now, newcomer)
        return self._waits.end(self.lease_s(newcomer) if others < SEVERAL else 0.0)


class NewcomerWaits:
    """Bound on the time that steps wait for newcomers: trainers that have not yet helped to make a step.

    A newcomer may be slow, or may take its slot in the batch and do nothing; nobody can tell these apart beforehand. So
    steps wait for newcomers alone for at most a sixteenth of the time, and one step for half of what is left of that.
    Then trainers that have helped before compute the rest of the batch, which counts as part of the wait. When the time
    is used up, newcomers get no slot until more has passed. A newcomer that keeps pace with the others causes no wait.

    Hostile input: any number of identities at any number of addresses can use up the newcomers' waiting time, no more.
    """

    def __init__(self) -> None:
        self._left_s = _FIRST_S  # negative: too much was used
        self._at: float | None = None  # end of the last wait, or the first call of `look`
        self._since: float | None = None  # start of the present wait
        self.turn_s = 0.0  # the others' mean time for a microbatch; 0: unknown

    def turn(self, turn_s: float) -> None:
        """Record that a trainer that is no newcomer took `turn_s` seconds for a microbatch."""
        if self.turn_s:
            self.turn_s = self.turn_s * _TURN_KEEP + turn_s * (1 - _TURN_KEEP)
        else:
            self.turn_s, self._left_s = turn_s, max(self._left_s, _FIRST_TURNS * turn_s)

    def look(self, now: float, waits: bool) -> None:
        """Record whether the step waits because of newcomers alone."""
        if self._at is None:
            self._at = now
        if waits == self.is_on:
            return
        if self._since is not None:
            self._left_s = max(-self._largest_s, self._left_s - (now - self._since))
            self._since = None
        else:
            self._left_s = self._left(now)
            self._since = now
        self._at = now

    @property
    def is_on(self) -> bool:
        """True while the step waits because of newcomers alone."""
        return self._since is not None

    def most_s(self, now: float) -> float:
        """Seconds that the next step may wait for newcomers alone; negative if steps have waited for too long."""
        return self._left(now) * _WAIT_PART

    def end(self, most_s: float) -> float:
        """Time until which the current step waits for a newcomer, at most `most_s` from the start of the wait."""
        assert self._since is not None
        return self._since + min(most_s, max(0.0, self._left_s * _WAIT_PART))

    def _left(self, now: float) -> float:
        earned_s = (now - self._at) * _SHARE if self._at is not None and not self.is_on else 0.0
        return min(self._left_s + earned_s, self._largest_s)

    @property
    def _largest_s(self) -> float:
        return max(_MOST_S, _MOST_TURNS * self.turn_s)
