"""Figures of one peer's links, by peer: the least round trip of the last minutes, and the most that passed each way.

Fed by a look at all open links about once a second, and by nothing else: no ping and no byte is sent for it. A window
between two looks counts for a rate only if enough passed in it to say something (`access_line`). Sending counts while
bytes waited at both of its ends and nobody paced them: else the program had no more to send, and the rate says nothing
of the path. Receiving counts where large payloads are timed (`arrival_rate`): their median, or what came in a second
where that is more. Of small messages that come now and then no rate is told, since none could be known.

A pair is limited where its rate stays below half of what our own line carries although our line had room for twice as
much and, sending, bytes waited for it: neither our end nor our program set that rate. Whether the other end did, only
that end can tell; see `network_map`. Sans-IO; bounded: the peers that were measured last are kept. Hostile input: a
peer can send slowly, answer pings late, or early by guessing them; each changes the figures of its own pair.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LINE_BYTES_PER_S, NETWORK_PEERS, NETWORK_RTT_S
from peerd.core.messages.network import PairFigures
from peerd.machine.rate.access_line import WINDOW_BYTES, LineRate

RTT_MINUTES: Final = 5  # with a sample; the least in them is the round trip of the idle path
RATE_MINUTES: Final = 10  # with a transfer: a path that became slower is believed slower after these
KEPT_S: Final = 3600.0  # after its last sample, until a figure is not told any more
ROOM: Final = 2.0  # a line carries so much more than a pair that limits itself
_WINDOW_S_MOST: Final = 10.0  # between two looks: what passed in a longer time is no rate
_MINUTE_S: Final = 60.0
_RTT_S_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True)
class LinkLook:
    """The links to one peer at one moment; bytes are counted since they stand."""

    bytes_out: int
    bytes_in: int
    rtt_s: float | None = None  # the newest sample
    waits: bool = False  # bytes wait to be sent
    paced: bool = False  # they are held back on purpose
    arrival_bytes_per_s: float | None = None  # the median of the newest large payloads


@dataclass(frozen=True, slots=True)
class OwnLine:
    """The rates of this machine's own line, in bytes/s; 0: unknown."""

    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(slots=True)
class _Way:
    """One direction of a pair."""

    rate: LineRate = field(default_factory=lambda: LineRate(RATE_MINUTES))
    at: float = -math.inf
    limited_at: float = -math.inf  # when the pair, and nothing here, set the rate last

    def note(self, now: float, count: float, seconds: float) -> bool:
        """Take a window; True when it said something."""
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
    """The figures of this peer's pairs. See the module's header."""

    def __init__(self) -> None:
        self._pairs = BoundedDict[str, _Pair](NETWORK_PEERS)
        self._before: dict[str, LinkLook] = {}
        self._looked_at = -math.inf

    def look(self, now: float, links: Mapping[str, LinkLook], line: OwnLine) -> None:
        """Take a look at all open links, by peer."""
        seconds, before = now - self._looked_at, self._before
        self._before, self._looked_at = dict(links), now
        moved = {
            peer: (link.bytes_out - last.bytes_out, link.bytes_in - last.bytes_in)
            for peer, link in links.items()
            if (last := before.get(peer)) is not None
        }
        moved = {peer: both for peer, both in moved.items() if min(both) >= 0}  # a link that ended took its count along
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
        """Take a window of one direction; True when enough passed in it."""
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
        """All that is known and not too old, by peer; the peer that was measured longest ago comes first."""
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
