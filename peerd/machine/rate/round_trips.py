"""Round trips as this node observed them: of each peer, and of peers in general.

From them a search learns whom to prefer of several that would do, and how long to wait for a peer before it no longer
holds up anything. A peer's own figures are smoothed as TCP's are (RFC 6298); of a peer that has never answered, those
of all are expected. What a peer tells plays no part; one that answers fast gains no more than to be asked first.
"""

from __future__ import annotations

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId

_REMEMBERED = 8192  # peers
_LEAST_S = 0.05  # a busy computer is not slow yet
_OF_ALL = 1 / 32  # weight of one more answer in the figures of all
_ENOUGH = 8  # answers that make a general figure


class RoundTrips:
    """Round trips by peer, in seconds. Until some are known, `usual_s` is how long to wait, at most `longest_s`."""

    def __init__(self, usual_s: float, longest_s: float) -> None:
        self._usual_s = usual_s
        self._longest_s = longest_s
        self._peers = BoundedDict[bytes, tuple[float, float]](_REMEMBERED)  # by raw peer id: smoothed, deviation
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._answers = 0

    @property
    def typical_s(self) -> float:
        """What is expected of a peer that has never answered."""
        return self._mean_s if self._answers else self._usual_s

    def answered(self, peer: PeerId, seconds: float) -> None:
        """The peer answered after so long."""
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
        """When to expect its answer."""
        known = self._peers.get(peer.raw)
        return known[0] if known is not None else self.typical_s

    def patience_s(self, peer: PeerId) -> float:
        """How long to wait for its answer before others are asked in its place."""
        general = self._mean_s + 3 * self._deviation_s if self._answers >= _ENOUGH else self._usual_s
        known = self._peers.get(peer.raw)
        if known is not None:
            general = min(known[0] + 4 * known[1], max(general, 2 * known[0]))
        return min(max(general, _LEAST_S), self._longest_s)
