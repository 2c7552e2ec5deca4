"""Topology of a stage's sum: flat, in one group, or a grid, in several rounds of small groups.

The run file sets the size of a group; with 0 it is chosen here: a stage of up to `_FLAT` members is flat, and a larger
one is flat unless the line model predicts that a grid is faster. The number of rounds follows from the rule of
`group_size` for the failure rate seen so far. A grid moves the vector once per round, but saves the cost of each
further peer in a group, so it pays for many members on fast lines. A group never has more than `_GROUP_MOST` peers.
Helpers take part only in flat rounds: in a grid they would have to be divided among groups that do not know each other.
`order` returns the groups that sum the members' own vectors, `meet` the groups that join the resulting sums. This
module only decides. Lines and vector sizes are reported by strangers: a false report makes a round slow, but never
wrong.
"""

from __future__ import annotations

import decimal
import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from peerd.averaging.bandwidth_probe import BandwidthProbe
from peerd.averaging.moshpit import MoshpitGroup, grid_of, grid_within, joined, largest_group, meetings, smallest_side
from peerd.averaging.shares import NoSplit
from peerd.averaging.work_split import Split, WorkSplitter
from peerd.core.limits import LINKS_INBOUND, RPC_LEAST_BYTES_PER_S

_FLAT = 8  # members up to which a grid saves nothing
_GROUP_MOST = LINKS_INBOUND // 2  # peers of one group: each has a connection to every other
_UNKNOWN_BYTES_PER_S = 12.5e6  # assumed rate of a line that nobody reported
_SEVERAL = 4.0  # margin for a line that carries less than reported because others use it as well
_CALL_S = 0.001  # CPU time of each further peer in a group, on a slow machine; `bench.py grids` measures half
_PART_S = 0.0005  # CPU time of each part of a share, if lines are known; `bench.py grids` measures half
_PARTS, _PART_BYTES = 8, 4096  # most parts per share that this model counts, and their least size
_WORTH_TRYING = 1.15  # probing is worthwhile if a round takes this many times the slowest sender's own time
_TURN_S = 0.1  # fixed time of a round: parts travel to their owners, and sums travel back

