"""Division of a round's work among a stage's members and its helpers, by what they say of their lines.

Keeps what was said, and which pairs of peers are narrower than their ends (`limit_pairs`), and turns it into one
`Split` for each attempt: shares by bandwidth, and parts small enough that what is under way at any time is a fraction
of the round. Where nobody said anything there is no split: equal shares.
Everything is a stranger's word: rates are taken within bounds, a helper's only where all members agree on the vector
that it would sum. A liar gets too much work and holds up the round; the conductor then puts it aside, for longer
each time. Invariant: a client is never given a share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from peerd.core.limits import (
    AVERAGE_PART_BYTES,
    LINE_BYTES_PER_S,
    LINE_BYTES_PER_S_MIN,
    LINE_PAIRS_GROUP,
    LINE_S_PER_BYTE,
)
from peerd.core.messages.swarm import MAX_MEMBERS, LineInfo, MemberInfo, Party
from peerd.machine.averaging.bandwidth_probe import TRY
from peerd.machine.averaging.shares import MemberLine, Mode, NoSplit, Shares, proportional, shares, widths
from peerd.machine.averaging.shares_lp import shares_within

_PART_BYTES_LEAST = 16 << 10  # smaller ones cost more in calls than they save in waiting
_PARTS_UNDER_WAY = 4  # for one owner of an equal share: what averaging has in flight
_UNDER_WAY_SHARE = 1 / 8  # of the vector: the end of a round waits for what is under way
_FEW_BYTES = 64 << 10  # of a part for few owners, where one for each of them
_FEW_SHARE = 1 / 16  # is no more of the vector than this: each part costs both ends a millisecond of computing
_UNDER_WAY_S = 2.0  # and so long it takes at most; patience with a member must be longer
_OWNERS_LEAST = 8  # parts for fewer are no larger: a stream's window is full before a large one has gone
_NARROW = 0.5  # of what both ends' lines carry: a pair that carries more does not count
_HELP_LEAST = 0.02  # of the vector
_CRUMB = 1e-3  # of the largest share: less is not worth a call from every sender
_ITEM_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Split:
    """One division of a round: the parties, their modes, and the share that each sums. `lines` and `pairs` are what it
    was made from.
    """

    parties: tuple[Party, ...]
    part_bytes: int  # 0: as the run file says
    elements: int
    dtype: str
    why: str
    lines: tuple[MemberLine, ...]
    pairs: tuple[tuple[tuple[str, str], float], ...] = ()  # (from, to), bytes/s
    further: int = 0  # elements of a second sum
    xi_s_per_byte: float = 0.0  # a round's time over the vector's bytes, in the model; 0: nothing is known of a line
    stated: bool = False  # all lines are known, and none by what passed it: it may carry more

    @property
    def s_per_byte(self) -> float:
        """`AveragingPlan.s_per_byte`; 0 unless lines are stated: a sender held to its estimate would never learn of
        more.
        """
        return self.xi_s_per_byte if self.stated and self.xi_s_per_byte <= LINE_S_PER_BYTE else 0.0

    def within_pairs(self) -> Split:
        """The division when `pairs` count, too. Takes long: for a worker. Raises NoSplit."""
        return _split(self.lines, shares_within(self.lines, dict(self.pairs)), self)


@dataclass(frozen=True, slots=True)
class _Said:
    stage: int
    line: LineInfo
    addrs: tuple[str, ...]


class WorkSplitter:
    """The line figures that peers reported. See the module's header."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}
        self.changes = 0  # of what was said: the same number, the same splits
        self._tried: dict[int, str] = {}  # by stage, the peer whose line counts for more than measured
        self._pairs: dict[tuple[str, str], float] = {}  # (from, to): bytes/s that the pair carries
        self._resting: dict[int, frozenset[str]] = {}  # by stage, peers that get no share for now,
        self._laid_off: dict[int, frozenset[str]] = {}  # and members that sum for others and bring no vector
        self._splits: dict[tuple[str, ...], tuple[object, Split]] = {}  # by group, and what each was made from

    def tell(self, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...] = ()) -> bool:
        """`peer`, of `stage` or a helper for it, says this; True when it tells of a helper what was not known."""
        before = self._said.get(peer)
        if before is None and len(self._said) >= MAX_MEMBERS:
            return False
        now = _Said(stage, line, addrs)
        if now != before:  # else the same object stays, which is soon found to be equal
            self._said[peer] = now
            self.changes += 1
        aux_before = before is not None and before.line.mode == "aux"
        if line.mode != "aux":
            return aux_before
        return not aux_before or before is None or (before.stage, before.addrs) != (now.stage, now.addrs)

    def forget(self, peer: str) -> bool:
        """The peer is gone; True when it was a helper."""
        said = self._said.pop(peer, None)
        self.changes += said is not None
        return said is not None and said.line.mode == "aux"

    def limit_pairs(self, limits: Mapping[tuple[str, str], float]) -> None:
        """Pairs, by (from, to), that carry so many bytes/s, all there are: see `machine/network/network_map`."""
        if limits != self._pairs:
            self._pairs = dict(limits)
            self.changes += 1

    def known(self) -> list[str]:
        """All that have told of their lines, sorted."""
        return sorted(self._said)

    def helpers(self) -> list[MemberInfo]:
        """All helpers, sorted, with the addresses at which they can be reached; none of them serves the stage."""
        return [
            MemberInfo(peer, said.stage, list(said.addrs), False)
            for peer, said in sorted(self._said.items())
            if said.line.mode == "aux"
        ]

    def is_client(self, peer: str) -> bool:
        return self._line(peer).mode == "client"

    def rates(self, peer: str) -> tuple[float, float]:
        """The rates of a peer's line by its own word, up and down, in bytes/s; 0: unknown."""
        line = self._line(peer)
        return _rate(line.up_bytes_per_s) or 0.0, _rate(line.down_bytes_per_s) or 0.0

    def measured(self, stage: int, group: tuple[str, ...]) -> dict[str, float]:
        """Lines that are known by what passed them, in bytes/s of the narrower direction; of the group and helpers."""
        found: dict[str, float] = {}
        for peer, line in self._taking_part(stage, group).items():
            rates = [(line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured)]
            known = [(rate, measured) for said, measured in rates if (rate := _rate(said)) is not None]
            if line.mode != "client" and known and min(known)[1]:
                found[peer] = min(known)[0]
        return found

    def slack(self, stage: int, group: tuple[str, ...]) -> float:
        """Ratio of a round's duration, as the lines are known, to what the slowest sender needs; 1: no division is
        faster.
        """
        lines = _as_taken(self._taking_part(stage, group), None)
        try:
            found, rates = shares(lines), widths(lines)
        except NoSplit:
            return 1.0
        return found.xi_s_per_byte * min(rates[line.peer] for line in lines if line.sends)

    def take_for_more(self, stage: int, peer: str | None) -> None:
        """Count the line of `peer`, from now on, for TRY times what was measured; None: nobody's."""
        if self._tried.get(stage) != peer:
            self.changes += 1
            self._tried.pop(stage, None)
            if peer is not None:
                self._tried[stage] = peer

    def rest(self, stage: int, peers: frozenset[str]) -> None:
        """Let these of the stage, from now on, take part like clients: they send their vector, and sum nothing."""
        if self._resting.get(stage, frozenset()) != peers:
            self._resting[stage] = peers
            self.changes += 1

    def lay_off(self, stage: int, posts: frozenset[str]) -> None:
        """Let these members of the stage, from now on, sum for the others like helpers, if they can be reached."""
        if self._laid_off.get(stage, frozenset()) != posts:
            self._laid_off[stage] = posts
            self.changes += 1

    def member_line(self, peer: str) -> MemberLine:
        """A peer's line as divisions of the work have it."""
        return _as_taken({peer: self._line(peer)}, None)[0]

    def is_measured(self, peer: str) -> bool:
        """True when the narrower direction of the line is known by what passed it, and not by the peer's statement."""
        line = self._line(peer)
        rates = [(line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured)]
        known = [(rate, measured) for said, measured in rates if (rate := _rate(said)) is not None]
        return min(known, default=(0.0, True))[1]

    def _taking_part(self, stage: int, group: Iterable[str], *, helped: bool = True) -> dict[str, LineInfo]:
        """The lines of a round's members, and of those that help them."""
        found = {peer: self._line(peer) for peer in group}
        if not helped:
            return found
        found |= {i.peer: self._line(i.peer) for i in self.helpers() if i.stage == stage and i.peer not in found}
        for peer in sorted(self._laid_off.get(stage, frozenset()) - found.keys()):
            if peer in self._said and (line := self._line(peer)).mode == "node":
                found[peer] = msgspec.structs.replace(line, mode="aux")
        return found

    def sums(self, stage: int, peer: str) -> bool:
        """True when the member may be given a share."""
        return not self.is_client(peer) and peer not in self._resting.get(stage, ())

    def vector_bytes(self, group: tuple[str, ...]) -> int:
        """Size of the vectors that the group brings; 0: not known, or they are not alike."""
        sizes = set(self._sizes(group))
        return sizes.pop() if len(sizes) == 1 else 0

    def likely_vector_bytes(self, group: tuple[str, ...]) -> int:
        """The size that more of the group tell of than of any other, the smaller of two; 0: nobody tells of any."""
        told = Counter(size for size in self._sizes(group) if size)
        return min(told, key=lambda size: (-told[size], size), default=0)

    def _sizes(self, group: tuple[str, ...]) -> Iterator[int]:
        for line in map(self._line, group):
            yield (line.elements + line.further) * _ITEM_BYTES.get(line.dtype, 0)

    def split(self, stage: int, group: tuple[str, ...], *, helped: bool = True) -> Split | None:
        """Division of a round among `group` of `stage`; None: in equal shares. Raises NoSplit when nobody may sum.

        `helped`: the stage's helpers take part.
        """
        if len(group) < 2:
            return None
        resting = self._resting.get(stage, frozenset())
        said = self._taking_part(stage, group, helped=False)
        said |= {peer: msgspec.structs.replace(said[peer], mode="client") for peer in resting & said.keys()}
        vectors = {(line.elements, line.dtype, line.further) for line in said.values()}
        elements, dtype, further = vectors.pop() if len(vectors) == 1 else (0, "", 0)
        if helped and elements and dtype in _ITEM_BYTES:
            said = self._taking_part(stage, group) | said
        if all(line.mode == "node" and not line.up_bytes_per_s and not line.down_bytes_per_s for line in said.values()):
            return None
        tried = self._tried.get(stage)
        pairs = self._narrow_pairs(said)
        made_from = (list(said.items()), tried if tried in said else None, pairs)
        known_from, known = self._splits.get(group, (None, None))
        if known is not None and known_from == made_from:  # of a grid's many groups few change at a time
            return known
        lines = _as_taken(said, tried)
        stated = all(map(_stated, said.values()))
        frame = Split((), 0, elements, dtype, "", lines, pairs, further, stated=stated)
        found = _split(lines, shares(lines), frame)
        if len(self._splits) >= MAX_MEMBERS:
            self._splits.clear()
        self._splits[group] = made_from, found
        return found

    def _narrow_pairs(self, said: Mapping[str, LineInfo]) -> tuple[tuple[tuple[str, str], float], ...]:
        """The limits of pairs of this group that are clearly below both ends' lines; none in large groups."""
        if len(said) > LINE_PAIRS_GROUP:
            return ()
        found = []
        for (source, target), limit in self._pairs.items():
            if source in said and target in said and source != target:
                ends = [_rate(said[source].up_bytes_per_s), _rate(said[target].down_bytes_per_s)]
                carried = min((end for end in ends if end is not None), default=math.inf)
                if limit < _NARROW * carried:
                    found.append(((source, target), min(max(limit, LINE_BYTES_PER_S_MIN), LINE_BYTES_PER_S)))
        return tuple(sorted(found))

    def _line(self, peer: str) -> LineInfo:
        said = self._said.get(peer)
        return said.line if said is not None else LineInfo()


