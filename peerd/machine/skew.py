"""How far this machine's clock is off, from what its peers' clocks show: the median, our own clock being one vote.

Peers tell each other the time of their *uncorrected* clocks, and each adopts the median of all it saw. So peers that
see the same set agree exactly, and nobody follows a correction that follows theirs. Each peer has one vote, its sample
with the shortest round trip; below three votes nobody can say who is wrong, and nothing is corrected. A minority of
liars cannot move the median beyond what honest clocks show.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict

from peerd.core.ids import PeerId

VOTES = 64  # newest peers that count
_MIN_OTHERS = 2
_MAX_ROUND_TRIP_S = 2.0  # the error of a sample is at most half its round trip
REPORTED_S = 2.0  # a larger skew is shown to the user


class ClockSkew:
    """Offsets of peers' raw clocks against ours, in seconds; positive: theirs is ahead."""

    def __init__(self) -> None:
        self._samples: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # (round trip, offset)

    def sample(self, peer: PeerId, sent: float, received: float, theirs: float) -> None:
        """`peer` showed `theirs` at some time between `sent` and `received` of our uncorrected clock."""
        round_trip = received - sent
        if not 0 <= round_trip <= _MAX_ROUND_TRIP_S:
            return
        known = self._samples.get(peer)
        # A better sample replaces a worse one; so does one that contradicts it, for clocks are also set anew.
        offset = theirs - (sent + received) / 2
        if known is None or round_trip <= known[0] or abs(offset - known[1]) > (round_trip + known[0]) / 2:
            self._samples[peer] = (round_trip, offset)
        self._samples.move_to_end(peer)
        if len(self._samples) > VOTES:
            self._samples.popitem(last=False)

    @property
    def votes(self) -> int:
        """Peers whose clocks we know."""
        return len(self._samples)

    def measured_s(self) -> float:
        """How far the swarm's clocks are ahead of ours: the median, our own included."""
        return statistics.median([0.0, *(offset for _, offset in self._samples.values())])

    def correction_s(self) -> float:
        """What to add to our clock."""
        return self.measured_s() if len(self._samples) >= _MIN_OTHERS else 0.0

    def warning(self) -> str | None:
        """What to tell the user about this machine's clock, if anything."""
        off = self.correction_s()
        if abs(off) > REPORTED_S:
            way = "behind" if off > 0 else "ahead of"
            return f"this machine's clock is {abs(off):.1f} s {way} the clocks of {self.votes} peers; it is corrected"
        if self.votes and self.votes < _MIN_OTHERS:
            ((peer, (_, offset)),) = self._samples.items()
            if abs(offset) > REPORTED_S:
                return f"this machine's clock and that of peer {peer.short} differ by {abs(offset):.1f} s"
        return None
