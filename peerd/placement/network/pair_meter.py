"""Figures of one peer's links, by peer: the least round trip of the last minutes, and the highest rate each way.

The input is a snapshot of all open links about once a second; nothing is sent or pinged for it. An interval between two
snapshots counts for a rate only if enough bytes passed in it (`access_line`). Sending counts only if bytes waited at
both of its ends and were not paced; otherwise the program had no more to send, and the rate says nothing about the
path. Receiving counts only if large payloads are timed (`arrival_rate`): their median, or the bytes of one second if
that is more. For occasional small messages no rate is reported, because none can be known.

A pair is limited if its rate stays below half of our own connection's, although that could have carried twice as much
and (for sending) bytes waited: then neither our end nor our program determined the rate. Only the other end knows
whether it did; see `network_map`. Sans-IO; bounded: the most recently measured peers are kept. Hostile input: a peer
can send slowly, answer pings late, or early by guessing them; each affects only the figures of its own pair.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LINE_BYTES_PER_S, NETWORK_PEERS, NETWORK_REPORT_PAIRS, NETWORK_RTT_S
from peerd.messages.network import PairFigures
from peerd.wire.rate.access_line import WINDOW_BYTES, LineRate

RTT_MINUTES: Final = 5  # minutes with a sample whose least one is the round trip of the idle path
RATE_MINUTES: Final = 10  # minutes with a transfer after which a slower path gets a lower rate
KEPT_S: Final = 3600.0  # how long a figure is reported after its last sample
ROOM: Final = 2.0  # least ratio of a line's rate to the rate of a limited pair
_WINDOW_S_MOST: Final = 10.0  # longest interval between two snapshots that yields a rate
_MINUTE_S: Final = 60.0
_RTT_S_MIN: Final = 1e-6

CHANGED: Final = 1.2  # ratio of change at which a figure is reported again
REFRESH_S: Final = 300.0  # interval at which it is reported in any case, because it fades at the conductor


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """Snapshot of the links to one peer; bytes are counted since the links opened."""

    bytes_out: int
    bytes_in: int
    rtt_s: float | None = None  # the newest sample
    waits: bool = False  # bytes wait to be sent
    paced: bool = False  # sending is limited on purpose
    arrival_bytes_per_s: float | None = None  # median rate of the newest large payloads


@dataclass(frozen=True, slots=True)
class OwnLine:
    """The rates of this machine's own internet connection, in bytes/s; 0 if unknown."""

    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(slots=True)
class _Way:
    """Measurements of one direction of a pair of peers."""

    rate: LineRate = field(default_factory=lambda: LineRate(RATE_MINUTES))
    at: float = -math.inf
    limited_at: float = -math.inf  # when the pair, not our own end, last determined the rate

    def note(self, now: float, count: float, seconds: float) -> bool:
        """Record the bytes of an interval; returns True if there were enough to measure a rate."""
        if count < WINDOW_BYTES:
            return False
        self.rate.note(now, int(count), seconds)
        self.at = now
        return True

    def told(self, now: float) -> float:
        return min(self.rate.most_bytes_per_s, LINE_BYTES_PER_S) if now - self.at <= KEPT_S else 0.0

    def is_limited(self, now: float, line_bytes_per_s: float) -> bool:
        fits = 0 < self.rate.most_bytes_per_s * ROOM < line_bytes_per_s
        return fits and now - self.limited_at <= RATE_MINUTES * _MINUTE_S


