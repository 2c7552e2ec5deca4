"""From a raw link to an authenticated one: multistream to /noise, the Noise hand-shake, the choice of yamux.

Straight-line on both sides; the parsers are machines. The dialer's first packet carries the proposal and the first
Noise message, so that a connection costs one round trip beyond TCP's. The caller sets the time limit. Raises
Unreachable (broken, wrong peer), Refused (speaks none of ours) or ProtocolViolation.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from peerd.core.errors import ProtocolViolation, Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.machine.mux.frames import PROTOCOL as YAMUX
from peerd.machine.secure import noise
from peerd.machine.secure.multistream import HEADER, Proposal, ProtocolSelector
from peerd.net.link.cpu import has_aes
from peerd.net.transport import RawLink

_READ_BYTES = 16 * 1024  # a hand-shake's packets are below 1 KiB


@dataclass(frozen=True, slots=True)
class UpgradedLink:
    """An authenticated, encrypted link that speaks yamux; `early` is plaintext that came along.

    `rtt_s` is what the hand-shake took: a round trip, half another at most, and some arithmetic. Nothing else was on
    the way yet, so it tells the distance better than what is measured beside bulk data.
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
    """Run the hand-shake on a fresh link; which side goes first is a parameter, as hole punching needs.

    `muxers`: what to offer; `session.muxer` says what was chosen. Without yamux among them there is no fallback.

    When both sides do, because both dialed and the network made one connection of that, one gives way (see
    noise.Handshake).
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
        raise Unreachable(f"the connection broke during the hand-shake: {error}") from error
    return UpgradedLink(raw, session, initiator, early, rtt_s)


async def recognise(raw: RawLink, secrets: noise.Secrets, expected: PeerId) -> None:
    """Verify that `expected` is there, and go no further: it proves itself in the second message, we send no third.

    So the other side neither learns who we are, nor ever holds a connection that is about to close.
    """
    handshake = noise.NoiseHandshake(secrets, initiator=True, muxers=(YAMUX,), expected=expected)
    try:
        handshake.feed(await _propose(raw, handshake))
        while handshake.result is None:
            handshake.feed(await _receive(raw))
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise Unreachable(f"the connection broke during the hand-shake: {error}") from error


async def _handshake(raw: RawLink, handshake: noise.NoiseHandshake) -> tuple[noise.Session, bool]:
    """The session, and whether this side is its initiator."""
    if handshake.initiator:
        rest = await _propose(raw, handshake)
    else:
        await raw.send_all(HEADER)
        selector = ProtocolSelector(noise.PROTOCOL.__eq__)
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
    """The initiator's first message, and what follows the other side's agreement to /noise.

    Unreachable where something else than a peer answers, such as a web server: of a peer nobody would blame this.
    """
    proposal = Proposal(noise.PROTOCOL)
    await raw.send_all(proposal.hello + handshake.start())
    rest = None
    try:
        while rest is None:
            rest = proposal.feed(await _receive(raw))
    except (ProtocolViolation, Refused) as error:
        raise Unreachable(f"answers, but is no peerd peer: in its hand-shake, {error.args[0]}") from error
    return rest


async def _negotiate_muxer(
    raw: RawLink, session: noise.Session, initiator: bool, early: list[bytes | memoryview]
) -> list[bytes | memoryview]:
    """For peers without early choice, such as py-libp2p. Returns the plaintext after the agreement."""
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
        selector = ProtocolSelector(YAMUX.__eq__)
        chosen, rest = None, b""
        while chosen is None:
            answer, chosen, rest = selector.feed(await receive())
            if answer:
                await send(answer)
    return [rest, *early] if rest else early


async def _receive(raw: RawLink) -> bytes:
    data = await raw.receive_some(_READ_BYTES)
    if not data:
        raise Unreachable("the peer closed the connection during the hand-shake")
    return data