def _as_taken(said: Mapping[str, LineInfo], tried: str | None) -> tuple[MemberLine, ...]:
    """The lines for the division; where `tried`'s was measured, it counts for more."""

    def rate(peer: str, bytes_per_s: float, measured: bool) -> float | None:
        return _rate(bytes_per_s * TRY if measured and peer == tried else bytes_per_s)

    return tuple(
        MemberLine(
            peer,
            Mode(line.mode),
            rate(peer, line.up_bytes_per_s, line.up_measured),
            rate(peer, line.down_bytes_per_s, line.down_measured),
        )
        for peer, line in said.items()
    )


def _stated(line: LineInfo) -> bool:
    """True when the peer states what both directions of its line carry."""
    rates = ((line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured))
    return all(_rate(rate) is not None and not measured for rate, measured in rates)


def _rate(bytes_per_s: float) -> float | None:
    """A rate as somebody says it, within bounds; None: unknown."""
    if math.isnan(bytes_per_s) or bytes_per_s <= 0:
        return None
    return min(max(bytes_per_s, LINE_BYTES_PER_S_MIN), LINE_BYTES_PER_S)


def _hardly_helping(lines: tuple[MemberLine, ...], fractions: Mapping[str, float]) -> set[str]:
    """The helpers of the smallest shares that together would sum less than `_HELP_LEAST` of the vector.

    Everybody sends to each of them, and waits for the last, while the others could do it in no time.
    """
    found, together = set[str](), 0.0
    for peer in sorted(
        (line.peer for line in lines if line.mode is Mode.AUX), key=lambda peer: fractions.get(peer, 0.0)
    ):
        together += fractions.get(peer, 0.0)
        if together >= _HELP_LEAST:
            break
        found.add(peer)
    return found


