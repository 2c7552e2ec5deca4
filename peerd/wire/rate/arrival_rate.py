"""Arrival rate of large payloads from each peer: an estimate of the path's rate, as far as it can be seen here.

A sample counts the bytes of all of a peer's payloads, from the first piece of one payload to its last, so that several
concurrent payloads on one path are not each measured as a part of it. The rate is at most that of sending: a peer that
produces its payload slowly, waits for our window or shares its connection looks slow, and a payload that had already
waited in our buffers looks fast. This matters less for payloads much larger than those buffers, so
small ones do not count; a few odd samples do not move the median, but a steady sender of slow payloads does. The other
direction may be slower or faster. A peer can only falsify its own rate, by sending slowly.

Bounded: the most recent peers are kept. No clock: times are arguments.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import LINE_RATE_PEERS

SAMPLES: Final = 9  # newest samples, whose median is the estimate
SAMPLE_BYTES: Final = 128 << 10  # least payload after the first piece; smaller ones measure buffers, not the line


class _Arrivals:
    """Arrivals from one peer: total payload bytes, and the newest rates in bytes/s."""

    __slots__ = ("rates", "total_bytes")

    def __init__(self) -> None:
        self.total_bytes = 0
        self.rates: deque[float] = deque(maxlen=SAMPLES)


class LineRates:
    """The arrival rates of payloads, by peer."""

    def __init__(self) -> None:
        self._peers = BoundedDict[PeerId, _Arrivals](LINE_RATE_PEERS)

    def count(self, peer: PeerId, count: int) -> int:
        """Count payload bytes of `peer`; returns its total since it was last forgotten."""
        arrivals = self._of(peer)
        arrivals.total_bytes += count
        return arrivals.total_bytes

    def total_bytes(self, peer: PeerId) -> int:
        """Payload bytes received from `peer` since it was last forgotten."""
        arrivals = self._peers.get(peer)
        return arrivals.total_bytes if arrivals is not None else 0

    def arrived(self, peer: PeerId, bytes_after_first: int, seconds: float) -> None:
        """Record a payload: bytes received from `peer` between its first piece (excluded) and its last, in `seconds`.

        Ignored if it is too small, or took no measurable time.
        """
        if bytes_after_first >= SAMPLE_BYTES and seconds > 0:
            self._of(peer).rates.append(bytes_after_first / seconds)

    def rate(self, peer: PeerId) -> float | None:
        """Bytes per second, or None if no large payload has arrived yet."""
        arrivals = self._peers.get(peer)
        return statistics.median(arrivals.rates) if arrivals is not None and arrivals.rates else None

    def known(self) -> dict[PeerId, float]:
        """The rate of every peer that has one, in bytes per second."""
        return {peer: statistics.median(arrivals.rates) for peer, arrivals in self._peers.items() if arrivals.rates}

    def _of(self, peer: PeerId) -> _Arrivals:
        arrivals = self._peers[peer] = self._peers.get(peer) or _Arrivals()
        return arrivals
