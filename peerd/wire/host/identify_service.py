"""The identify service: on every link, both sides learn the other's addresses and protocols.

Sends a request after connecting, answers requests, and pushes when this host's addresses or protocols change. Peers'
answers are kept while they are connected, and their addresses are added to the address book as hearsay. Loopback
addresses are sent only on loopback links.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.addr import reach, split_peer
from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.wire.host.identify import (
    IDENTIFY,
    IDENTIFY_PUSH,
    PROTOCOL_VERSION,
    PeerInfo,
    receive_identify,
    send_identify,
)
from peerd.wire.host.link_table import Links
from peerd.wire.identify_message import Identify
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import Stream, StreamOwner

_log = logging.getLogger("peerd.wire")
_TOGETHER_S = 0.05  # changes within this time are sent in one push


class IdentifiedPeer(Protocol):
    """The part of the host that this service uses."""

    id: PeerId
    links: Links

    @property
    def identify_s(self) -> float: ...

    @property
    def agent(self) -> str: ...

    def addrs(self) -> list[Multiaddr]: ...

    def protocols(self) -> list[str]: ...

    def learn(self, peer: PeerId, addrs: Iterable[Multiaddr], *, by: PeerId | None = None) -> None: ...

    async def supervise(self, work: Callable[[], Awaitable[None]], about: Callable[[], str]) -> bool: ...


class IdentifyService:
    """Exchanges identify messages between one host and its peers."""

    def __init__(self, host: IdentifiedPeer) -> None:
        self.infos: dict[PeerId, PeerInfo] = {}  # of connected peers
        self._host = host
        self._news = trio.Event()
        self._arrived = trio.lowlevel.ParkingLot()

    async def wait(self, peer: PeerId, timeout_s: float) -> PeerInfo | None:
        """Wait for the description of `peer`; returns None after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            while peer not in self.infos:
                await self._arrived.park()
        return self.infos.get(peer)

    def changed(self) -> None:
        """Push this host's new description to all peers, because it has changed."""
        self._news.set()

    def forget(self, peer: PeerId) -> None:
        self.infos.pop(peer, None)

    async def serve(self, stream: Stream) -> None:
        """Handle an identify request."""
        await send_identify(stream, self._describe(stream.link))

    async def serve_push(self, stream: Stream) -> None:
        """Handle an identify push."""
        with trio.move_on_after(self._host.identify_s):
            self._believe(stream.link, await receive_identify(stream), update=True)

    async def ask(self, link: Link) -> None:
        """Request the peer's description. The link is kept if the peer does not answer."""
        with trio.move_on_after(self._host.identify_s):
            try:
                stream = await link.open(IDENTIFY)
                try:
                    self._believe(link, await receive_identify(stream))
                finally:
                    await stream.aclose()
            except ProtocolViolation as error:
                _log.warning("peer %s violated the identify protocol: %s", link.peer, error)
            except RemoteError as error:
                _log.debug("identify request to %s failed: %s", link.peer, error)

    async def run(self) -> None:
        """Push changes to the peers that support it, until cancelled."""
        while True:
            await self._news.wait()
            await trio.sleep(_TOGETHER_S)
            self._news = trio.Event()
            async with trio.open_nursery() as nursery:
                for peer, info in list(self.infos.items()):
                    link = self._host.links.best(peer)
                    if link is not None and IDENTIFY_PUSH in info.protocols:
                        nursery.start_soon(self._push_surely, link)

    async def _push_surely(self, link: Link) -> None:
        await self._host.supervise(lambda: self._push(link), lambda: f"identify push to {link.peer}")

    async def _push(self, link: Link) -> None:
        with trio.move_on_after(self._host.identify_s):
            try:
                stream = await link.open(IDENTIFY_PUSH)
                await send_identify(stream, self._describe(link))
            except RemoteError as error:
                _log.debug("identify push to %s failed: %s", link.peer, error)

    def _describe(self, link: StreamOwner) -> Identify:
        host, local = self._host, reach(link.remote) == 0
        addrs = [addr for addr in (split_peer(a)[0] for a in host.addrs()) if local or reach(addr) > 0]
        return Identify(
            peer=host.id,
            listen_addrs=tuple(addr.to_bytes() for addr in addrs),
            protocols=tuple(host.protocols()),
            observed_addr=link.remote.to_bytes(),
            protocol_version=PROTOCOL_VERSION,
            agent_version=host.agent,
        )

    def _believe(self, link: StreamOwner, info: PeerInfo, *, update: bool = False) -> None:
        """Store a peer's description. `update`: from a push, which may lack unchanged fields.

        Some implementations never push the address at which they see us; the last one is kept for each link.
        """
        if self._host.links.best(link.peer) is not None:
            link.observed = info.observed or link.observed
            known = self.infos.get(link.peer) if update else None
            info = info if known is None else info.after(known)
            self.infos[link.peer] = replace(info, observed=link.observed)
            self._arrived.unpark_all()
            self._host.learn(link.peer, info.addrs, by=link.peer)
            self._host.links.told(link)
