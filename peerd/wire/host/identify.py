"""libp2p's identify, identify push and ping, as async functions over a Stream.

A peer's description of itself is bounded and only a hint: its addresses are tried, never trusted. Hostile input:
endless messages, other peers' keys, junk addresses. Sources: libp2p specs `identify/README.md`, `ping/ping.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core.addr import decode_addr, normal
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import IDENTIFY_BYTES, IDENTIFY_PARTS
from peerd.wire.identify_message import Identify
from peerd.wire.link.delimited import next_message, send_message
from peerd.wire.link.link_stream import Stream

IDENTIFY = "/ipfs/id/1.0.0"
IDENTIFY_PUSH = "/ipfs/id/push/1.0.0"
PING = "/ipfs/ping/1.0.0"
PROTOCOL_VERSION = "peerd/1"
PING_BYTES = 32
_MORE_S = 2.0  # wait for further parts after a message: some peers send them, some never close the stream


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A connected peer's description of itself."""

    agent: str
    protocols: tuple[str, ...]
    addrs: tuple[Multiaddr, ...]  # its listen addresses
    observed: Multiaddr | None  # our address as the peer sees it, on the link of the message

    def after(self, before: PeerInfo) -> PeerInfo:
        """This description as an update of `before`: fields that it lacks are unchanged."""
        agent, protocols = self.agent or before.agent, self.protocols or before.protocols
        return PeerInfo(agent, protocols, self.addrs or before.addrs, self.observed)


async def send_identify(stream: Stream, message: Identify) -> None:
    """Send an identify message, as an answer or as a push, and close the stream."""
    await send_message(stream, message.encode())
    await stream.aclose()


async def receive_identify(stream: Stream) -> PeerInfo:
    """Receive all parts of the peer's message, merged as in protobuf: lists are concatenated, later values win."""
    joined = b""
    for _ in range(IDENTIFY_PARTS):
        part = None
        with trio.move_on_after(_MORE_S if joined else float("inf")):
            part = await next_message(stream, IDENTIFY_BYTES - len(joined))
        if part is None:
            break
        joined += part
    return _info(Identify.decode(joined), stream.peer)


def _info(message: Identify, peer: PeerId) -> PeerInfo:
    if message.peer not in (None, peer):
        raise ProtocolViolation(f"the identify message is that of {message.peer}", peer)
    addrs = [addr for raw in message.listen_addrs if (addr := _addr_or_none(raw)) is not None]
    observed = _addr_or_none(message.observed_addr)
    return PeerInfo(message.agent_version, message.protocols, tuple(addrs), observed)


def _addr_or_none(raw: bytes) -> Multiaddr | None:
    try:
        return normal(decode_addr(raw))
    except ProtocolViolation:
        return None  # an unknown kind of address


async def answer_pings(stream: Stream) -> None:
    """Echo 32 bytes at a time until the peer ends the stream."""
    while data := await stream.receive_some(PING_BYTES):
        if len(data) < PING_BYTES:
            data += await stream.receive_exactly(PING_BYTES - len(data))
        await stream.send(data)


async def ping(stream: Stream, payload: bytes) -> float:
    """Send `payload`, 32 unpredictable bytes; returns the seconds until the peer has echoed them."""
    begin = trio.current_time()
    await stream.send(payload)
    if await stream.receive_exactly(PING_BYTES) != payload:
        raise ProtocolViolation("the answer to a ping has other bytes", stream.peer)
    return trio.current_time() - begin
