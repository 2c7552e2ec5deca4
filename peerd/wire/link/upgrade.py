"""Upgrades a raw link to an authenticated one: multistream negotiation of /noise, Noise handshake, choice of yamux.

Sequential code on both sides; the parsers are sans-IO machines. The dialer's first packet has the proposal and the
first Noise message, so that a connection takes one round trip after TCP's. The caller sets the timeout. Raises
Unreachable (connection broken, wrong peer), Refused (no common protocol) or ProtocolViolation.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from peerd.core.errors import ProtocolViolation, Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.wire.link.cpu import has_aes
from peerd.wire.noise import noise
from peerd.wire.noise.multistream import HEADER, MultistreamSelector, Proposal
from peerd.wire.transport import RawLink
from peerd.wire.yamux.frames import PROTOCOL as YAMUX

_READ_BYTES = 16 * 1024  # a handshake's packets are below 1 KiB


@dataclass(frozen=True, slots=True)
class UpgradedLink:
    """An authenticated, encrypted link with yamux. `early`: plaintext that was received after the handshake.

    `rtt_s` is the duration of the handshake: a round trip, at most half of another, and some computation. As nothing
    else was being sent, it is a better estimate of the path's delay than measurements beside bulk data.
    """

    raw: RawLink
    session: noise.Session
    initiator: bool
    early: list[bytes | memoryview]
    rtt_s: float


async def upgrade(
    raw: RawLink,
    secrets: noise.Secrets,
    *,
    initiator: bool,
    expected: PeerId | None = None,
    muxers: tuple[str, ...] = (YAMUX,),
) -> UpgradedLink:
    """Run the handshake on a new link. `initiator` is a parameter because hole punching decides it separately.

    `muxers`: the muxers to offer; `session.muxer` is the chosen one. Without yamux among them there is no fallback.

    If both sides are initiators, because a simultaneous open made one connection of two dials, one of them yields (see
    noise.NoiseHandshake).
    """
    try:
        handshake = noise.NoiseHandshake(secrets, initiator=initiator, muxers=muxers, expected=expected, aes=has_aes())
        began = trio.current_time()
        session, initiator = await _handshake(raw, handshake)
        rtt_s = trio.current_time() - began
        early = session.opener.feed(session.rest)
        if session.muxer is None and YAMUX not in muxers:
            raise Refused(f"the peer does not speak {muxers[0]}", session.peer)
        if session.muxer is None:
            early = await _negotiate_muxer(raw, session, initiator, early)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"the connection broke during the handshake: {error}") from error
    return UpgradedLink(raw, session, initiator, early, rtt_s)


async def recognise(raw: RawLink, secrets: noise.Secrets, expected: PeerId) -> None:
    """Verify that the other side is `expected`, from the second handshake message; the third is not sent.

    So the other side does not learn our identity, and never has a completed connection that is about to close.
    """
    handshake = noise.NoiseHandshake(secrets, initiator=True, muxers=(YAMUX,), expected=expected)
    try:
        handshake.feed(await _propose(raw, handshake))
        while handshake.result is None:
            handshake.feed(await _receive(raw))
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"the connection broke during the handshake: {error}") from error


async def _handshake(raw: RawLink, handshake: noise.NoiseHandshake) -> tuple[noise.Session, bool]:
    """Run the Noise handshake; returns the session, and whether this side is its initiator."""
    if handshake.initiator:
        rest = await _propose(raw, handshake)
    else:
        await raw.send_all(HEADER)
        selector = MultistreamSelector(noise.PROTOCOL.__eq__)
        chosen = None
        while chosen is None:
            answer, chosen, rest = selector.feed(await _receive(raw))
            if answer:
                await raw.send_all(answer)
    data = rest or b""
    while True:
        out = handshake.feed(data)
        if out:
            await raw.send_all(out)
        if handshake.result is not None:
            return handshake.result, handshake.initiator
        data = await _receive(raw)


async def _propose(raw: RawLink, handshake: noise.NoiseHandshake) -> bytes:
    """Send the initiator's first message; returns the data after the other side's agreement to /noise.

    Raises Unreachable, not ProtocolViolation, if the other side is no peer, such as a web server.
    """
    proposal = Proposal(noise.PROTOCOL)
    await raw.send_all(proposal.hello + handshake.start())
    rest = None
    try:
        while rest is None:
            rest = proposal.feed(await _receive(raw))
    except (ProtocolViolation, Refused) as error:
        raise Unreachable(f"answers, but is not a peerd peer: its handshake failed: {error.args[0]}") from error
    return rest


async def _negotiate_muxer(
    raw: RawLink, session: noise.Session, initiator: bool, early: list[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Negotiate yamux with peers that do not support early muxer negotiation, such as py-libp2p. Returns the plaintext
    after the agreement.
    """
    frame = memoryview(bytearray(noise.SEALED_BYTES))

    async def send(text: bytes) -> None:
        await raw.send_all(frame[: session.sealer.seal(text, frame)])

    async def receive() -> bytes | memoryview:
        while not early:
            early.extend(session.opener.feed(await _receive(raw)))
        return early.pop(0)

    if initiator:
        proposal = Proposal(YAMUX)
        await send(proposal.hello)
        rest = None
        while rest is None:
            rest = proposal.feed(await receive())
    else:
        await send(HEADER)
        selector = MultistreamSelector(YAMUX.__eq__)
        chosen, rest = None, b""
        while chosen is None:
            answer, chosen, rest = selector.feed(await receive())
            if answer:
                await send(answer)
    return [rest, *early] if rest else early


async def _receive(raw: RawLink) -> bytes:
    data = await raw.receive_some(_READ_BYTES)
    if not data:
        raise Unreachable("the peer closed the connection during the handshake")
    return data
