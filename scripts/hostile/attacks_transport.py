"""Attacks below and at the calls: frames that contradict each other, unread answers, sizes that never come."""

from __future__ import annotations

import math
import zlib

import trio

from peerd.codec.format import frame as wire
from peerd.core.errors import PeerdError
from peerd.core.ids import Key
from peerd.core.limits import HELD_PIECES
from peerd.dht.codec import FindMessage, PingMessage
from peerd.messages.encoding import encode
from peerd.messages.network import NetworkMapRequest
from peerd.messages.run_link import RunFileRequest
from peerd.messages.state import StateRequest
from peerd.messages.swarm import StageForward
from peerd.rpc.methods.message_codec import REQUEST, encode_call
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER
from scripts.hostile.field import Field
from scripts.hostile.session import DATA, FIN, RST, SYN, WINDOW, Session, frame, opening, session

_DHT = "/peerd/dht/4"
_STAGE = "/peerd/stage/6"


def ping(call_id: int) -> bytes:
    """A call of the smallest kind."""
    return encode_call(REQUEST, call_id, b"ping", 60.0, encode(PingMessage(None)))


async def c1_syn_and_reset(there: Field) -> None:
    """A stream that is opened and reset in one read: once the end of any process."""
    async with session(there, there.target()) as mine:
        stream = mine.stream()
        await mine.send(frame(DATA, SYN, stream), frame(DATA, RST, stream))
        await trio.sleep(0.2)


async def c2_events_before_a_violation(there: Field) -> None:
    """Calls, their stream's reset and a malformed header, so that answers are written to what is gone."""
    async with session(there, there.target()) as mine:
        stream = mine.stream()
        await mine.send(opening(stream, _DHT, b"".join(ping(number) for number in range(1, 40))))
        await trio.sleep(there.rng.uniform(0.0, 0.05))
        await mine.send(frame(DATA, 0, stream, payload=ping(40)), frame(WINDOW, RST, stream), b"\xff" * 12)
        await trio.sleep(0.1)


async def c2_any_frames(there: Field) -> None:
    """Valid frames in any order, then one that is not."""
    rng = there.rng
    async with session(there, there.target()) as mine:
        opened: list[int] = []
        for _ in range(rng.randint(1, 40)):
            frames = []
            for _ in range(rng.randint(1, 6)):
                if not opened or rng.random() < 0.3:
                    opened.append(mine.stream())
                    frames.append(opening(opened[-1], rng.choice([_DHT, _STAGE, "/ipfs/ping/1.0.0", "/none"])))
                flags = rng.choice([0, FIN, RST, SYN, FIN | RST])
                kind = rng.choice([DATA, WINDOW])
                payload = rng.randbytes(rng.randint(0, 60)) if kind == DATA else b""
                frames.append(frame(kind, flags, rng.choice(opened), payload=payload))
            await mine.send(*frames)
            if mine.ended.is_set():
                return
        await mine.send(rng.randbytes(24))


async def h3_unread_answers(there: Field) -> None:
    """Calls whose answers are large, from a peer that never reads."""
    keys = [Key.of(f"{there.run.run}/stage/{stage}").raw for stage in range(there.run.pipeline.stages)]
    ask = encode(FindMessage(keys, None))
    async with session(there, there.target(), reads=False) as mine:
        for _ in range(8):
            calls = b"".join(encode_call(REQUEST, number, b"get", 60.0, ask) for number in range(1, 65))
            await mine.send(opening(mine.stream(), _DHT, calls))
        await trio.sleep(there.rng.uniform(2, 8))


async def h3_half_requests(there: Field) -> None:
    """Streams on which a request of a megabyte begins and never ends."""
    async with session(there, there.target()) as mine:
        part = encode_call(REQUEST, 1, b"get", 60.0, bytes(1 << 20))[: 250 << 10]
        for _ in range(30):
            await mine.send(opening(stream := mine.stream(), _DHT))
            for at in range(0, len(part), 60_000):
                await mine.send(frame(DATA, 0, stream, payload=part[at : at + 60_000]))
        await trio.sleep(there.rng.uniform(2, 8))


