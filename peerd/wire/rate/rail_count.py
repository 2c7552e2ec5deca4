"""Number of further connections (rails) of a link: none if the first one fills the path, several on long fat paths.

One TCP connection has at most its send buffer in flight (usually about 3 MB, 240 Mb/s at 100 ms), and needs many round
trips to reach that. Several connections start faster and hold more; but on a path that one can fill they would only
take bandwidth from others. So rails are opened if the data in flight shows that the path is long and fat, and either
the rate still grows, so that its limit is unknown, or it is near what one connection can hold. If the round trip is so
long that this takes seconds to see, rails are tried as soon as much data waits, and closed if the path turns out not to
be fat. Sans-IO; returns the reason with the answer. The side that dialed decides for both directions, because it sees
both.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.core.limits import RAILS_PER_LINK
from peerd.wire.rate.delivery_rate import PathRate

_LOOK_BYTES: Final = 1 << 20  # bytes to move before the next check; slower links need none
_LOOK_BYTES_FAR: Final = 64 * 1024  # the same for far peers, for which 1 MiB takes seconds
_FAR_S: Final = 0.15  # round trip of a far peer; one connection needs ten of them to become fast
_MUCH_BYTES: Final = 512 * 1024  # waiting bytes that take longer to send on a far path than opening rails
_TRIAL_AGAIN_S: Final = 60.0  # least time between two trials
_TRIAL_ROUND_TRIPS: Final = 16  # round trips after which a trial has shown what the path carries
_LOOK_S: Final = 0.05  # least interval of checks, besides a round trip; shorter bursts do not show the rate
_GAP_S: Final = 1.0  # a check after a longer interval yields no rate
_RTT_S_MIN: Final = 0.012  # nearer peers are reached at 2 Gb/s with one connection
_FLIGHT_BYTES: Final = 256 * 1024  # with less in flight the path is not fat
_LARGE_BYTES: Final = 1 << 20  # with more in flight, one connection is soon not enough
_GREW: Final = 1.25  # growth from one check to the next that counts
_RTT_S_PER_RAIL: Final = 0.025
_BYTES_PER_RAIL: Final = 2 << 20  # less than it could hold, so that a rail can catch up after a lost packet
_IDLE_S: Final = 30.0  # idle time after which rails are closed: routers forget idle connections, new ones are cheap
_AGAIN_S: Final = 30.0  # pause after a failed attempt, doubled each time
_AGAIN_S_MAX: Final = 900.0

_LOOKS: Final = 16  # samples whose rates count
_LOOK_S_MIN: Final = 0.05
_GAP_LOOKS: Final = 3  # longest usable interval between two samples, in usual pauses
_GAIN: Final = 4 / 3
_LEAST_BYTES_PER_S: Final = 40e6  # least rate of all rails together, which no relevant path minds


class RailPlan:
    """Number of rails of one link, on the side that dialed it."""

    def __init__(self, now: float) -> None:
        self._at, self._in, self._out = now, 0, 0
        self._flight = 0.0  # bytes in flight at the last check
        self._busy_at = now
        self._retry_at = self._trial_at = -math.inf
        self._trial_until = math.inf  # end of the running trial; infinite without one
        self._again_s = _AGAIN_S

    def look(
        self, now: float, rtt_s: float | None, moved: tuple[int, int], rails: int, waiting_bytes: int = 0
    ) -> tuple[int, str]:
        """Number of rails that the link should have, and the reason.

        `moved`: total bytes received and sent so far; `rails`: the current number.
        """
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
            return 0, "one connection is enough"
        if waiting_bytes >= self.trial_bytes(now, rtt_s, rails):
            self._trial_until, self._trial_at = now + _TRIAL_ROUND_TRIPS * rtt_s, now + _TRIAL_AGAIN_S
            return _rails_for(rtt_s, 0.0), "much waits for a far peer"
        if flight < _FLIGHT_BYTES:
            return rails, "little is in flight"
        if now < self._retry_at:
            return rails, "the last attempt failed"
        if not rails and flight < _LARGE_BYTES and flight < _GREW * before:
            return rails, "one connection fills the path"
        return max(rails, _rails_for(rtt_s, min(flight, before))), f"{flight / 1e6:.1f} MB are in flight"

    def trial_bytes(self, now: float, rtt_s: float | None, rails: int) -> float:
        """Waiting bytes from which rails are tried although the path is unknown; infinity if no trial is due."""
        far = rtt_s is not None and rtt_s >= _FAR_S
        return _MUCH_BYTES if far and not rails and now >= max(self._retry_at, self._trial_at) else math.inf

    def _in_vain(self, now: float, flight: float) -> bool:
        """Return True if a trial has ended and rails are not needed."""
        if flight >= _LARGE_BYTES:
            self._trial_until = math.inf
        over = now >= self._trial_until
        if over:
            self._trial_until = math.inf
        return over

    def look_bytes(self, rtt_s: float | None) -> int:
        """Bytes that should move before the next check."""
        return _LOOK_BYTES if rtt_s is None or rtt_s < _FAR_S else _LOOK_BYTES_FAR

    def pause_s(self, rtt_s: float | None) -> float:
        """Seconds before the next check."""
        return max(rtt_s or 0.0, _LOOK_S)

    @property
    def idle_s(self) -> float:
        """Seconds without traffic after which a check is due anyway."""
        return _IDLE_S

    def failed(self, now: float) -> None:
        """Record that a rail could not be opened."""
        self._retry_at = now + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_S_MAX)


def _rails_for(rtt_s: float, flight_bytes: float) -> int:
    wanted = max(math.ceil(rtt_s / _RTT_S_PER_RAIL), math.ceil(flight_bytes / _BYTES_PER_RAIL), 2)
    return min(wanted, RAILS_PER_LINK)


class RailPace:
    """Pacing of the rails of one link: together they send only slightly faster than the path has recently carried.

    Each connection finds its own rate from what it got while others paused; a dozen of them together assume several
    times the path's rate. While credit arrives at the rate of delivered data this does no harm. But much data may be
    allowed at once, because a piece that all waited for has arrived, or because several connections have just ended a
    measurement in which they pause (BBR's PROBE_RTT). Then they would fill the queue at the bottleneck within a tenth
    of a second, and lose more than they had waited for. So once the rate no longer grows, each rail may send at its
    share of the carried rate plus a third, which is enough for the others to make up for a few that pause. Sans-IO; the
    rate is measured from the other side's acknowledgements. A peer can only slow down traffic to itself.
    """

    __slots__ = ("_acked_bytes", "_begun_at", "_path")

    def __init__(self) -> None:
        self._begun_at, self._acked_bytes = -math.inf, 0
        self._path = PathRate(_LOOKS)

    def look(self, now: float, rtt_s: float, acked_bytes: int, rails: int) -> float:
        """Rate in bytes/s for each of `rails`, infinity for no limit; `acked_bytes`: total acknowledged on all."""
        passed_s, carried = now - self._begun_at, acked_bytes - self._acked_bytes
        self._begun_at, self._acked_bytes = now, acked_bytes
        # `carried` is negative if a rail was closed, because its count is then missing.
        if carried >= 0 and 0 < passed_s <= _GAP_LOOKS * self.pause_s(rtt_s):
            self._path.add(carried / passed_s)
        if not rails or self._path.grows:
            return math.inf
        return _GAIN * max(self._path.carried, _LEAST_BYTES_PER_S) / rails

    def pause_s(self, rtt_s: float | None) -> float:
        """Seconds before the next sample."""
        return max(rtt_s or 0.0, _LOOK_S_MIN)
