"""The kinds of way on which a connection can lead to a peer."""

from __future__ import annotations

from enum import IntEnum


class Way(IntEnum):
    """How a connection reaches the peer; the smaller, the better."""

    LOCAL = 0  # this machine, or the same network
    DIRECT = 1  # one side dialed the other's public address
    PUNCHED = 2  # both sides dialed at once, through their routers
    RELAYED = 3  # over a third peer