async def h3_open_and_reset(there: Field) -> None:
    """Streams opened and reset by the thousand, from a peer that does not read what is said of them."""
    async with session(there, there.target(), reads=False) as mine:
        for _ in range(40):
            pairs = [(frame(DATA, SYN, stream), frame(DATA, RST, stream)) for stream in numbers(mine, 250)]
            await mine.send(*(one for pair in pairs for one in pair))
            await trio.lowlevel.checkpoint()


async def h3_tiny_pieces(there: Field) -> None:
    """Striped bytes one by one, every second one missing."""
    async with session(there, there.target()) as mine:
        for stream in numbers(mine, 8):
            await mine.send(opening(stream, _DHT))
            pieces = (PLACED_HEADER.pack(0, PLACED, 0, stream, 1, 200 + 2 * n) + b"x" for n in range(HELD_PIECES - 1))
            await mine.send(b"".join(pieces))
        await trio.sleep(there.rng.uniform(1, 5))


async def h4_declared_sizes(there: Field) -> None:
    """A call that says that 256 MiB follow, for an hour; nothing follows."""
    body = encode(StageForward(there.fingerprint, 0))
    call = encode_call(REQUEST, 1, b"forward", 3600.0, body, declared((8, 2048, 4096)), 1)
    async with session(there, there.target()) as mine:
        for stream in numbers(mine, 4):
            await mine.send(opening(stream, _STAGE, call))
        await trio.sleep(there.rng.uniform(3, 10))


async def h5_all_places(there: Field) -> None:
    """Open as many connections as there are places, each with an open stream."""
    target = there.target()

    async def hold() -> None:
        try:
            async with session(there, target) as mine:
                await mine.send(opening(mine.stream(), _DHT))
                await mine.ended.wait()
        except* (PeerdError, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            there.done("h5 turned away")

    with trio.move_on_after(there.rng.uniform(4, 10)):
        async with trio.open_nursery() as nursery:
            for _ in range(150):
                nursery.start_soon(hold)
                await trio.sleep(0.01)


async def h5_method_places(there: Field) -> None:
    """Identities of one address that take the places of methods with few, and read no answer."""
    target = there.target()
    stage = there.rng.randrange(there.run.pipeline.stages)
    asks = [
        ("/peerd/state/1", b"manifest", encode(StateRequest(there.fingerprint, stage))),
        ("/peerd/kept/1", b"manifest", encode(StateRequest(there.fingerprint, stage))),
        ("/peerd/network/1", b"map", encode(NetworkMapRequest(there.fingerprint))),
        ("/peerd/run/1", b"file", encode(RunFileRequest(there.run.run))),
    ]

    async def hold() -> None:
        try:
            async with session(there, target, reads=False) as mine:
                for protocol, name, body in asks:
                    calls = b"".join(encode_call(REQUEST, number, name, 3600.0, body) for number in range(1, 17))
                    await mine.send(opening(mine.stream(), protocol, calls))
                await mine.ended.wait()
        except* (PeerdError, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            there.done("h5 turned away")

    with trio.move_on_after(there.rng.uniform(5, 15)):
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(hold)


def numbers(mine: Session, count: int) -> list[int]:
    """Numbers of so many new streams."""
    return [mine.stream() for _ in range(count)]


def declared(shape: tuple[int, ...]) -> bytes:
    """The header of a float32 frame of that shape, of which no byte exists."""
    size = 4 * math.prod(shape)
    codes = wire.DTYPES["float32"].code, wire.CODINGS["none"].code
    body = wire._BODIES[len(shape)].pack(wire.MAGIC, wire.VERSION, *codes, 0, 0, len(shape), *shape, size)
    return body + zlib.crc32(body).to_bytes(wire.CRC_BYTES, "little")
