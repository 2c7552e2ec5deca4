"""Points of the transport that hostile sessions reach (see `sessions`), and what may be said from there on: frames of
the muxer, mostly right and often not, and raw junk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio

from peerd.core.varint import encode_varint
from peerd.wire.host.host import Host
from peerd.wire.host.identify import IDENTIFY, IDENTIFY_PUSH
from peerd.wire.host.identify import PING as LIBP2P_PING
from peerd.wire.identify_message import Identify
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.upgrade import upgrade
from peerd.wire.yamux.frames import ACK, DATA, FIN, GO_AWAY, PING, RST, SYN, WINDOW
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER
from peerd.wire.yamux.striping import PROTOCOL as RAIL
from tests.fuzz.sessions import Stage, Talk, point, serving
from tests.kit.mutate import mutated
from tests.worlds.network.hostile import Hostile, enter, frame, hello, secrets

WHO = secrets("hostile")
RAIL_ONLY = (RAIL,)
SERVED = ("/echo/1", "/into/1", "/each/1", "/pour/1", IDENTIFY, IDENTIFY_PUSH, LIBP2P_PING, "/none/1")
NUMBERS = (0, 1, 2, 5, 12, 255, 256, 65_519, 1 << 18, (1 << 18) + 1, 1 << 31, (1 << 32) - 1)
Say = Callable[[], bytes]
PLACES = (*range(0, 64), 1 << 18, 1 << 20, 1 << 40, (1 << 64) - 1)


# --- what the host serves for them -----------------------------------------------------------------------------------
async def _into(stream: Stream) -> None:
    while True:
        await stream.receive_into(bytearray(100_000))


async def _each(stream: Stream) -> None:
    await stream.receive_each(lambda data: stream.send_nowait(data[:100]) or len(data) < 50)


async def _pour(stream: Stream) -> None:
    for _ in range(64):
        await stream.send(bytes(1 << 16))


@serving
def _handlers(host: Host, _: trio.Nursery) -> None:
    for name, handler in (("/into/1", _into), ("/each/1", _each), ("/pour/1", _pour)):
        host.handle(name, handler)


# --- what is said ----------------------------------------------------------------------------------------------------
class Frames:
    """Plaintexts of a muxer, drawn one after the other; remembers what it has opened."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = rng.choice((1, 1, 3, 5))
        self._kinds: list[Say] = [
            *[self._open] * 4,
            *[self._data] * 4,
            *[self._end] * 3,
            *[self._placed] * 3,
            *[self._credit] * 2,
            self._pairs,
            self._crumbs,
            self._pings,
            self._any,
        ]
        self._wild = rng.choice((0.0, 0.02, 0.1, 0.3))  # how much is mutated: what breaks a rule ends the session

    def __call__(self) -> bytes:
        rng = self._rng
        said = b"".join(rng.choice(self._kinds)() for _ in range(rng.choice((1, 1, 2, 3, 6))))
        if rng.random() < self._wild:
            said = mutated([said or b"\0"], rng.getrandbits(30), 0)
        return said

    def _stream(self) -> int:
        rng = self._rng
        known = rng.randrange(self._next + 1) | 1
        return rng.choice((known, known, known, known, rng.randrange(16), rng.choice(NUMBERS)))

    def _fresh(self) -> int:
        self._next += 2
        return self._next - 2

    def _open(self) -> bytes:
        rng, stream = self._rng, self._fresh()
        body = rng.choice(
            (b"", hello(rng.choice(SERVED)), hello(rng.choice(SERVED)) + rng.randbytes(rng.randrange(99)))
        )
        end = rng.choice((0, 0, 0, FIN, RST)) if rng.random() < 0.5 else 0
        said = frame(DATA, SYN | end, stream, len(body), body)
        return said + (frame(WINDOW, rng.choice((RST, FIN)), stream, 0) if rng.random() < 0.2 else b"")

    def _data(self) -> bytes:
        body = self._rng.randbytes(self._rng.choice((0, 1, 5, 40, 300, 9000)))
        return frame(DATA, self._rng.choice((0, 0, 0, 0, ACK, FIN)), self._stream(), len(body), body)

    def _end(self) -> bytes:
        rng = self._rng
        kind = rng.choice((DATA, WINDOW))
        return frame(kind, rng.choice((FIN, RST, FIN | RST)), self._stream(), 0)

    def _credit(self) -> bytes:
        most = (0, 1, 1 << 16, 1 << 20, 1 << 30)
        return frame(WINDOW, self._rng.choice((0, 0, ACK)), self._stream(), self._rng.choice(most))

    def _placed(self) -> bytes:
        rng = self._rng
        flags = rng.choice((0, 0, 0, FIN, RST))
        body = b"" if flags else rng.randbytes(rng.choice((0, 1, 1, 8, 100)))
        return PLACED_HEADER.pack(0, PLACED, flags, self._stream(), len(body), rng.choice(PLACES)) + body

    def _crumbs(self) -> bytes:
        stream, count = self._stream(), self._rng.choice((10, 100, 400))
        pieces = (PLACED_HEADER.pack(0, PLACED, 0, stream, 1, 101 + 2 * at) + b"x" for at in range(count))
        return b"".join(pieces)

    def _pairs(self) -> bytes:
        return b"".join(
            frame(WINDOW, SYN, stream, 0) + frame(WINDOW, RST, stream, 0)
            for stream in (self._fresh() for _ in range(self._rng.choice((1, 5, 50))))
        )

    def _pings(self) -> bytes:
        flags = self._rng.choice((SYN, ACK, SYN | ACK))
        return frame(PING, flags, 0, self._rng.choice(NUMBERS)) * self._rng.choice((1, 3, 100))

    def _any(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.3:
            return frame(GO_AWAY, 0, 0, rng.choice((0, 1, 2, 99)))
        length = rng.choice(NUMBERS)
        version, flags = int(rng.random() < 0.1), rng.randrange(16)
        return frame(rng.randrange(6), flags, self._stream(), length, rng.randbytes(min(length, 100)), version)


def junk(rng: random.Random) -> Say:
    """Bytes of any kind, hand-shakes among them."""
    corpus = [
        hello("/noise") + bytes((0, 32)) + rng.randbytes(32),
        hello("/none/1"),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(200),
    ]
    return lambda: mutated(corpus, rng.getrandbits(30), rng.randrange(len(corpus)))


def inside(corpus: Sequence[bytes], stream: int = 1) -> Talk:
    """Mutated messages, as data of one stream that stands; now and then any frame."""

    def talk(rng: random.Random) -> Say:
        frames = Frames(rng)

        def say() -> bytes:
            if rng.random() < 0.15:
                return frames()
            number = rng.randrange(len(corpus))
            data = corpus[number] if rng.random() < 0.3 else mutated(corpus, rng.getrandbits(30) // len(corpus), number)
            return frame(DATA, 0, stream, len(data), data)

        return say

    return talk


async def entered(stage: Stage) -> Hostile:
    """A connection of the hostile peer that has shaken hands with the host."""
    return await enter(stage.network, stage.addr, WHO, stage.ephemeral)


# --- the points ------------------------------------------------------------------------------------------------------
@point("before the hand-shake", junk)
async def _before(stage: Stage) -> Sequence[Hostile]:
    return [Hostile(await stage.network.dial(stage.addr))]


@point("after the hand-shake", Frames)
async def _after(stage: Stage) -> Sequence[Hostile]:
    return [await entered(stage)]


@point("while streams are open", Frames)
async def _with_streams(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    for protocol in ("/echo/1", "/each/1", "/into/1", "/pour/1"):
        await hostile.open(protocol)
    await hostile.hear()
    return [hostile]


def _introduction() -> bytes:
    said = Identify(peer=WHO.identity.peer_id, protocols=SERVED, agent_version="hostile").encode()
    return encode_varint(len(said)) + said


async def _introduced(stage: Stage) -> Hostile:
    """Both sides have introduced themselves."""
    hostile = await entered(stage)
    asked = await hostile.open(IDENTIFY)
    await hostile.receive(asked, 64)
    theirs = hostile.mux.streams.get(2)
    if theirs is not None:
        await hostile.send(theirs, hello(IDENTIFY) + _introduction())
        hostile.mux.close_write(theirs)
        await hostile.pump()
    return hostile


@point("after identify", Frames)
async def _after_identify(stage: Stage) -> Sequence[Hostile]:
    return [await _introduced(stage)]


@point("in identify push", inside([_introduction()]))
async def _pushing(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    await hostile.open(IDENTIFY_PUSH)
    return [hostile]


@point("on a rail", Frames)
async def _on_rails(stage: Stage) -> Sequence[Hostile]:
    first = await entered(stage)
    await first.open("/pour/1")
    await first.open("/echo/1")
    assert first.secured is not None
    rails = []
    for number in (1, 2):
        ephemeral = bytes((stage.ephemeral[0] ^ number, *stage.ephemeral[1:]))
        rail = await enter(stage.network, stage.addr, WHO, ephemeral, RAIL_ONLY)
        await rail.say(first.secured.session.binding)
        rails.append(rail)
    await trio.sleep(0.01)
    return [first, *rails]


@point("dialed, before the hand-shake", junk)
async def _dialed(stage: Stage) -> Sequence[Hostile]:
    return [await stage.dialed()]


@point("dialed, after the hand-shake", Frames)
async def _dialed_after(stage: Stage) -> Sequence[Hostile]:
    raw = (await stage.dialed()).raw
    return [Hostile(raw, await upgrade(raw, WHO.fresh(stage.ephemeral), initiator=False))]
