"""The order in which calls with tensors have their turn at a stage, sans-IO.

Training goes first, the oldest step before later ones; in a step, callers take turns: by start-time fair queueing
(Goyal, Vin and Cheng, 1996) over networks, then over the addresses of a network, then over the peers of an address. So
whoever floods waits behind its own calls, however many identities it has at one place. Of one peer, backwards go first,
then what came first. An evaluation goes last, and one at a time; so that it ends, one goes after each `_PASSES` calls
that went before it. Invariant: nothing is remembered of callers once nobody waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from peerd.machine.budget.book import User

_PASSES: Final = 8  # calls of training that go before an evaluation that waits: it costs a ninth of the device at most
_REMEMBERED: Final = 64  # stamps that are kept beside those of callers that wait

_Path = tuple[str, ...]  # of a network; of an address in it; of a peer there


class Turn(NamedTuple):
    """One call's claim to be computed. `cost`: in forwards of one microbatch."""

    user: User
    step: int = 0
    backward: bool = False
    evaluates: bool = False
    cost: float = 1.0


@dataclass(slots=True)
class FairTurns:
    """The calls that wait at one stage."""

    _waiting: dict[int, Turn] = field(default_factory=dict)  # by ticket, in order of coming
    _stamps: dict[_Path, float] = field(default_factory=dict)  # progress of its parent at which its next turn is due
    _progress: dict[_Path, float] = field(default_factory=dict)  # of those below it: the stamp that went last
    _passed: int = 0  # calls that went before the evaluations that wait
    _tickets: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def ask(self, turn: Turn) -> int:
        """A ticket for a call that waits."""
        ticket = next(self._tickets)
        self._waiting[ticket] = turn
        return ticket

    def give_back(self, ticket: int) -> None:
        """Withdraw a call that does not want its turn any more."""
        self._waiting.pop(ticket, None)
        self._forget()

    def pop(self, *, may_evaluate: bool) -> int | None:
        """The ticket whose turn it is; None: none may go. `may_evaluate`: no evaluation is under way."""
        steps = [turn.step for turn in self._waiting.values() if not turn.evaluates]
        evaluations = len(steps) < len(self._waiting)
        evaluates = evaluations and may_evaluate and (not steps or self._passed >= _PASSES)
        if not evaluates and not steps:
            return None
        oldest = None if evaluates else min(steps)
        able = [t for t, turn in self._waiting.items() if (None if turn.evaluates else turn.step) == oldest]
        ticket = min(able, key=self._due)
        turn = self._waiting.pop(ticket)
        self._charge(turn)
        self._passed = self._passed + 1 if evaluations and not evaluates else 0
        self._forget()
        return ticket

    def _due(self, ticket: int) -> tuple[float, float, float, bool, int]:
        turn = self._waiting[ticket]
        network, place, peer = (self._stamp(path) for path in _paths(turn))
        return network, place, peer, not turn.backward, ticket

    def _stamp(self, path: _Path) -> float:
        """A caller that was away begins where the others are: what it did not use is not kept for it."""
        return max(self._stamps.get(path, 0.0), self._progress.get(path[:-1], 0.0))

    def _charge(self, turn: Turn) -> None:
        for path in _paths(turn):
            stamp = self._stamp(path)
            self._progress[path[:-1]] = stamp
            self._stamps[path] = stamp + turn.cost

    def _forget(self) -> None:
        if not self._waiting:
            self._stamps.clear()
            self._progress.clear()
            self._passed = 0
        elif len(self._stamps) > _REMEMBERED + 6 * len(self._waiting):
            # Nobody is ahead of the others by more than one turn: who does not wait gains no more by being forgotten.
            waits = {path for turn in self._waiting.values() for path in _paths(turn)}
            self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in waits}
            self._progress = {path: at for path, at in self._progress.items() if path in waits or len(path) == 1}


def _paths(turn: Turn) -> tuple[_Path, _Path, _Path]:
    """The network, address and peer that a turn counts for. Evaluations are charged by themselves."""
    user, kind = turn.user, "evaluation" if turn.evaluates else "training"
    network = (kind, user.region)
    return network, (*network, user.place), (*network, user.place, user.peer)
