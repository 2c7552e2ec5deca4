"""Connects to all peers of the next averaging round before the round begins.

Drives `swarm/preconnect_plan` over the host. `ConductorClient` has the conductor's list of these peers, and
the time when the step is due. Nonexistent peers in the list only cause failed dials, a few at a time. The round itself
reports peers that cannot be reached.
"""

from __future__ import annotations

import logging

import trio

from peerd.averaging.topology import foretold_mates
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.preconnect_plan import PreconnectPlan
from peerd.wire.host.host import Host

log = logging.getLogger("peerd.pipeline.preconnect")

_LOOK_S = 2.0  # links may break, and forecasts change


class Preconnector:
    """Keeps a peer's links to the peers that it will average with. `group_size`: the run's `averaging.group_size`."""

    def __init__(self, host: Host, following: ConductorClient, group_size: int = 0) -> None:
        self._host, self._following, self._group_size = host, following, group_size
        self._assembly = PreconnectPlan(host.id.text)

    async def run(self, stage: int) -> None:
        """Keep links to the members and helpers that we will average with in `stage`, until cancelled."""
        following, assembly = self._following, self._assembly
        async with trio.open_nursery() as nursery:
            while True:
                now, forecast, told = trio.current_time(), following.forecast, following.told
                due_in_s = forecast.whole_in_s if forecast is not None else None
                mates = self._mates(stage)
                linked = {peer.text for peer in self._host.connected()}
                for mate in assembly.dial(now, due_in_s, mates, linked, first=not self._host.takes_inbound):
                    nursery.start_soon(self._connect, mate)
                wait_s = assembly.wake_in_s(now, due_in_s)
                with trio.move_on_after(_LOOK_S if wait_s is None else min(wait_s, _LOOK_S)):
                    await told.wait()

    def _mates(self, stage: int) -> set[str]:
        """Peers to link to: all of the stage or, in a grid of groups, the members of our own groups but no helpers."""
        members = [member for member in self._following.members if member.stage == stage]
        ready = {member.peer for member in members if member.ready}
        mates = foretold_mates(self._host.id.text, ready, self._group_size)
        return {member.peer for member in members} if mates is None else mates

    async def _connect(self, mate: str) -> None:
        try:
            await self._host.connect(PeerId.parse(mate))
        except RemoteError as error:
            log.info("cannot connect to …%s before an averaging round: %s", mate[-8:], error)
        self._assembly.ended(trio.current_time(), mate)
