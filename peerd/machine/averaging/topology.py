"""Topology of one averaging attempt of a stage: flat, with everyone in one group, or the rounds of a grid.

Flat where `group_size` allows it. When the run leaves the size to us (0) a stage of up to `_FLAT` members is flat, and
a larger one where the line model does not find a grid faster; how many rounds this has, the rule of `group_size` says
for the failure rate seen so far. A grid moves the vector once for each round, and saves what every mate in a group
costs besides: it pays for many members on fast lines. More than `_GROUP_MOST` are never one group. Helpers take part in
flat rounds only: in a grid they would have to be divided among groups that do not know each other. All groups share one
fate: an attempt in which one fails is repeated without the lost. Decides only; what it knows of lines and vectors is
strangers' word, and a lie makes a round slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from peerd.core.limits import LINKS_INBOUND, RPC_LEAST_BYTES_PER_S
from peerd.core.messages.swarm import GridRound
from peerd.machine.averaging.bandwidth_probe import Exploring
from peerd.machine.averaging.group_size import FailureRate, group_size
from peerd.machine.averaging.moshpit import Meeting, grid_of, grid_within, largest_group, meetings
from peerd.machine.averaging.shares import NoSplit
from peerd.machine.averaging.work_split import Lines, Split

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
class OrderedRound:
    """One round of a grid: a member's group in it, and how this divides the work; None: in equal shares."""

    meeting: Meeting
    split: Split | None
    earlier_s: float = 0.0  # what the rounds before it take in the line model; 0: not known

    def message(self) -> GridRound:
        """The round as an order tells it to a member."""
        meeting, split = self.meeting, self.split
        return GridRound(
            senders=list(meeting.senders),
            listeners=list(meeting.listeners),
            copy=meeting.copy,
            copies=meeting.copies,
            split=list(split.parties) if split is not None else [],
            part_bytes=split.part_bytes if split is not None else 0,
            earlier_s=min(self.earlier_s, 1e9),
            s_per_byte=split.s_per_byte if split is not None else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Ordered:
    """An attempt. `rounds` by member; none: one flat round, divided by `split` (None: in equal shares)."""

    split: Split | None
    helpers: frozenset[str]
    rounds: dict[str, tuple[OrderedRound, ...]] = field(default_factory=dict)
    news: str = ""  # how it is ordered, where that is new
    most_s: float = 0.0  # how long its bytes may take, by the lines and the size of the vector


class Grouping:
    """Orders attempts. `size`: peers of a group at most (3 or more); 0: chosen."""

    def __init__(self, lines: Lines, size: int) -> None:
        self._lines = lines
        self._size = min(size, _GROUP_MOST)
        self._failures = FailureRate()
        self._exploring: dict[int, Exploring] = {}
        self._last: dict[int, tuple[object, Ordered]] = {}  # of each stage, and what it was made from

    def observe(self, members: int, lost: Iterable[str] = ()) -> None:
        """An attempt with so many members has ended, and failed for want of those who are `lost`."""
        self._failures.observe(members, min(members, len(set(lost))))

    def order(self, stage: int, group: tuple[str, ...]) -> Ordered:
        """The topology in which `group` of `stage` averages. Raises NoSplit when nobody may sum."""
        exploring = self._exploring.setdefault(stage, Exploring())
        tried = exploring.next(self._lines.measured(stage, group), lambda: self._worth_trying(stage, group))
        self._lines.take_for_more(stage, tried)
        rule = group_size(len(group), self._failures.rate, _GROUP_MOST)
        made_from, (known_from, known) = (group, self._lines.changes, rule.rounds), self._last.get(stage, (None, None))
        if known is not None and made_from == known_from:  # many lines take long to divide
            return replace(known, news="")
        found = self._best(stage, group, rule.rounds)
        found = replace(found, most_s=_most_s(found, len(group), self._lines.likely_vector_bytes(group)))
        self._last[stage] = made_from, found
        return replace(found, news="") if known is not None and found.news == known.news else found

    def _worth_trying(self, stage: int, group: tuple[str, ...]) -> bool:
        """True when another division could be much faster, or when there are so many lines that finding out
        takes long.
        """
        return len(group) > _GROUP_MOST or self._lines.slack(stage, group) > _WORTH_TRYING

    def _best(self, stage: int, group: tuple[str, ...], rounds: int) -> Ordered:
        if self._size:
            if len(group) <= self._size:
                return self._flat(stage, group)
            return self._grid(stage, group, grid_within(len(group), self._size)) or self._flat(stage, group)
        return self._chosen(stage, group, rounds)

    def _chosen(self, stage: int, group: tuple[str, ...], rounds: int) -> Ordered:
        count, vector_bytes = len(group), self._lines.vector_bytes(group)
        if count <= _FLAT:
            return self._flat(stage, group)
        possible = count <= _GROUP_MOST
        if possible and not vector_bytes:
            return self._flat(stage, group)
        grid = self._grid(stage, group, grid_of(count, max(2, rounds)))
        if grid is None:
            return self._flat(stage, group)
        flat = self._flat(stage, group) if possible else None
        if flat is not None and _flat_s(count, flat.split, vector_bytes) <= _grid_s(grid, vector_bytes):
            return flat
        return grid

    def _flat(self, stage: int, group: tuple[str, ...]) -> Ordered:
        split = self._lines.split(stage, group)
        helpers = frozenset(party.peer for party in split.parties if party.mode == "aux") if split else frozenset()
        return Ordered(split, helpers)

    def _grid(self, stage: int, group: tuple[str, ...], sides: tuple[int, ...]) -> Ordered | None:
        """A grid with these sides; None where some group would have no peer that can sum."""
        rounds: dict[str, list[OrderedRound]] = {peer: [] for peer in group}
        weak = frozenset(peer for peer in group if not self._lines.sums(stage, peer))
        vector_bytes, earlier_s = self._lines.vector_bytes(group), 0.0
        try:
            for number, groups in enumerate(meetings(group, sides, weak)):
                known, slowest_s = vector_bytes > 0 and (number == 0 or earlier_s > 0), 0.0
                for meeting in groups:
                    split = self._lines.split(stage, meeting.peers, helped=False)
                    known = known and (len(meeting.peers) < 2 or (split is not None and split.xi_s_per_byte > 0))
                    slowest_s = max(slowest_s, _flat_s(len(meeting.peers), split, vector_bytes))
                    for peer in meeting.peers:
                        rounds[peer].append(OrderedRound(meeting, split, earlier_s))
                earlier_s = earlier_s + slowest_s if known else 0.0
        except NoSplit:
            return None
        shape, most = " x ".join(map(str, sides)), largest_group(len(group), sides)
        why = f"stage {stage} averages in a grid of {shape} for {len(group)} members, groups of up to {most}"
        return Ordered(None, frozenset(), {peer: tuple(found) for peer, found in rounds.items()}, why)


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


def _most_s(how: Ordered, count: int, vector_bytes: int) -> float:
    """Returns the most seconds that an attempt's bytes may take: several times what the lines need, and never less than
    slow lines need.
    """

    def of(peers: int, split: Split | None) -> float:
        needed_s = round_s(peers, split.xi_s_per_byte, vector_bytes) if split is not None else 0.0
        return max(_SEVERAL * needed_s, 2 * vector_bytes / RPC_LEAST_BYTES_PER_S)

    by_round = zip(*how.rounds.values(), strict=True)
    grid_s = sum(max(of(len(one.meeting.peers), one.split) for one in set(found)) for found in by_round)
    return grid_s if how.rounds else of(count, how.split)


def _flat_s(count: int, split: Split | None, vector_bytes: int) -> float:
    return round_s(count, split.xi_s_per_byte if split else 0.0, vector_bytes)


def _grid_s(grid: Ordered, vector_bytes: int) -> float:
    """Duration of a grid: every round lasts as long as its slowest group."""
    by_round = zip(*grid.rounds.values(), strict=True)
    return sum(
        max(_flat_s(len(one.meeting.peers), one.split, vector_bytes) for one in set(found)) for found in by_round
    )
