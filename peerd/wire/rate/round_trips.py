"""Round trips observed by this node: per peer, and over all peers.

A search uses them to choose among suitable peers, and to decide how long it waits for a peer. A peer's own figures
are smoothed like TCP's (RFC 6298); a peer that has never answered gets the figures over all peers. Peers' claims play
no role; a peer that answers fast only gains that it is asked first.
"""

from __future__ import annotations

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId

_REMEMBERED = 8192  # peers
_LEAST_S = 0.05  # least patience, because a busy machine is not slow yet
_OF_ALL = 1 / 32  # weight of one more answer in the figures over all peers
_ENOUGH = 8  # answers from which the figures over all peers are used


class RoundTrips:
    """Round trips by peer, in seconds. `usual_s`: patience until some are known; `longest_s`: greatest patience."""

    def __init__(self, usual_s: float, longest_s: float) -> None:
        self._usual_s = usual_s
        self._longest_s = longest_s
        self._peers = BoundedDict[bytes, tuple[float, float]](_REMEMBERED)  # by raw peer id: smoothed, deviation
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._answers = 0

    @property
    def typical_s(self) -> float:
        """Expected round trip of a peer that has never answered."""
        return self._mean_s if self._answers else self._usual_s

    def answered(self, peer: PeerId, seconds: float) -> None:
        """Record that the peer answered after `seconds`."""
        seconds = max(seconds, 0.0)
        known = self._peers.get(peer.raw)
        if known is None:
            self._peers[peer.raw] = seconds, seconds / 2
        else:
            smoothed, deviation = known
            self._peers[peer.raw] = (
                smoothed + (seconds - smoothed) / 8,
                deviation + (abs(seconds - smoothed) - deviation) / 4,
            )
        self._answers += 1
        weight = max(1 / self._answers, _OF_ALL)
        deviation = abs(seconds - self._mean_s) if self._answers > 1 else seconds / 2
        self._deviation_s += weight * (deviation - self._deviation_s)
        self._mean_s += weight * (seconds - self._mean_s)

    def expected_s(self, peer: PeerId) -> float:
        """Expected seconds until `peer` answers a request."""
        known = self._peers.get(peer.raw)
        return known[0] if known is not None else self.typical_s

    def patience_s(self, peer: PeerId) -> float:
        """Seconds to wait for an answer of `peer` before other peers are asked instead."""
        general = self._mean_s + 3 * self._deviation_s if self._answers >= _ENOUGH else self._usual_s
        known = self._peers.get(peer.raw)
        if known is not None:
            general = min(known[0] + 4 * known[1], max(general, 2 * known[0]))
        return min(max(general, _LEAST_S), self._longest_s)
