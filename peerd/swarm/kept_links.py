"""Keeps links to peers that we will call, or that will call us: made in advance, and again when they are lost.

Hostile input: names of peers that do not exist. Few are dialed at once, and each failed one again only after a pause
that doubles (`swarm/preconnect_plan`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import trio

from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.swarm.preconnect_plan import PreconnectPlan
from peerd.wire.host.host import Host

log = logging.getLogger("peerd.swarm.kept_links")


class KeptLinks:
    """Keeps the links for one purpose; `what` names their peers in the log."""

    def __init__(self, host: Host, what: str) -> None:
        self._host, self._what = host, what
        self._assembly = PreconnectPlan(host.id.text)

    def tend(self, nursery: trio.Nursery, peers: Collection[str]) -> None:
        """Dial those of `peers` that have no link, in the nursery. Call it every second or two."""
        linked = {peer.text for peer in self._host.connected()}
        for name in self._assembly.dial(trio.current_time(), None, peers, linked, first=True):
            nursery.start_soon(self._connect, name)

    async def _connect(self, name: str) -> None:
        try:
            await self._host.connect(PeerId.parse(name))
        except RemoteError as error:
            log.info("cannot connect to %s …%s: %s", self._what, name[-8:], error)
        self._assembly.ended(trio.current_time(), name)
