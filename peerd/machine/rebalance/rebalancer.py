"""Rule for moves between stages: as few as lift the weakest stage, as many at once as that takes.

Peers would move to the weakest stage, one after the other, each the one after whose move the weaker of the two stages
is strongest; of that sequence the beginning counts that wins most for its moves. It is carried out once the work that
is lost without it, until the rule is asked again, outweighs the price of the moves: a small lack waits for a newcomer
to fill it, a large one does not. So the rule never pays much more than twice what one that knew the future would (ski
rental). Rates, not queues, decide: a queue is noise where stages are equal, and a rule that follows it moves peers for
ever. Decides only. Hostile input: rates, which the caller believes no further than they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.machine.rebalance.loads import PeerLoad, StageLoads, Transfer

_LEAST_PART = 0.25  # of what the movers do: less is within what measured rates of few peers differ by
_AT_ONCE = 64  # moves of one plan
_SAME = 1e-9  # relative difference of rates that is none


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """`work`: of a microbatch in each stage, relative to each other; `price_s`: of a move, in seconds of its peer's
    work; `least_gain`: share of the throughput that a plan must win.
    """

    work: tuple[float, ...]
    price_s: float = 20.0
    least_gain: float = 0.01


@dataclass(frozen=True, slots=True)
class _Plan:
    moves: tuple[Transfer, ...] = ()
    gain: float = 0.0  # microbatches a second more
    price: float = 0.0  # microbatches


class Rebalancer:
    """See the module's header; one conductor's. Ask `look` at every change, and when `due`."""

    def __init__(self, config: RebalanceConfig) -> None:
        self._config = config
        self.price_s = config.price_s  # may change with what moves turn out to cost
        self._plan = _Plan()
        self._lost, self._at = 0.0, 0.0  # microbatches, since stages were even; when that was counted last
        self._ahead_s = 0.0  # until the next look after that

    def due(self, now: float) -> float:
        """When `look` is due if nothing changes before."""
        if not self._plan.moves:
            return float("inf")
        return max(now, self._at + (self._plan.price - self._lost) / self._plan.gain - self._ahead_s)

    def look(self, now: float, loads: Sequence[PeerLoad], ahead_s: float = 0.0) -> list[Transfer]:
        """The moves to begin now; `ahead_s`: until moves may begin the next time."""
        self._lost += self._plan.gain * (now - self._at)
        self._at, self._ahead_s, self._plan = now, ahead_s, self._best(loads)
        if not self._plan.moves:
            self._lost = 0.0
        if not self._plan.moves or self._lost + self._plan.gain * ahead_s < self._plan.price * (1.0 - _SAME):
            return []
        moves, self._plan, self._lost = list(self._plan.moves), _Plan(), 0.0
        return moves

    def join(self, loads: Sequence[PeerLoad]) -> int:
        """The stage for a newcomer: the weakest."""
        return StageLoads(loads, self._config.work).weakest()

    def _best(self, loads: Sequence[PeerLoad]) -> _Plan:
        """The moves that win most for what they cost; none where nothing is worth it."""
        staffing, best = StageLoads(loads, self._config.work), _Plan()
        before, moves, price, brought = staffing.throughput, list[Transfer](), 0.0, 0.0
        while len(moves) < _AT_ONCE and (one := _next(staffing)) is not None:
            price += self.price_s * staffing.rate_of(one)
            brought += staffing.rate_of(one) * staffing.work[one.source] / staffing.work[one.target]
            staffing.move(one)
            moves.append(one)
            gain = staffing.throughput - before
            least = max(self._config.least_gain * before, _LEAST_PART * brought)
            if gain > least and gain * best.price >= best.gain * price:
                best = _Plan(tuple(moves), gain, price)
        return best


def _next(staffing: StageLoads) -> Transfer | None:
    """The move to the weakest stage after which the weaker of the two is strongest; None: none leaves it stronger.

    Of equal ones that from the strongest stage, which will miss it last.
    """
    target = staffing.weakest()
    least = staffing.capacity[target]
    best, strongest, found = least * (1.0 + _SAME), 0.0, None
    for source, capacity in enumerate(staffing.capacity):
        if source == target or staffing.count[source] < 2 or capacity <= best:
            continue
        # With the speed at which both stages would be as strong, or those next to it, the weaker of them is strongest.
        even = (capacity - least) / (1.0 / staffing.work[source] + 1.0 / staffing.work[target])
        for speed, peer in staffing.near(source, even):
            left = staffing.capacity[source] - staffing.rate_in(speed, source)
            weaker = min(left, least + staffing.rate_in(speed, target))
            is_same = found is not None and weaker >= best * (1.0 - _SAME)
            if weaker > best * (1.0 + _SAME) or (is_same and left > strongest):
                best, strongest, found = weaker, left, Transfer(peer, source, target)
    return found
