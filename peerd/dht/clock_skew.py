"""Skew of this machine's clock against the clocks of its peers: the median of all clocks, including our own.

Peers send each other the time of their *uncorrected* clocks, and each peer adopts the median of all samples. So peers
with the same samples agree exactly, and no correction depends on another correction. Identities are free, so each
network has one vote (see `reach.network_votes`), which its peers share. For each peer the sample with
the shortest round trip counts. In a private network each machine has one vote, because one wrong clock is common in a
laboratory and an attacker would need access to it; all peers on this machine share one vote. With fewer than two
networks besides our own clock nobody can decide which clock is wrong, so nothing is corrected. Offsets above
limits.CLOCK_CORRECTION_S are not corrected either. A minority of networks cannot move the median beyond the range of
honest clocks. Hostile input: any number of identities; they can only displace samples of their own network.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from multiaddr import Multiaddr

from peerd.core.addr import LOOPBACK, block_of, ip_of
from peerd.core.ids import PeerId
from peerd.core.limits import CLOCK_CORRECTION_S, CLOCK_TOLERANCE_S
from peerd.reach.network_votes import network_of, shared

VOTES = 64  # most peers whose samples are kept
_MIN_NETWORKS = 2
MAX_ROUND_TRIP_S: Final = 2.0  # the error of a sample is at most half its round trip
REPORTED_S = 2.0  # the user is warned of a larger skew


class _Sample(NamedTuple):
    network: str
    address: str
    round_trip_s: float
    offset_s: float


def voice_of(at: Multiaddr) -> str:
    """Voting unit of a peer at this address: its network, or in a private network its machine. A unit has one vote."""
    ip = ip_of(at)
    block = None if ip is None else block_of(ip)
    if block is None or block == LOOPBACK:
        return block or network_of(at)
    return str(ip)


class ClockSkew:
    """Offsets of the peers' raw clocks against ours, in seconds; positive if the peer's clock is ahead.

    Samples with a round trip longer than `max_round_trip_s` are dropped: the error of a sample is half its round trip.
    """

    def __init__(self, max_round_trip_s: float = MAX_ROUND_TRIP_S) -> None:
        self._max_round_trip_s = max_round_trip_s
        self._samples: OrderedDict[PeerId, _Sample] = OrderedDict()

    def sample(self, peer: PeerId, at: Multiaddr, sent: float, received: float, theirs: float) -> None:
        """Record a clock reading of `peer`, which is connected at address `at`.

        Its clock showed `theirs` at some moment between `sent` and `received` of our uncorrected clock, all in seconds.
        """
        round_trip = received - sent
        if not 0 <= round_trip <= self._max_round_trip_s:
            return
        known = self._samples.get(peer)
        # A contradicting sample replaces even a better one, because its clock may have been adjusted.
        offset = theirs - (sent + received) / 2
        if (
            known is None
            or round_trip <= known.round_trip_s
            or abs(offset - known.offset_s) > (round_trip + known.round_trip_s) / 2
        ):
            self._samples[peer] = _Sample(voice_of(at), str(ip_of(at) or at), round_trip, offset)
        self._samples.move_to_end(peer)
        if len(self._samples) > VOTES:
            ((most, _),) = Counter(sample.network for sample in self._samples.values()).most_common(1)
            del self._samples[next(peer for peer, sample in self._samples.items() if sample.network == most)]

    def knows(self, peer: PeerId, at: Multiaddr) -> bool:
        """Return True if there is a sample of this peer from an address in the same voting unit."""
        sample = self._samples.get(peer)
        return sample is not None and sample.network == voice_of(at)

    @property
    def votes(self) -> int:
        """Number of peers whose clocks we have sampled."""
        return len(self._samples)

    @property
    def networks(self) -> int:
        """Number of voting units with at least one sampled peer."""
        return len({sample.network for sample in self._samples.values()})

    def measured_s(self) -> float:
        """Seconds by which the swarm's clocks are ahead of ours: the median, including our own clock."""
        told = ((s.network, s.address, (s.offset_s, peer.raw)) for peer, s in self._samples.items())
        weights = shared(told)
        return _median([(0.0, 1.0), *((offset_s, weight) for (offset_s, _), weight in weights.items())])

    def uncorrected_s(self) -> float:
        """Seconds by which peers' clocks are certainly still ahead of ours after the correction (negative: behind).

        Returns 0 within the tolerance for records; otherwise this peer and its peers reject each other's records. With
        samples from a single network nobody can decide whose clock is wrong, so nothing is corrected; then each sample
        is reduced by half its round trip.
        """
        if self.networks >= _MIN_NETWORKS:
            off = self.measured_s() - self.correction_s()
        else:
            off = _median([(_surely(s), 1.0) for s in self._samples.values()]) if self._samples else 0.0
        return off if abs(off) > CLOCK_TOLERANCE_S else 0.0

    def furthest_s(self) -> float:
        """Offset of the peer whose clock differs most from ours, or 0 if no clock is known."""
        return max((sample.offset_s for sample in self._samples.values()), key=abs, default=0.0)

    def correction_s(self) -> float:
        """Seconds to add to our clock."""
        off = self._agreed_s()
        return off if abs(off) <= CLOCK_CORRECTION_S else 0.0

    def _agreed_s(self) -> float:
        return self.measured_s() if self.networks >= _MIN_NETWORKS else 0.0

    def warning(self) -> str | None:
        """Warning for the user about this machine's clock, or None if there is nothing to report."""
        off = self._agreed_s()
        way = "behind" if off > 0 else "ahead of"
        if abs(off) > CLOCK_CORRECTION_S:
            days = f"{abs(off) / 86_400:.1f} days"
            return f"this machine's clock is {days} {way} the clocks of {self.votes} peers, too far to correct: set it"
        if abs(off) > REPORTED_S:
            return f"this machine's clock is {abs(off):.1f} s {way} the clocks of {self.votes} peers; it is corrected"
        if self.networks and self.networks < _MIN_NETWORKS:
            peer, sample = max(self._samples.items(), key=lambda item: -item[1].round_trip_s)
            if abs(sample.offset_s) > REPORTED_S:
                return f"this machine's clock and that of peer {peer.short} differ by {abs(sample.offset_s):.1f} s"
        return None


def _surely(sample: _Sample) -> float:
    """The sample's offset, moved towards 0 by half its round trip."""
    return math.copysign(max(0.0, abs(sample.offset_s) - sample.round_trip_s / 2), sample.offset_s)


def _median(told: Iterable[tuple[float, float]]) -> float:
    """Weighted median; if exactly half of the weight lies below a gap, the middle of that gap."""
    ranked = sorted(told)
    half = sum(weight for _, weight in ranked) / 2
    below = 0.0
    for number, (value, weight) in enumerate(ranked):
        below += weight
        if abs(below - half) < 1e-9:
            return (value + ranked[number + 1][0]) / 2
        if below > half:
            break
    return value