def _split(lines: tuple[MemberLine, ...], found: Shares, frame: Split) -> Split:
    """The split by these shares, without crumbs; a helper that has nothing to do is left out."""
    crumb = max(found.fractions.values()) * _CRUMB
    hardly = set[str]() if frame.pairs else _hardly_helping(lines, found.fractions)  # pairs may need any of them
    kept = {peer: share for peer, share in found.fractions.items() if share >= crumb and peer not in hardly}
    fractions = proportional(kept)
    parties = tuple(
        Party(line.peer, line.mode.value, fractions.get(line.peer, 0.0))
        for line in lines
        if line.sends or line.peer in fractions
    )
    working = sum(party.share > 0 for party in parties)
    owners = max(_OWNERS_LEAST, working)
    limits = [AVERAGE_PART_BYTES]
    if found.xi_s_per_byte > 0:
        limits.append(int(_UNDER_WAY_S / found.xi_s_per_byte / (_PARTS_UNDER_WAY * owners)))
    if frame.dtype in _ITEM_BYTES:
        vector_bytes = frame.elements * _ITEM_BYTES[frame.dtype]
        few = min(_FEW_BYTES, int(_FEW_SHARE * vector_bytes / working)) if working < _OWNERS_LEAST else 0
        limits.append(max(int(_UNDER_WAY_SHARE * vector_bytes / (_PARTS_UNDER_WAY * owners)), few))
    part_bytes = max(_PART_BYTES_LEAST, min(limits))
    return replace(frame, parties=parties, part_bytes=part_bytes, why=found.why, xi_s_per_byte=found.xi_s_per_byte)
