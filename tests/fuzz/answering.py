"""A hostile peer that answers: what the host calls it for is answered as by an honest peer, or nearly so.

It reads the muxer's frames by itself: what is said beside the muxer, once the session says anything, breaks its books.
What it answers follows from `rng` and the order in which calls come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio

from peerd.codec.format.frame import decode_header
from peerd.core.errors import ProtocolViolation
from peerd.rpc.methods import message_codec as wire
from peerd.wire.noise.multistream import HEADER as HELLO
from peerd.wire.yamux.frames import DATA, HEADER, WINDOW
from peerd.wire.yamux.session import YamuxSession
from tests.fuzz.bodies import Bodies, Pool
from tests.fuzz.calls import Good, data_frames
from tests.worlds.network.hostile import Hostile, frame

Answers = Sequence[Good] | Callable[[bytes], Sequence[Good]]  # or those that fit a call's body
_ANSWERS_MAX = 1000  # of one session: a host that asks for ever shows soon enough
_WINDOW_BYTES = 1 << 24  # that the host may send on each of its streams


class Answering(Hostile):
    """One connection. `answers`: by "service/version/name", a good answer or several."""

    def __init__(self, entered: Hostile, rng: random.Random, pool: Pool, answers: Mapping[str, Answers]) -> None:
        super().__init__(entered.raw, entered.secured)
        self.mux = entered.mux
        self._rng, self._answers = rng, answers
        self._bodies = Bodies(rng, pool, rng.choice((0.0, 0.0, 0.03, 0.1)))
        self._bad = rng.choice((0.0, 0.0, 0.1, 0.3))  # how often it does not answer as it should
        self._plain = bytearray()
        self._inboxes: dict[int, bytearray] = {}
        self._protocols: dict[int, str] = {}
        self._skip: dict[int, int] = {}  # payload bytes that are still to come
        self._saying = trio.Lock()
        self._answered = 0

    async def shout(self, data: bytes) -> None:
        async with self._saying:
            await super().shout(data)

    async def hear(self, within_s: float = 1.0) -> bool:
        data = b""
        with trio.move_on_after(within_s):
            data = await self._arrival()
        await self._take(data, self.mux)
        return bool(data)

    async def gone(self) -> None:
        """Answer until the other side closes."""
        while not self.ended:
            await self._take(await self._arrival(), None)

    async def _arrival(self) -> bytes:
        data = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            data = await self.raw.receive_some(1 << 18)
        self.ended = not data
        return data

    async def _take(self, data: bytes, mux: YamuxSession | None) -> None:
        """Answer what came, and tell `mux` of it where somebody waits for something there."""
        assert self.secured is not None
        for plain in self.secured.session.opener.each(data):
            self._plain += plain
            if mux is not None:
                mux.receive(plain, 0.0)
        said = b""
        with suppress(ProtocolViolation):  # the host speaks as it should: what was said beside its calls confuses us
            said = self._take_frames()
        if said:
            await self.say(said)

    def _take_frames(self) -> bytes:
        said = b""
        while len(self._plain) >= HEADER.size:
            _, kind, _, stream, length = HEADER.unpack_from(self._plain)
            end = HEADER.size + (length if kind == DATA else 0)
            if len(self._plain) < end:
                break
            body = bytes(self._plain[HEADER.size : end])
            del self._plain[:end]
            if stream and stream % 2 == 0 and kind in (DATA, WINDOW):
                said += self._heard(stream, body)
        return said

    def _heard(self, stream: int, body: bytes) -> bytes:
        said = b""
        if stream not in self._inboxes:
            self._inboxes[stream] = bytearray()
            said = frame(WINDOW, 0, stream, _WINDOW_BYTES)
        inbox = self._inboxes[stream]
        inbox += body
        if stream not in self._protocols:
            if len(inbox) <= len(HELLO) or len(inbox) <= len(HELLO) + inbox[len(HELLO)]:
                return said
            line = bytes(inbox[len(HELLO) : len(HELLO) + 1 + inbox[len(HELLO)]])
            del inbox[: len(HELLO) + len(line)]
            self._protocols[stream] = line[1:-1].decode("ascii", "replace")
            said += data_frames(stream, HELLO + line)
        return said + b"".join(data_frames(stream, one) for one in self._calls(stream, inbox))

    def _calls(self, stream: int, inbox: bytearray) -> list[bytes]:
        """The replies to the calls, and parts of them, that have come whole."""
        said = []
        while True:
            skipped = min(self._skip.get(stream, 0), len(inbox))
            del inbox[:skipped]
            self._skip[stream] = self._skip.get(stream, 0) - skipped
            size = int.from_bytes(inbox[:4], "big")
            if len(inbox) < wire.HEAD_BYTES or len(inbox) < wire.HEAD_BYTES + size:
                return said
            _, kind, count, call_id = wire.read_head(bytes(inbox[: wire.HEAD_BYTES]))
            block, at = bytes(inbox[wire.HEAD_BYTES : wire.HEAD_BYTES + size]), 0
            del inbox[: wire.HEAD_BYTES + size]
            for _ in range(count):
                header, at = decode_header(block, at)
                self._skip[stream] += header.payload_bytes
            if kind in (wire.REQUEST, wire.OPEN):
                begin = at + 5 + block[at + 4]
                name = block[at + 5 : begin].decode("ascii", "replace")
                goods = self._answers.get(f"{self._protocols[stream].removeprefix('/peerd/')}/{name}", ())
                fitting = goods(block[begin:]) if callable(goods) else goods
                said.append(self._answer(fitting, kind, call_id))

    def _answer(self, goods: Sequence[Good], kind: int, call_id: int) -> bytes:
        rng = self._rng
        self._answered += 1
        if not goods or self._answered > _ANSWERS_MAX or rng.random() < self._bad / 2:
            return wire.encode_message(wire.CANCEL, call_id) if rng.random() < self._bad else b""
        good = rng.choice(goods)
        payload = b"".join(bytes(one.payload) for one in good.frames)
        headers = b"".join(wire.encode_header(one) for one in good.frames)
        if payload and rng.random() < self._bad:
            payload = rng.randbytes(len(payload))
        body = self._bodies.any(type(good.body)) if rng.random() < self._bad else self._bodies.like(good.body)
        if kind == wire.REQUEST:
            return wire.encode_message(wire.REPLY, call_id, body, headers, len(good.frames)) + payload
        parts = wire.encode_message(wire.PART, call_id, body, headers, len(good.frames)) + payload
        return parts + (wire.encode_message(wire.END, call_id) if rng.random() < self._bad else b"")
