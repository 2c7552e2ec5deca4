"""Keeps links from a stage peer that accepts no connections to the run's trainers, which cannot dial it.

Trainers publish their addresses. A stage peer that accepts no inbound connections reads them regularly and keeps a link
to each (`kept_links`). It has links to stage-mates and the conductor anyway (`preconnect`, `conductor_client`). Does
nothing while the peer can be dialed. Hostile input: a stranger's record has few addresses, and the number of peers that
are dialed is limited; in a run with tokens only members are dialed.
"""

from __future__ import annotations

import logging

import trio

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.limits import CALLED_TRAINERS, DIRECTORY_READ_BYTES
from peerd.dht.dht import Dht
from peerd.messages.progress import decode_trainer, progress_key
from peerd.swarm.directory import Directory
from peerd.swarm.kept_links import KeptLinks
from peerd.wire.host.host import Host

log = logging.getLogger("peerd.swarm.dial_trainers")

_LOOK_S = 10.0  # between two reads of the trainers' records
_TEND_S = 2.0  # between two checks of the links


class TrainerDialer:
    """Keeps the links of one stage peer to the trainers."""

    def __init__(self, host: Host, dht: Dht, directory: Directory) -> None:
        self._host, self._dht, self._directory = host, dht, directory
        self._links = KeptLinks(host, "trainer")
        self._trainers: list[str] = []

    async def run(self) -> None:
        """Keep the links until cancelled."""
        async with trio.open_nursery() as nursery:
            looked_at = float("-inf")
            while True:
                if not self._host.takes_inbound:
                    if trio.current_time() - looked_at >= _LOOK_S:
                        looked_at = trio.current_time()
                        await self._look()
                    self._links.tend(nursery, self._trainers)
                await trio.sleep(_TEND_S)

    async def _look(self) -> None:
        try:
            key = progress_key(self._directory.run)
            records = await self._dht.get(key, most_bytes=DIRECTORY_READ_BYTES)
        except RemoteError as error:
            log.info("the trainers' records could not be read: %s", error)
            return
        found = []
        for record in sorted(records, key=lambda record: record.publisher):
            try:
                progress = decode_trainer(record.value)
                self._directory.learn(record.publisher, progress.addrs, by=record.publisher)
            except ProtocolViolation as error:
                log.warning("ignored a trainer's record: %s", error.blame(record.publisher))
                continue
            if not progress.client and record.publisher != self._host.id:
                found.append(record.publisher.text)
        self._trainers = found[:CALLED_TRAINERS]