class _Pair:
    """The measurements of one peer's links."""

    __slots__ = ("down", "round_trips", "rtt_at", "up")

    def __init__(self) -> None:
        self.up, self.down = _Way(), _Way()
        self.round_trips: deque[tuple[int, float]] = deque(maxlen=RTT_MINUTES)  # (minute, least in it)
        self.rtt_at = -math.inf

    def note_rtt(self, now: float, sample_s: float) -> None:
        sample_s = min(max(sample_s, _RTT_S_MIN), NETWORK_RTT_S)
        minute, self.rtt_at = int(now // _MINUTE_S), now
        if self.round_trips and self.round_trips[-1][0] >= minute:
            self.round_trips[-1] = minute, min(sample_s, self.round_trips[-1][1])
        else:
            self.round_trips.append((minute, sample_s))

    def rtt_s(self, now: float) -> float:
        known = self.round_trips and now - self.rtt_at <= KEPT_S
        return min(sample_s for _, sample_s in self.round_trips) if known else 0.0


class PairMeter:
    """Meter of the links to other peers; each peer that was measured forms a pair with this one."""

    def __init__(self) -> None:
        self._pairs = BoundedDict[str, _Pair](NETWORK_PEERS)
        self._before: dict[str, LinkSnapshot] = {}
        self._looked_at = -math.inf

    def look(self, now: float, links: Mapping[str, LinkSnapshot], line: OwnLine) -> None:
        """Process a snapshot of all open links, by peer."""
        seconds, before = now - self._looked_at, self._before
        self._before, self._looked_at = dict(links), now
        moved = {
            peer: (link.bytes_out - last.bytes_out, link.bytes_in - last.bytes_in)
            for peer, link in links.items()
            if (last := before.get(peer)) is not None
        }
        moved = {peer: both for peer, both in moved.items() if min(both) >= 0}  # negative if a link has ended
        total_out, total_in = (sum(both[way] for both in moved.values()) for way in (0, 1))
        for peer, link in links.items():
            last = before.get(peer)
            if link.rtt_s is not None and math.isfinite(link.rtt_s):
                self._of(peer).note_rtt(now, link.rtt_s)
            sent, came = moved.get(peer, (0, 0))
            if last is None or not 0 < seconds <= _WINDOW_S_MOST:
                continue
            if sent and link.waits and last.waits and not (link.paced or last.paced):
                room = total_out * ROOM <= line.up_bytes_per_s * seconds
                self._note(now, peer, "up", sent, seconds, limited=room)
            arrival = link.arrival_bytes_per_s
            if came and arrival is not None and math.isfinite(arrival):
                room = total_in * ROOM <= line.down_bytes_per_s * seconds
                if self._note(now, peer, "down", came, seconds, limited=room):
                    self._note(now, peer, "down", arrival, 1.0, limited=False)

    def _note(self, now: float, peer: str, way: str, count: float, seconds: float, *, limited: bool) -> bool:
        """Record the bytes of an interval in one direction; returns True if there were enough to measure a rate."""
        pair = self._pairs.get(peer) or _Pair()
        direction = pair.up if way == "up" else pair.down
        counted = direction.note(now, min(count, seconds * LINE_BYTES_PER_S), seconds)
        if counted:
            self._pairs[peer] = pair
            direction.limited_at = now if limited else direction.limited_at
        return counted

    def _of(self, peer: str) -> _Pair:
        pair = self._pairs[peer] = self._pairs.get(peer) or _Pair()
        return pair

    def figures(self, now: float, line: OwnLine) -> list[PairFigures]:
        """All known and recent figures, by peer; the peer with the oldest measurement comes first."""
        found = []
        for peer, pair in self._pairs.items():
            rtt_s, up, down = pair.rtt_s(now), pair.up.told(now), pair.down.told(now)
            if not rtt_s and not up and not down:
                continue
            figures = PairFigures(
                peer,
                rtt_s,
                up,
                down,
                now - pair.rtt_at if rtt_s else 0.0,
                now - max(pair.up.at, pair.down.at) if up or down else 0.0,
                up_limited=bool(up) and pair.up.is_limited(now, line.up_bytes_per_s),
                down_limited=bool(down) and pair.down.is_limited(now, line.down_bytes_per_s),
            )
            found.append(figures)
        return found


class ReportChanges:
    """Choice of the figures for a report: those that changed by a fifth, then those not reported for minutes.

    A report is bounded; figures that do not fit are sent with the next one. Figures count as reported once the
    conductor received them (`told`); a new conductor knows nothing (`forget`). Sans-IO; bounded by the number of peers
    in its input.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, PairFigures]] = {}

    def due(self, now: float, figures: Sequence[PairFigures]) -> list[PairFigures]:
        """The figures to report now, the most changed first."""
        known = {one.peer for one in figures}
        self._told = {peer: told for peer, told in self._told.items() if peer in known}
        ranked = []
        for place, one in enumerate(figures):
            at, before = self._told.get(one.peer, (-math.inf, None))
            change = _change(before, one)
            if change >= CHANGED or now - at >= REFRESH_S:
                ranked.append((-change if change >= CHANGED else 0.0, at, place))
        return [figures[place] for *_, place in sorted(ranked)[:NETWORK_REPORT_PAIRS]]

    def told(self, now: float, reported: Iterable[PairFigures]) -> None:
        """Record that the conductor has received these figures."""
        self._told |= {one.peer: (now, one) for one in reported}

    def forget(self) -> None:
        """Forget all reports, because there is a new conductor."""
        self._told.clear()


def _change(before: PairFigures | None, now: PairFigures) -> float:
    """The largest ratio between a figure and its last reported value; infinite if one of the two is unknown."""
    if before is None or (before.up_limited, before.down_limited) != (now.up_limited, now.down_limited):
        return math.inf
    pairs = (
        (before.rtt_s, now.rtt_s),
        (before.up_bytes_per_s, now.up_bytes_per_s),
        (before.down_bytes_per_s, now.down_bytes_per_s),
    )
    return max(_ratio(*pair) for pair in pairs)


def _ratio(one: float, other: float) -> float:
    if one == other:
        return 1.0
    return max(one, other) / min(one, other) if min(one, other) > 0 else math.inf
