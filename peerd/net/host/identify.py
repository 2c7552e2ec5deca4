"""identify, identify push and ping: what libp2p peers tell each other about themselves.

Plain async functions over a Stream. What a peer says of itself is kept bounded and believed only as a hint: addresses
are tried, never trusted. Hostile input: messages without end, foreign keys, junk addresses.
Sources: libp2p specs `identify/README.md`, `ping/ping.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core.addr import decode_addr, normal
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import IDENTIFY_BYTES, IDENTIFY_PARTS
from peerd.core.protobuf.identity import Identify
from peerd.net.link.delimited import next_message, send_message
from peerd.net.link.stream import Stream

IDENTIFY = "/ipfs/id/1.0.0"
IDENTIFY_PUSH = "/ipfs/id/push/1.0.0"
PING = "/ipfs/ping/1.0.0"
PROTOCOL_VERSION = "peerd/1"
PING_BYTES = 32
_MORE_S = 2.0  # after a whole message: some peers send further parts, some forget to close


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A connected peer's description of itself."""

    agent: str
    protocols: tuple[str, ...]
    addrs: tuple[Multiaddr, ...]  # where it listens, as it says
    observed: Multiaddr | None  # our address as it sees us, on the link on which it said all this

    def after(self, before: PeerInfo) -> PeerInfo:
        """This description as an update of the one before: what it leaves out has not changed."""
        agent, protocols = self.agent or before.agent, self.protocols or before.protocols
        return PeerInfo(agent, protocols, self.addrs or before.addrs, self.observed)


async def send_identify(stream: Stream, message: Identify) -> None:
    """Answer identify, or push."""
    await send_message(stream, message.encode())
    await stream.aclose()


async def receive_identify(stream: Stream) -> PeerInfo:
    """Read all parts of the peer's message, joined as protobuf joins: lists add up, later single values win."""
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
        return None  # a kind of address that is not known here


async def answer_pings(stream: Stream) -> None:
    """Echo 32 bytes at a time until the peer has enough."""
    while data := await stream.receive_some(PING_BYTES):
        if len(data) < PING_BYTES:
            data += await stream.receive_exactly(PING_BYTES - len(data))
        await stream.send(data)


async def ping(stream: Stream, payload: bytes) -> float:
    """Seconds until the peer echoed `payload`, 32 unpredictable bytes."""
    begin = trio.current_time()
    await stream.send(payload)
    if await stream.receive_exactly(PING_BYTES) != payload:
        raise ProtocolViolation("the ping came back changed", stream.peer)
    return trio.current_time() - begin