_EXACT = decimal.Context(prec=28)  # its ln is rounded the same way on every machine, unlike libm's


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Groups of at most `size` peers that average in `rounds` rounds; size 1 and 0 rounds for a single peer."""

    size: int
    rounds: int
    why: str


def group_size(peers: int, failure: float, largest: int | None = None) -> GroupSize:
    """The best group size for `peers` peers, each of which fails in a round with probability `failure` (from 0, below
    1), by the rule of DeDLOC's appendix C.

    Groups of m members need d = log_m N rounds for the mean of all N, and a group has no failure with probability (1 -
    p)^m; the rule minimises d / (1 - p)^m. `GroupTopology` applies it in a run, where only a failed group is repeated.
    The result is the same on every machine for the same numbers.

    `largest`: upper bound of a group's size (at least 2), or None. Bandwidth plays no role: all-reduce moves two
    vectors per peer and round in groups of any size. Of equal costs the fewest rounds win. Raises ValueError for
    invalid arguments.
    """
    largest = peers if largest is None else largest
    if peers < 1 or not 0 <= failure < 1 or (peers > 1 and largest < 2):
        raise ValueError(f"no groups of up to {largest} for {peers} peers with failure probability {failure}")
    if peers == 1:
        return GroupSize(1, 0, "there is no other peer")
    sizes = ((smallest_side(peers, rounds), rounds) for rounds in range(1, (peers - 1).bit_length() + 1))
    allowed = [(size, rounds) for size, rounds in sizes if size <= largest]
    alive = _ln(_EXACT.subtract(1, decimal.Decimal(repr(float(failure)))))

    def cost(choice: tuple[int, int]) -> decimal.Decimal:
        size, rounds = choice
        return _EXACT.subtract(_ln(decimal.Decimal(rounds)), _EXACT.multiply(size, alive))

    size, rounds = min(allowed, key=cost)  # the first of equals has the fewest rounds
    if rounds == 1:
        why = f"one group of all {peers}: " + ("no failures are expected" if not failure else "few enough")
    else:
        why = f"{rounds} rounds in groups of {size}: no failure among {size} peers has p = {(1 - failure) ** size:.2f}"
        why += (
            f", among {peers} peers {(1 - failure) ** peers:.2f}"
            if largest >= peers
            else f", at most {largest} allowed"
        )
    return GroupSize(size, rounds, why)


@functools.lru_cache(256)
def _ln(value: decimal.Decimal) -> decimal.Decimal:
    return _EXACT.ln(value)


class FailureRate:
    """Estimated fraction of peers that fail in a round; older rounds have exponentially less weight.

    The estimate starts at `prior`, which counts like `weight` observed peers. `fade` is the decay per round.
    """

    def __init__(self, prior: float = 0.01, weight: float = 20.0, fade: float = 0.98) -> None:
        self._lost, self._seen, self._fade = prior * weight, weight, fade

    def observe(self, seen: int, lost: int) -> None:
        """Record a round with `seen` peers, of which `lost` did not finish it."""
        if not 0 <= lost <= seen:
            raise ValueError(f"{lost} of {seen} peers cannot be lost")
        self._lost = self._lost * self._fade + lost
        self._seen = self._seen * self._fade + seen

    @property
    def rate(self) -> float:
        """The failure rate, below 1, rounded to thousandths so that noise does not change the groups."""
        return min(0.999, round(self._lost / self._seen, 3))


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """A group that sums. `split`: the division of the work, or None for equal shares.

    `most_s`: upper bound of its transfer time, from the lines and the size of the vector.
    """

    meeting: MoshpitGroup
    split: Split | None
    helpers: frozenset[str] = frozenset()
    most_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SumTopology:
    """How a stage sums its members' vectors. `groups`: those of the first round.

    `sides`: for each later round, the number of partial sums that each group joins; empty for a flat stage with one
    group.
    """

    groups: tuple[OrderedGroup, ...]
    sides: tuple[int, ...] = ()
    news: str = ""  # description of the topology for the log, if it has changed


class GroupTopology:
    """Chooses the topology of each attempt. `size`: most peers of a group (at least 3), or 0 to choose it here."""

    def __init__(self, lines: WorkSplitter, size: int) -> None:
        self._lines = lines
        self._size = min(size, _GROUP_MOST)
        self._failures = FailureRate()
        self._exploring: dict[int, BandwidthProbe] = {}
        self._last: dict[int, tuple[object, SumTopology]] = {}  # by stage: inputs and result of the last choice

    def observe(self, members: int, lost: Iterable[str] = ()) -> None:
        """Record the end of an attempt with this number of members; `lost`: the members that made it fail."""
        self._failures.observe(members, min(members, len(set(lost))))

    def order(self, stage: int, group: tuple[str, ...], *, wide: bool = False) -> SumTopology:
        """The topology in which `group` of `stage` averages. Raises NoSplit if no peer may sum.

        `wide`: flat, or in the largest possible groups.
        """
        exploring = self._exploring.setdefault(stage, BandwidthProbe())
        tried = exploring.next(self._lines.measured(stage, group), lambda: self._worth_trying(stage, group))
        self._lines.take_for_more(stage, tried)
        rule = group_size(len(group), self._failures.rate, _GROUP_MOST)
        made_from = group, self._lines.changes, rule.rounds, wide
        known_from, known = self._last.get(stage, (None, None))
        if known is not None and made_from == known_from:  # the division among many lines is slow
            return replace(known, news="")
        found = self._best(stage, group, rule.rounds, _GROUP_MOST if wide else self._size)
        self._last[stage] = made_from, found
        return replace(found, news="") if known is not None and found.news == known.news else found

    def _worth_trying(self, stage: int, group: tuple[str, ...]) -> bool:
        """Return True if other shares could be much faster, or if there are too many lines to find out quickly."""
        return len(group) > _GROUP_MOST or self._lines.slack(stage, group) > _WORTH_TRYING

    def _best(self, stage: int, group: tuple[str, ...], rounds: int, size: int) -> SumTopology:
        if size:
            if len(group) <= size:
                return self._flat(stage, group)
            sides = grid_within(len(group), size)
            found = self._rounds(stage, group, sides)
            return _grid(stage, group, sides, found) if found else self._flat(stage, group)
        return self._chosen(stage, group, rounds)

    def _chosen(self, stage: int, group: tuple[str, ...], rounds: int) -> SumTopology:
        count, vector_bytes = len(group), self._lines.vector_bytes(group)
        if count <= _FLAT:
            return self._flat(stage, group)
        possible = count <= _GROUP_MOST
        if possible and not vector_bytes:
            return self._flat(stage, group)
        sides = grid_of(count, max(2, rounds))
        found = self._rounds(stage, group, sides)
        if not found:
            return self._flat(stage, group)
        if possible:
            flat = self._flat(stage, group)
            if _slowest_s(flat.groups, vector_bytes) <= sum(_slowest_s(one, vector_bytes) for one in found):
                return flat
        return _grid(stage, group, sides, found)

    def _flat(self, stage: int, group: tuple[str, ...]) -> SumTopology:
        split = self._lines.split(stage, group)
        helpers = frozenset(party.peer for party in split.parties if party.mode == "aux") if split else frozenset()
        return SumTopology((replace(self._divided(MoshpitGroup(group), split), helpers=helpers),))

    def _rounds(self, stage: int, group: tuple[str, ...], sides: tuple[int, ...]) -> list[list[OrderedGroup]]:
        """The groups of each round of a grid if nobody fails; empty if some group would have no peer that sums."""
        rounds = meetings(group, sides, self._weak(stage, group))
        try:
            return [[self._of_grid(stage, meeting) for meeting in groups] for groups in rounds]
        except NoSplit:
            return []

    def meet(
        self, stage: int, clusters: Sequence[Sequence[str]], listeners: Sequence[str] = ()
    ) -> tuple[OrderedGroup, ...]:
        """The groups that join the sums of these clusters; the peers of a cluster have the same sum. Raises NoSplit.

        `listeners` have no sum and are distributed among the groups.
        """
        groups = joined(clusters, self._weak(stage, [peer for cluster in clusters for peer in cluster]))
        more = [listeners[at :: len(groups)] for at in range(len(groups))]
        heard = (replace(one, listeners=(*one.listeners, *peers)) for one, peers in zip(groups, more, strict=True))
        return tuple(self._of_grid(stage, meeting) for meeting in heard)

    def copy(self, stage: int, holders: Sequence[str], behind: Sequence[str]) -> OrderedGroup:
        """The group in which one of `holders` sends its sum to the peers that are `behind`. Raises NoSplit."""
        holder = next((peer for peer in holders if self._lines.sums(stage, peer)), holders[0])
        return self._of_grid(stage, MoshpitGroup((holder,), tuple(behind)))

    def _of_grid(self, stage: int, meeting: MoshpitGroup) -> OrderedGroup:
        return self._divided(meeting, self._lines.split(stage, meeting.peers, helped=False))

    def _divided(self, meeting: MoshpitGroup, split: Split | None) -> OrderedGroup:
        vector_bytes = self._lines.likely_vector_bytes(meeting.peers)
        return OrderedGroup(meeting, split, most_s=_most_s(len(meeting.peers), split, vector_bytes))

    def _weak(self, stage: int, peers: Iterable[str]) -> frozenset[str]:
        return frozenset(peer for peer in peers if not self._lines.sums(stage, peer))


def _grid(stage: int, group: tuple[str, ...], sides: tuple[int, ...], rounds: list[list[OrderedGroup]]) -> SumTopology:
    shape, most = " x ".join(map(str, sides)), largest_group(len(group), sides)
    why = f"stage {stage} averages in a grid of {shape} for {len(group)} members, groups of up to {most}"
    return SumTopology(tuple(rounds[0]), sides[1:], why)


def foretold_mates(own: str, members: Collection[str], size: int) -> set[str] | None:
    """Peers that `own` will share a group with if these members average in a grid, or None for all members.

    This is predicted from the run's group size. The conductor also knows lines and failures; if its grid differs, the
    missing connections are opened during the round.
    """
    if len(members) <= min(size or _GROUP_MOST, _GROUP_MOST):
        return None
    sides = grid_within(len(members), size) if size else grid_of(len(members), 2)
    groups = (one.peers for found in meetings(sorted(members), sides) for one in found)
    return {peer for peers in groups if own in peers for peer in peers}


def round_s(peers: int, xi_s_per_byte: float, vector_bytes: int) -> float:
    """Predicted duration of a group's round in the line model, in seconds; `xi_s_per_byte` is 0 for unknown lines."""
    xi = xi_s_per_byte or 2 * (peers - 1) / peers / _UNKNOWN_BYTES_PER_S
    parts = min(_PARTS, vector_bytes // peers // _PART_BYTES) if xi_s_per_byte else 0
    return xi * vector_bytes + (_CALL_S + _PART_S * parts) * (peers - 1) + _TURN_S


def _most_s(peers: int, split: Split | None, vector_bytes: int) -> float:
    """Upper bound in seconds for a group's transfers: several times the prediction, and enough for slow lines."""
    needed_s = round_s(peers, split.xi_s_per_byte, vector_bytes) if split is not None else 0.0
    return max(_SEVERAL * needed_s, 2 * vector_bytes / RPC_LEAST_BYTES_PER_S)


def _slowest_s(groups: Iterable[OrderedGroup], vector_bytes: int) -> float:
    """Predicted duration of a round in seconds: that of its slowest group."""
    splits = ((len(one.meeting.peers), one.split) for one in groups)
    return max(round_s(count, split.xi_s_per_byte if split else 0.0, vector_bytes) for count, split in splits)
