"""Arrival rate of large payloads from each peer: what the lines in between give us, as far as it can be seen here.

What this is worth: a sample is what came from a peer, in all its payloads together, from the first piece of one
payload to its last; so several at once that share a line do not each see a part of it. It is no more than what was
sent: a peer that makes its payload slowly, waits for our window or gives the line to others looks like a slow line,
and a payload that had begun to wait in our buffers looks like a fast one. The larger it is against those buffers, the
less that matters, which is why small ones do not count; a few odd samples do not move the median, a steady sender of
slow payloads does. The other direction may be a different line. A peer can lie about itself only, by sending slowly.

Bounded: the peers heard from last are kept. No clock here: times are arguments.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import LINE_RATE_PEERS

SAMPLES: Final = 9  # newest ones, whose median is the estimate
SAMPLE_BYTES: Final = 128 << 10  # after the first piece; what is smaller says more of buffers than of the line


class _Arrivals:
    """Arrivals from one peer: payload bytes in all, and the newest rates in bytes/s."""

    __slots__ = ("rates", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self.rates: deque[float] = deque(maxlen=SAMPLES)


class LineRates:
    """The rates of payloads that arrive, by peer."""

    def __init__(self) -> None:
        self._peers = BoundedDict[PeerId, _Arrivals](LINE_RATE_PEERS)

    def count(self, peer: PeerId, count: int) -> int:
        """So many payload bytes have come from `peer`; returns how many have in all, until it was forgotten."""
        arrivals = self._of(peer)
        arrivals.total_bytes += count
        return arrivals.total_bytes

    def total_bytes(self, peer: PeerId) -> int:
        """Payload bytes that have come from `peer`, until it was forgotten."""
        arrivals = self._peers.get(peer)
        return arrivals.total_bytes if arrivals is not None else 0

    def arrived(self, peer: PeerId, bytes_after_first: int, seconds: float) -> None:
        """A payload has come: so many bytes of `peer` in the time from its first piece to its last, first not counted.

        What is too small to say anything, or took no time that the clock could see, is left out.
        """
        if bytes_after_first >= SAMPLE_BYTES and seconds > 0:
            self._of(peer).rates.append(bytes_after_first / seconds)

    def rate(self, peer: PeerId) -> float | None:
        """Bytes per second; None before any large payload has come."""
        arrivals = self._peers.get(peer)
        return statistics.median(arrivals.rates) if arrivals is not None and arrivals.rates else None

    def known(self) -> dict[PeerId, float]:
        """The rate of every peer that has one, in bytes per second."""
        return {peer: statistics.median(arrivals.rates) for peer, arrivals in self._peers.items() if arrivals.rates}

    def _of(self, peer: PeerId) -> _Arrivals:
        arrivals = self._peers[peer] = self._peers.get(peer) or _Arrivals()
        return arrivals
