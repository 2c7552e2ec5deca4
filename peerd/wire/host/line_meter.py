"""Measures the traffic of this machine's internet access for `wire.rate.access_line`, by reading the counters of
every TCP connection a few times per second.

Sent bytes count once they are acknowledged, received bytes once they have arrived; rails count like other connections.
Connections within the machine or its own networks do not use the line and are excluded. Circuits are counted on the
connection to their relay. Without the system's counters, nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peerd.wire.host.host import Host
from peerd.wire.link.link import Link
from peerd.wire.path_selection import PathKind
from peerd.wire.rate.access_line import Count
from peerd.wire.tcp_info import TcpInfo
from peerd.wire.transport import CountedLink

PERIOD_S: Final = 0.25


def over_the_line(link: Link) -> bool:
    """True if the link leaves this machine's own networks."""
    return link.way is not PathKind.LOCAL


class LineMeter:
    """Meter of one host's internet traffic; it updates `host.line`."""

    def __init__(self, host: Host, counts: Callable[[Link], bool] = over_the_line) -> None:
        self._host, self._counts = host, counts
        self._before: dict[CountedLink, TcpInfo] = {}

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            begun = trio.current_time()
            passed = self._look()
            self._host.line.note(begun, trio.current_time(), passed)
            await trio.sleep(PERIOD_S)

    def _look(self) -> Count:
        """Bytes sent and received since the last call. A connection counts from its second call on."""
        sent = received = 0
        waited = 0.0
        seen: dict[CountedLink, TcpInfo] = {}
        for link in self._host.links:
            if self._counts(link):
                seen |= link.tcp_infos()
        for connection, info in seen.items():
            before = self._before.get(connection)
            if before is not None:
                acked = info.bytes_acked - before.bytes_acked
                sent += acked
                waited += acked * info.rtt_s
                received += info.received_since(before)
        self._before = seen
        return Count(sent, received, waited / sent if sent > 0 else 0.0)
