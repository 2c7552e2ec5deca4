"""Topology of a stage's sum: flat, with everyone in one group, or a grid, in several rounds of small groups.

Flat where `group_size` allows it. When the run leaves the size to us (0) a stage of up to `_FLAT` members is flat, and
a larger one where the line model does not find a grid faster; how many rounds this has, the rule of `group_size` says
for the failure rate seen so far. A grid moves the vector once for each round, and saves what every mate in a group
costs besides: it pays for many members on fast lines. More than `_GROUP_MOST` are never one group. Helpers take part in
flat rounds only: in a grid they would have to be divided among groups that do not know each other. `order` says which
groups sum the members' own vectors, `meet` which groups join the sums that they have by then. Decides only; what it
knows of lines and vectors is strangers' word, and a lie makes a round slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from peerd.core.limits import LINKS_INBOUND, RPC_LEAST_BYTES_PER_S
from peerd.machine.averaging.bandwidth_probe import BandwidthProbe
from peerd.machine.averaging.group_size import FailureRate, group_size
from peerd.machine.averaging.moshpit import MoshpitGroup, grid_of, grid_within, joined, largest_group, meetings
from peerd.machine.averaging.shares import NoSplit
from peerd.machine.averaging.work_split import Split, WorkSplitter

_FLAT = 8  # members: a grid of so few saves nothing
_GROUP_MOST = LINKS_INBOUND // 2  # peers of one group: everyone has a connection to each of the others
_UNKNOWN_BYTES_PER_S = 12.5e6  # a line of which nobody says anything
_SEVERAL = 4.0  # a line that is used by others, too, carries less than it says
_CALL_S = 0.001  # of computing, on a slow machine: what each further peer of a group costs a member,
_PART_S = 0.0005  # and each part of its share, if known lines cut it; `bench.py grids` measures half of both
_PARTS, _PART_BYTES = 8, 4096  # how many of these count at most, and how small they are
_WORTH_TRYING = 1.15  # times the slowest sender's own time: what a better division could gain at most
_TURN_S = 0.1  # what a round takes beside that: parts go to their owners, and sums come back


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """One group that sums: `split` divides the work (None: in equal shares). `most_s` is how long its bytes may take,
    by the lines and the size of the vector.
    """

    meeting: MoshpitGroup
    split: Split | None
    helpers: frozenset[str] = frozenset()
    most_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ordered:
    """How a stage sums its members' vectors. `groups` of the first round; `sides`: how many of the sums that there are
    by then each group of a later round joins. One group and no sides: flat.
    """

    groups: tuple[OrderedGroup, ...]
    sides: tuple[int, ...] = ()
    news: str = ""  # how it is ordered, where that is new


class GroupTopology:
    """Orders attempts. `size`: peers of a group at most (3 or more); 0: chosen."""

    def __init__(self, lines: WorkSplitter, size: int) -> None:
        self._lines = lines
        self._size = min(size, _GROUP_MOST)
        self._failures = FailureRate()
        self._exploring: dict[int, BandwidthProbe] = {}
        self._last: dict[int, tuple[object, Ordered]] = {}  # of each stage, and what it was made from

    def observe(self, members: int, lost: Iterable[str] = ()) -> None:
        """An attempt with so many members has ended, and failed for want of those who are `lost`."""
        self._failures.observe(members, min(members, len(set(lost))))

    def order(self, stage: int, group: tuple[str, ...], *, wide: bool = False) -> Ordered:
        """The topology in which `group` of `stage` averages. Raises NoSplit when nobody may sum.

        `wide`: flat, or in groups as large as can be.
        """
        exploring = self._exploring.setdefault(stage, BandwidthProbe())
        tried = exploring.next(self._lines.measured(stage, group), lambda: self._worth_trying(stage, group))
        self._lines.take_for_more(stage, tried)
        rule = group_size(len(group), self._failures.rate, _GROUP_MOST)
        made_from = group, self._lines.changes, rule.rounds, wide
        known_from, known = self._last.get(stage, (None, None))
        if known is not None and made_from == known_from:  # many lines take long to divide
            return replace(known, news="")
        found = self._best(stage, group, rule.rounds, _GROUP_MOST if wide else self._size)
        self._last[stage] = made_from, found
        return replace(found, news="") if known is not None and found.news == known.news else found

    def _worth_trying(self, stage: int, group: tuple[str, ...]) -> bool:
        """True when another division could be much faster, or when there are so many lines that finding out
        takes long.
        """
        return len(group) > _GROUP_MOST or self._lines.slack(stage, group) > _WORTH_TRYING

    def _best(self, stage: int, group: tuple[str, ...], rounds: int, size: int) -> Ordered:
        if size:
            if len(group) <= size:
                return self._flat(stage, group)
            sides = grid_within(len(group), size)
            found = self._rounds(stage, group, sides)
            return _grid(stage, group, sides, found) if found else self._flat(stage, group)
        return self._chosen(stage, group, rounds)

    def _chosen(self, stage: int, group: tuple[str, ...], rounds: int) -> Ordered:
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

    def _flat(self, stage: int, group: tuple[str, ...]) -> Ordered:
        split = self._lines.split(stage, group)
        helpers = frozenset(party.peer for party in split.parties if party.mode == "aux") if split else frozenset()
        return Ordered((replace(self._divided(MoshpitGroup(group), split), helpers=helpers),))

    def _rounds(self, stage: int, group: tuple[str, ...], sides: tuple[int, ...]) -> list[list[OrderedGroup]]:
        """The groups of each round of a grid, if nobody fails; none where some group would have nobody to sum."""
        rounds = meetings(group, sides, self._weak(stage, group))
        try:
            return [[self._of_grid(stage, meeting) for meeting in groups] for groups in rounds]
        except NoSplit:
            return []

    def meet(
        self, stage: int, clusters: Sequence[Sequence[str]], listeners: Sequence[str] = ()
    ) -> tuple[OrderedGroup, ...]:
        """The groups that join the sums of these clusters, each of peers with the same one. Raises NoSplit.

        `listeners` have none, and are spread among the groups.
        """
        groups = joined(clusters, self._weak(stage, [peer for cluster in clusters for peer in cluster]))
        more = [listeners[at :: len(groups)] for at in range(len(groups))]
        heard = (replace(one, listeners=(*one.listeners, *peers)) for one, peers in zip(groups, more, strict=True))
        return tuple(self._of_grid(stage, meeting) for meeting in heard)

    def copy(self, stage: int, holders: Sequence[str], behind: Sequence[str]) -> OrderedGroup:
        """The group in which one of `holders` gives the sum that it has to those that are `behind`. Raises NoSplit."""
        holder = next((peer for peer in holders if self._lines.sums(stage, peer)), holders[0])
        return self._of_grid(stage, MoshpitGroup((holder,), tuple(behind)))

    def _of_grid(self, stage: int, meeting: MoshpitGroup) -> OrderedGroup:
        return self._divided(meeting, self._lines.split(stage, meeting.peers, helped=False))

    def _divided(self, meeting: MoshpitGroup, split: Split | None) -> OrderedGroup:
        vector_bytes = self._lines.likely_vector_bytes(meeting.peers)
        return OrderedGroup(meeting, split, most_s=_most_s(len(meeting.peers), split, vector_bytes))

    def _weak(self, stage: int, peers: Iterable[str]) -> frozenset[str]:
        return frozenset(peer for peer in peers if not self._lines.sums(stage, peer))


def _grid(stage: int, group: tuple[str, ...], sides: tuple[int, ...], rounds: list[list[OrderedGroup]]) -> Ordered:
    shape, most = " x ".join(map(str, sides)), largest_group(len(group), sides)
    why = f"stage {stage} averages in a grid of {shape} for {len(group)} members, groups of up to {most}"
    return Ordered(tuple(rounds[0]), sides[1:], why)


def foretold_mates(own: str, members: Collection[str], size: int) -> set[str] | None:
    """Peers that `own` will meet when these members average in a grid, as far as the run's group size tells; None: all.

    The conductor knows more: of lines and failures. Where that makes a difference, links are made in the round.
    """
    if len(members) <= min(size or _GROUP_MOST, _GROUP_MOST):
        return None
    sides = grid_within(len(members), size) if size else grid_of(len(members), 2)
    groups = (one.peers for found in meetings(sorted(members), sides) for one in found)
    return {peer for peers in groups if own in peers for peer in peers}


def round_s(peers: int, xi_s_per_byte: float, vector_bytes: int) -> float:
    """Duration of a round of a group of `peers` in the line model; xi 0: their lines are unknown."""
    xi = xi_s_per_byte or 2 * (peers - 1) / peers / _UNKNOWN_BYTES_PER_S
    parts = min(_PARTS, vector_bytes // peers // _PART_BYTES) if xi_s_per_byte else 0
    return xi * vector_bytes + (_CALL_S + _PART_S * parts) * (peers - 1) + _TURN_S


def _most_s(peers: int, split: Split | None, vector_bytes: int) -> float:
    """Returns the most seconds that the bytes of a group may take: several times what the lines need, and never less
    than slow lines need.
    """
    needed_s = round_s(peers, split.xi_s_per_byte, vector_bytes) if split is not None else 0.0
    return max(_SEVERAL * needed_s, 2 * vector_bytes / RPC_LEAST_BYTES_PER_S)


def _slowest_s(groups: Iterable[OrderedGroup], vector_bytes: int) -> float:
    """Duration of a round in the line model: it lasts as long as its slowest group."""
    splits = ((len(one.meeting.peers), one.split) for one in groups)
    return max(round_s(count, split.xi_s_per_byte if split else 0.0, vector_bytes) for count, split in splits)
