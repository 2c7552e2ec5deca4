"""Number of further connections of a link: none while one fills the line, several on long fat paths.

One TCP connection has at most its send buffer under way (usually some 3 MB, 240 Mb/s at 100 ms), and needs many round
trips to get there. Several start faster and together hold more; but on a line that one can fill they would only push
others aside. So rails are opened when so much is under way that the path is long and fat, and either the flow still
grows, so that nobody knows its end, or it is near what one connection can hold. Where a round trip is so long that all
this takes seconds to see, they are tried as soon as much waits, and closed if the path turns out to be no fat one.
Sans-IO, with the reason beside the answer. The side that dialed decides, for both directions: it sees both.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.core.limits import RAILS_PER_LINK

_LOOK_BYTES: Final = 1 << 20  # before another look: what moves less needs none,
_LOOK_BYTES_FAR: Final = 64 * 1024  # except where it takes seconds to move that much
_FAR_S: Final = 0.15  # a round trip, of which it takes ten until one connection is fast
_MUCH_BYTES: Final = 512 * 1024  # waits to be sent: on such a path that alone takes longer than to open rails
_TRIAL_AGAIN_S: Final = 60.0  # after one that was in vain, perhaps
_TRIAL_ROUND_TRIPS: Final = 16  # after that so many rails have shown what the path carries
_LOOK_S: Final = 0.05  # no sooner than this, nor than a round trip: bursts of less say nothing of the rate
_GAP_S: Final = 1.0  # a look after a longer time begins anew
_RTT_S_MIN: Final = 0.012  # nearer peers are reached at 2 Gb/s with one connection
_FLIGHT_BYTES: Final = 256 * 1024  # under way: below, the path is not fat
_LARGE_BYTES: Final = 1 << 20  # under way: soon more than one connection holds
_GREW: Final = 1.25  # from one look to the next
_RTT_S_PER_RAIL: Final = 0.025
_BYTES_PER_RAIL: Final = 2 << 20  # less than it could hold, so that one which lost a packet can catch up
_IDLE_S: Final = 30.0  # routers forget connections that carry nothing; new ones cost little
_AGAIN_S: Final = 30.0  # after a failed attempt, doubled each time
_AGAIN_S_MAX: Final = 900.0


class RailPlan:
    """Rail count of one link, on the side that dialed it."""

    def __init__(self, now: float) -> None:
        self._at, self._in, self._out = now, 0, 0
        self._flight = 0.0  # bytes under way at the last look
        self._busy_at = now
        self._retry_at = self._trial_at = -math.inf
        self._trial_until = math.inf  # while it runs
        self._again_s = _AGAIN_S

    def look(
        self, now: float, rtt_s: float | None, moved: tuple[int, int], rails: int, waiting_bytes: int = 0
    ) -> tuple[int, str]:
        """Number of rails that there should be, and why, once `moved` bytes came and went in all; `rails` are there."""
        passed_s = now - self._at
        most = max(moved[0] - self._in, moved[1] - self._out)
        self._at, (self._in, self._out) = now, moved
        flight = most / passed_s * rtt_s if rtt_s is not None and 0 < passed_s <= _GAP_S + rtt_s else 0.0
        before, self._flight = self._flight, flight
        if flight >= _FLIGHT_BYTES / 4:
            self._busy_at = now
        if rails and now - self._busy_at >= _IDLE_S:
            return 0, "the path is idle"
        if rtt_s is None or rtt_s < _RTT_S_MIN:
            return rails, "the path is short"
        if self._in_vain(now, flight):
            return 0, "one connection would do as well"
        if waiting_bytes >= self.trial_bytes(now, rtt_s, rails):
            self._trial_until, self._trial_at = now + _TRIAL_ROUND_TRIPS * rtt_s, now + _TRIAL_AGAIN_S
            return _rails_for(rtt_s, 0.0), "much waits for a far peer"
        if flight < _FLIGHT_BYTES:
            return rails, "little is under way"
        if now < self._retry_at:
            return rails, "the last attempt failed"
        if not rails and flight < _LARGE_BYTES and flight < _GREW * before:
            return rails, "one connection fills the line"
        return max(rails, _rails_for(rtt_s, min(flight, before))), f"{flight / 1e6:.1f} MB are under way"

    def trial_bytes(self, now: float, rtt_s: float | None, rails: int) -> float:
        """Bytes that have to wait for rails to be tried before anything is known of the path; else infinity."""
        far = rtt_s is not None and rtt_s >= _FAR_S
        return _MUCH_BYTES if far and not rails and now >= max(self._retry_at, self._trial_at) else math.inf

    def _in_vain(self, now: float, flight: float) -> bool:
        """True when rails were tried and are not needed."""
        if flight >= _LARGE_BYTES:
            self._trial_until = math.inf
        over = now >= self._trial_until
        if over:
            self._trial_until = math.inf
        return over

    def look_bytes(self, rtt_s: float | None) -> int:
        """Bytes that should move before the next look."""
        return _LOOK_BYTES if rtt_s is None or rtt_s < _FAR_S else _LOOK_BYTES_FAR

    def pause_s(self, rtt_s: float | None) -> float:
        """Pause before the next look."""
        return max(rtt_s or 0.0, _LOOK_S)

    @property
    def idle_s(self) -> float:
        """Seconds without traffic after which a look is due all the same."""
        return _IDLE_S

    def failed(self, now: float) -> None:
        """A rail could not be opened."""
        self._retry_at = now + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_S_MAX)


def _rails_for(rtt_s: float, flight_bytes: float) -> int:
    wanted = max(math.ceil(rtt_s / _RTT_S_PER_RAIL), math.ceil(flight_bytes / _BYTES_PER_RAIL), 2)
    return min(wanted, RAILS_PER_LINK)
