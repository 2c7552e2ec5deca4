"""Rule for moves between stages: the fewest that strengthen the weakest stage, several at once if needed.

The rule plans a sequence of moves to the weakest stage, each the one after which the weaker of the two stages is
strongest. Of that sequence it selects the prefix that gains most for its price. These are ordered once the work that
is lost without them, up to the next call of the rule, exceeds their price: a small deficit waits for a newcomer, a
large one does not. So the rule never pays much more than twice what a rule that knew the future would pay (ski rental).
Rates decide, not queues: if stages are equal, queues are noise, and a rule that follows them moves peers for ever.
Decides only. Hostile input: rates; the caller limits them to what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.swarm.rebalance.loads import PeerLoad, StageLoads, Transfer

_LEAST_PART = 0.25  # least gain relative to the movers' work: measured rates of few peers are not more accurate
_AT_ONCE = 64  # most moves of one plan
_SAME = 1e-9  # relative difference up to which rates are equal


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """Configuration of the rule.

    `work`: relative cost of a microbatch in each stage; `price_s`: price of a move, in seconds of its peer's work;
    `least_gain`: share of the throughput that a plan must gain.
    """

    work: tuple[float, ...]
    price_s: float = 20.0
    least_gain: float = 0.01


@dataclass(frozen=True, slots=True)
class _Plan:
    moves: tuple[Transfer, ...] = ()
    gain: float = 0.0  # additional microbatches per second
    price: float = 0.0  # microbatches


class RebalanceRule:
    """The rule for one conductor. Call `look` at every change, and when `due`."""

    def __init__(self, config: RebalanceConfig) -> None:
        self._config = config
        self.price_s = config.price_s  # callers may adapt it to what moves turn out to cost
        self._plan = _Plan()
        self._lost, self._at = 0.0, 0.0  # microbatches lost since stages were even, and the time of the last count
        self._ahead_s = 0.0  # seconds from then to the next call of `look`

    def due(self, now: float) -> float:
        """Time at which `look` is due if nothing changes before."""
        if not self._plan.moves:
            return float("inf")
        return max(now, self._at + (self._plan.price - self._lost) / self._plan.gain - self._ahead_s)

    def look(self, now: float, loads: Sequence[PeerLoad], ahead_s: float = 0.0) -> list[Transfer]:
        """The moves to begin now. `ahead_s`: seconds until moves may begin the next time."""
        self._lost += self._plan.gain * (now - self._at)
        self._at, self._ahead_s, self._plan = now, ahead_s, self._best(loads)
        if not self._plan.moves:
            self._lost = 0.0
        if not self._plan.moves or self._lost + self._plan.gain * ahead_s < self._plan.price * (1.0 - _SAME):
            return []
        moves, self._plan, self._lost = list(self._plan.moves), _Plan(), 0.0
        return moves

    def _best(self, loads: Sequence[PeerLoad]) -> _Plan:
        """The moves that gain most for their cost; none if nothing is worth it."""
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
    """The move to the weakest stage after which the weaker of the two stages is strongest, or None if no move helps.

    Among equal moves, the one from the strongest stage, since that stage needs the peer least.
    """
    target = staffing.weakest()
    least = staffing.capacity[target]
    best, strongest, found = least * (1.0 + _SAME), 0.0, None
    for source, capacity in enumerate(staffing.capacity):
        if source == target or staffing.count[source] < 2 or capacity <= best:
            continue
        # The weaker stage is strongest for a device whose speed is next to the one that makes both stages equal.
        even = (capacity - least) / (1.0 / staffing.work[source] + 1.0 / staffing.work[target])
        for speed, peer in staffing.near(source, even):
            left = staffing.capacity[source] - staffing.rate_in(speed, source)
            weaker = min(left, least + staffing.rate_in(speed, target))
            is_same = found is not None and weaker >= best * (1.0 - _SAME)
            if weaker > best * (1.0 + _SAME) or (is_same and left > strongest):
                best, strongest, found = weaker, left, Transfer(peer, source, target)
    return found
