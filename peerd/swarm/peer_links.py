"""Links to other peers, as the services of a run use them: by which kind of path, and whether the peer is alive."""

from __future__ import annotations

from typing import Final

import trio

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.messages.handover import Way
from peerd.wire.host.host import Host
from peerd.wire.path_selection import PathKind

_PROBE_S: Final = 8.0  # for a dial, maybe over a relay, and a ping that queues behind bulk data


class PeerLinks:
    """The links of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def linked(self, peer: PeerId) -> bool:
        """True if calls reach `peer` without a dial: over an existing link, or because it is this peer itself."""
        return peer == self._host.id or self._host.links.best(peer) is not None

    def way(self, peer: PeerId) -> Way:
        """The kind of the best link to `peer`, or "" if there is none."""
        if peer == self._host.id:
            return "direct"
        link = self._host.links.best(peer)
        return "" if link is None else "relay" if link.way == PathKind.RELAYED else "direct"

    def doubt(self, peer: PeerId) -> float:
        """Check that `peer` is alive, because an answer is overdue. Returns the seconds since its last byte arrived."""
        link = self._host.links.best(peer)
        return 0.0 if link is None else link.doubt()

    async def probe(self, peer: PeerId) -> None:
        """Ping `peer`, connecting first if needed. Raises RemoteError if it does not answer within 8 s."""
        if peer == self._host.id:
            return
        with trio.move_on_after(_PROBE_S):
            await self._host.ping(peer)
            return
        raise Unreachable("it does not answer", peer)
