"""Division of a round's work among a stage's members and helpers, by their reported line rates.

WorkSplitter stores the reports, and the pairs of peers whose path is narrower than their lines (`limit_pairs`). For
each attempt it computes one `Split`: shares by bandwidth, and parts so small that the data in flight at any time is a
fraction of the round. Without any reports there is no split: shares are equal. All reports are from strangers: rates
are clamped to bounds, and helpers are used only if all members agree on the vector. A false report causes too much work
and delays the round; the conductor then excludes the peer, for longer each time. Invariant: a client never gets a
share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from peerd.averaging.bandwidth_probe import TRY
from peerd.averaging.shares import MemberLine, Mode, NoSplit, Shares, proportional, shares, widths
from peerd.averaging.shares_lp import shares_within
from peerd.core.limits import (
    AVERAGE_PART_BYTES,
    LINE_BYTES_PER_S,
    LINE_BYTES_PER_S_MIN,
    LINE_PAIRS_GROUP,
    LINE_S_PER_BYTE,
)
from peerd.messages.swarm import MAX_MEMBERS, LineInfo, MemberInfo, Party

_PART_BYTES_LEAST = 16 << 10  # smaller parts cost more in calls than they save in waiting
_PARTS_UNDER_WAY = 4  # parts in flight to one owner of an equal share
_UNDER_WAY_SHARE = 1 / 8  # most of the vector in flight: the end of a round waits for it
_FEW_BYTES = 64 << 10  # part size for few owners: each part costs both ends a millisecond of CPU time
_FEW_SHARE = 1 / 16  # most of the vector that one such part for each owner may add up to
_UNDER_WAY_S = 2.0  # longest time for the data in flight; the patience with a member must be longer
_OWNERS_LEAST = 8  # fewer owners do not get larger parts: those would exceed a stream's window
_NARROW = 0.5  # a pair limit above this fraction of both ends' lines is ignored
_HELP_LEAST = 0.02  # least fraction of the vector that all helpers left out would have summed together
_CRUMB = 1e-3  # least fraction of the largest share that is worth a call from every sender
_ITEM_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Split:
    """One division of a round: the parties, their modes, and the share that each sums.

    `lines` and `pairs` are the inputs of the division.
    """

    parties: tuple[Party, ...]
    part_bytes: int  # 0: as in the run file
    elements: int
    dtype: str
    why: str
    lines: tuple[MemberLine, ...]
    pairs: tuple[tuple[tuple[str, str], float], ...] = ()  # (from, to), bytes/s
    further: int = 0  # elements of a second sum
    xi_s_per_byte: float = 0.0  # modelled time of a round per byte of the vector; 0: no line is known
    stated: bool = False  # all rates are stated, none is measured: a measured line may carry more

    @property
    def s_per_byte(self) -> float:
        """Value of `AveragingPlan.s_per_byte`; 0 unless all rates are stated.

        Sending at a measured estimate would keep the line from ever exceeding it, so the estimate could not grow.
        """
        return self.xi_s_per_byte if self.stated and self.xi_s_per_byte <= LINE_S_PER_BYTE else 0.0

    def within_pairs(self) -> Split:
        """The division that also respects `pairs`. Slow, so run it on a worker. Raises NoSplit."""
        return _split(self.lines, shares_within(self.lines, dict(self.pairs)), self)


@dataclass(frozen=True, slots=True)
class _Said:
    stage: int
    line: LineInfo
    addrs: tuple[str, ...]


class WorkSplitter:
    """The reported line rates of all peers, and the divisions computed from them."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}
        self.changes = 0  # counts changes of the inputs: the same number means the same splits
        self._tried: dict[int, str] = {}  # by stage, the peer whose line is probed
        self._pairs: dict[tuple[str, str], float] = {}  # (from, to): bytes/s that the pair carries
        self._resting: dict[int, frozenset[str]] = {}  # by stage, peers that get no share for now
        self._laid_off: dict[int, frozenset[str]] = {}  # by stage, members that sum for others and send no vector
        self._splits: dict[tuple[str, ...], tuple[object, Split]] = {}  # by group: inputs of the split, and the split

    def tell(self, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...] = ()) -> bool:
        """Store the line rates that `peer`, a member of `stage` or a helper for it, reports.

        Returns True if a helper is new or gone, or its stage or addresses have changed.
        """
        before = self._said.get(peer)
        if before is None and len(self._said) >= MAX_MEMBERS:
            return False
        now = _Said(stage, line, addrs)
        if now != before:  # otherwise keep the same object: comparing identical objects is fast
            self._said[peer] = now
            self.changes += 1
        aux_before = before is not None and before.line.mode == "aux"
        if line.mode != "aux":
            return aux_before
        return not aux_before or before is None or (before.stage, before.addrs) != (now.stage, now.addrs)

    def forget(self, peer: str) -> bool:
        """Drop a peer that has left; return True if it was a helper."""
        said = self._said.pop(peer, None)
        self.changes += said is not None
        return said is not None and said.line.mode == "aux"

    def limit_pairs(self, limits: Mapping[tuple[str, str], float]) -> None:
        """Replace all pair limits: (from, to) -> bytes/s; see `placement/network/network_map`."""
        if limits != self._pairs:
            self._pairs = dict(limits)
            self.changes += 1

    def known(self) -> list[str]:
        """All peers that have reported their lines, sorted."""
        return sorted(self._said)

    def helpers(self) -> list[MemberInfo]:
        """All helpers with their addresses, sorted; none of them serves the stage."""
        return [
            MemberInfo(peer, said.stage, list(said.addrs), False)
            for peer, said in sorted(self._said.items())
            if said.line.mode == "aux"
        ]

    def is_client(self, peer: str) -> bool:
        return self._line(peer).mode == "client"

    def rates(self, peer: str) -> tuple[float, float]:
        """Reported upload and download rates of a peer's line in bytes/s; 0 if unknown."""
        line = self._line(peer)
        return _rate(line.up_bytes_per_s) or 0.0, _rate(line.down_bytes_per_s) or 0.0

    def measured(self, stage: int, group: tuple[str, ...]) -> dict[str, float]:
        """Lines with a rate measured from traffic, in bytes/s of the narrower direction, for group and helpers."""
        found: dict[str, float] = {}
        for peer, line in self._taking_part(stage, group).items():
            rates = [(line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured)]
            known = [(rate, measured) for said, measured in rates if (rate := _rate(said)) is not None]
            if line.mode != "client" and known and min(known)[1]:
                found[peer] = min(known)[0]
        return found

    def slack(self, stage: int, group: tuple[str, ...]) -> float:
        """Ratio of a round's predicted duration to the slowest sender's time for its own vector; the least is 1."""
        lines = _as_taken(self._taking_part(stage, group), None)
        try:
            found, rates = shares(lines), widths(lines)
        except NoSplit:
            return 1.0
        return found.xi_s_per_byte * min(rates[line.peer] for line in lines if line.sends)

    def take_for_more(self, stage: int, peer: str | None) -> None:
        """Probe the line of `peer`: from now on it counts with TRY times its measured rate. None ends the probe."""
        if self._tried.get(stage) != peer:
            self.changes += 1
            self._tried.pop(stage, None)
            if peer is not None:
                self._tried[stage] = peer

    def rest(self, stage: int, peers: frozenset[str]) -> None:
        """Set the members of the stage that act as clients: they send their vector and sum nothing."""
        if self._resting.get(stage, frozenset()) != peers:
            self._resting[stage] = peers
            self.changes += 1

    def lay_off(self, stage: int, posts: frozenset[str]) -> None:
        """Set the members of the stage that act as helpers, if others can reach them: they sum and send no vector."""
        if self._laid_off.get(stage, frozenset()) != posts:
            self._laid_off[stage] = posts
            self.changes += 1

    def member_line(self, peer: str) -> MemberLine:
        """A peer's line as the division of the work uses it."""
        return _as_taken({peer: self._line(peer)}, None)[0]

    def is_measured(self, peer: str) -> bool:
        """Return True if the rate of the narrower direction is measured from traffic, not stated by the peer."""
        line = self._line(peer)
        rates = [(line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured)]
        known = [(rate, measured) for said, measured in rates if (rate := _rate(said)) is not None]
        return min(known, default=(0.0, True))[1]

    def _taking_part(self, stage: int, group: Iterable[str], *, helped: bool = True) -> dict[str, LineInfo]:
        """The reported lines of a round's members and, if `helped`, of its helpers, by peer."""
        found = {peer: self._line(peer) for peer in group}
        if not helped:
            return found
        found |= {i.peer: self._line(i.peer) for i in self.helpers() if i.stage == stage and i.peer not in found}
        for peer in sorted(self._laid_off.get(stage, frozenset()) - found.keys()):
            if peer in self._said and (line := self._line(peer)).mode == "node":
                found[peer] = msgspec.structs.replace(line, mode="aux")
        return found

    def sums(self, stage: int, peer: str) -> bool:
        """Return True if the member may get a share."""
        return not self.is_client(peer) and peer not in self._resting.get(stage, ())

    def vector_bytes(self, group: tuple[str, ...]) -> int:
        """Size of the vectors that the group contributes, or 0 if it is unknown or they differ."""
        sizes = set(self._sizes(group))
        return sizes.pop() if len(sizes) == 1 else 0

    def likely_vector_bytes(self, group: tuple[str, ...]) -> int:
        """The vector size that most of the group report, the smaller of two equally frequent ones; 0 if unreported."""
        told = Counter(size for size in self._sizes(group) if size)
        return min(told, key=lambda size: (-told[size], size), default=0)

    def _sizes(self, group: tuple[str, ...]) -> Iterator[int]:
        for line in map(self._line, group):
            yield (line.elements + line.further) * _ITEM_BYTES.get(line.dtype, 0)

    def split(self, stage: int, group: tuple[str, ...], *, helped: bool = True) -> Split | None:
        """Division of a round among `group` of `stage`, or None for equal shares. Raises NoSplit if no peer may sum.

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
        if known is not None and known_from == made_from:  # few of a grid's many groups change at a time
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
        """Pair limits within this group that are clearly below both ends' lines; empty for large groups."""
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
    """The lines as the division uses them: TRY times the measured rate for `tried`, the peer that is probed."""

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
    """Return True if the peer states both rates of its line itself; False if one is measured or unknown."""
    rates = ((line.up_bytes_per_s, line.up_measured), (line.down_bytes_per_s, line.down_measured))
    return all(_rate(rate) is not None and not measured for rate, measured in rates)


def _rate(bytes_per_s: float) -> float | None:
    """A reported rate, clamped to bounds, or None if unknown."""
    if math.isnan(bytes_per_s) or bytes_per_s <= 0:
        return None
    return min(max(bytes_per_s, LINE_BYTES_PER_S_MIN), LINE_BYTES_PER_S)


def _hardly_helping(lines: tuple[MemberLine, ...], fractions: Mapping[str, float]) -> set[str]:
    """The helpers with the smallest shares that together would sum less than `_HELP_LEAST` of the vector.

    Every sender would send to each of them and wait for the last, while the others can do their work in no time.
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
    """The split by these shares, without tiny ones; a helper without work is left out."""
    crumb = max(found.fractions.values()) * _CRUMB
    hardly = set[str]() if frame.pairs else _hardly_helping(lines, found.fractions)  # limited pairs may need any helper
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
