"""The order in which a stage computes calls with tensors, sans-IO.

Training goes first, the oldest step before later ones. Within a step callers take turns by start-time fair queueing
(Goyal, Vin and Cheng, 1996): over networks, then over the addresses of a network, then over the peers of an address. So
a flood of calls waits behind itself, however many identities the flooder has in one place. Among the calls of one peer
backwards go first, then the earliest. Evaluations go last, one at a time; but after every `_PASSES` other calls one
evaluation is computed, so that it ends eventually. Invariant: nothing is stored about callers once no call waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from peerd.wire.budget.book import User

_PASSES: Final = 8  # training calls per evaluation, which thus gets at most a ninth of the device
_REMEMBERED: Final = 64  # stamps kept in addition to those of waiting callers

_Path = tuple[str, ...]  # identifies a network, an address in it, or a peer there


class Turn(NamedTuple):
    """A call that waits to be computed. `cost`: in forward passes of one microbatch."""

    user: User
    step: int = 0
    backward: bool = False
    evaluates: bool = False
    cost: float = 1.0


@dataclass(slots=True)
class FairTurns:
    """The waiting calls of one stage."""

    _waiting: dict[int, Turn] = field(default_factory=dict)  # by ticket, in order of arrival
    _stamps: dict[_Path, float] = field(default_factory=dict)  # progress of its parent at which its next turn is due
    _progress: dict[_Path, float] = field(default_factory=dict)  # the stamp of its child that had the last turn
    _passed: int = 0  # training calls computed since an evaluation waits
    _tickets: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        """Number of waiting calls."""
        return len(self._waiting)

    def ask(self, turn: Turn) -> int:
        """Add a call; returns its ticket, a number by which `pop` and `give_back` name the call."""
        ticket = next(self._tickets)
        self._waiting[ticket] = turn
        return ticket

    def give_back(self, ticket: int) -> None:
        """Withdraw a waiting call."""
        self._waiting.pop(ticket, None)
        self._forget()

    def pop(self, *, may_evaluate: bool) -> int | None:
        """Remove and return the ticket of the next call, or None. `may_evaluate`: no evaluation is running."""
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
        """When a caller's next turn is due. An idle caller restarts level with the others: unused turns expire."""
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
            # No caller is ahead of the others by more than one turn, so forgetting an idle one gains it at most that.
            waits = {path for turn in self._waiting.values() for path in _paths(turn)}
            self._stamps = {path: stamp for path, stamp in self._stamps.items() if path in waits}
            self._progress = {path: at for path, at in self._progress.items() if path in waits or len(path) == 1}


def _paths(turn: Turn) -> tuple[_Path, _Path, _Path]:
    """The network, address and peer that a turn counts for; evaluations have separate ones."""
    user, kind = turn.user, "evaluation" if turn.evaluates else "training"
    network = (kind, user.region)
    return network, (*network, user.place), (*network, user.place, user.peer)
