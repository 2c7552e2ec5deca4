"""Calls of a hostile peer: requests, parts and answers that are mostly right, and often not.

A `Menu` says which calls a point is about, with a good body of each; `talk` of it makes plaintexts of the muxer, whole
calls on fresh streams, more of them on streams that stand, parts, cancellings, ends, and junk in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from peerd.codec.format.frame import TensorFrame
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.method_load import method_name
from peerd.wire.noise.multistream import HEADER as HELLO
from peerd.wire.noise.multistream import encode_line
from peerd.wire.yamux.frames import DATA, FIN, RST, SYN, WINDOW
from tests.fuzz.bodies import Bodies, Pool
from tests.fuzz.session_points import Frames, Say
from tests.fuzz.sessions import Talk
from tests.kit.mutate import mutated
from tests.worlds.network.hostile import frame, hello

FIRST_STREAM = 1001  # of those that are opened here; a point has opened others before
THEIR_STREAMS = (2, 2, 2, 4, 4, 6, 8, 10, 12)  # of those that the host opens
_PIECE_BYTES = 16 << 10
Frame = Callable[[random.Random], TensorFrame]


@dataclass(frozen=True, slots=True)
class Good:
    """One call that the host takes: its body, and the tensors that go with it."""

    method: str
    body: msgspec.Struct
    frames: tuple[TensorFrame, ...] = ()
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class Menu:
    """The calls of a point. `replies`: the hostile peer's answers to calls of the host."""

    pool: Pool
    goods: Sequence[Good]
    replies: Sequence[msgspec.Struct] = ()
    streams: Sequence[int] = ()  # that the point has opened for calls of `goods[0]`

    def talk(self) -> Talk:
        return lambda rng: Calls(rng, self)


class Calls:
    """Plaintexts, one after the other; remembers which streams it has opened for which call."""

    def __init__(self, rng: random.Random, menu: Menu) -> None:
        self._rng, self._menu = rng, menu
        self._frames = Frames(rng)
        self._bodies = Bodies(rng, menu.pool, rng.choice((0.0, 0.03, 0.1, 0.3)))
        self._junk = rng.choice((0.0, 0.02, 0.1))
        self._next = FIRST_STREAM
        self._open = [(stream, menu.goods[0]) for stream in menu.streams]
        self._ids: dict[int, int] = dict.fromkeys(menu.streams, 1)

    def __call__(self) -> bytes:
        rng = self._rng
        kinds: list[Say] = [*[self._call] * 6, *[self._again] * 3, self._part, self._part, self._small, self._end]
        if self._menu.replies:
            kinds += [self._answer] * 3
        said = b"".join(rng.choice(kinds)() for _ in range(rng.choice((1, 1, 2, 3))))
        if rng.random() < self._junk:
            return self._frames() if rng.random() < 0.5 else mutated([said or b"\0"], rng.getrandbits(30), 0)
        return said

    def _call(self) -> bytes:
        good, stream = self._rng.choice(self._menu.goods), self._next
        self._next += 2
        self._open.append((stream, good))
        self._ids[stream] = 1
        start = hello(method_name(good.method).protocol)
        return data_frames(stream, start + self._request(good, 1), SYN)

    def _again(self) -> bytes:
        """Another call where one was made before, of its service."""
        if not self._open:
            return self._call()
        stream, good = self._rng.choice(self._open)
        self._ids[stream] += 1
        service = method_name(good.method).service
        other = self._rng.choice([one for one in self._menu.goods if method_name(one.method).service == service])
        return data_frames(stream, self._request(other, self._ids[stream]))

    def _part(self) -> bytes:
        streaming = [(stream, good) for stream, good in self._open if good.streaming]
        if not streaming:
            return self._again()
        stream, good = self._rng.choice(streaming)
        headers, payload, count = self._tensors(good)
        body = self._body(good)
        return data_frames(stream, wire.encode_message(wire.PART, self._ids[stream], body, headers, count) + payload)

    def _small(self) -> bytes:
        if not self._open:
            return self._call()
        stream, _ = self._rng.choice(self._open)
        kind = self._rng.choice((wire.CANCEL, wire.CANCEL, wire.END, wire.ERROR))
        return data_frames(stream, wire.encode_message(kind, self._rng.randint(0, self._ids[stream] + 1)))

    def _end(self) -> bytes:
        if not self._open:
            return self._call()
        rng = self._rng
        stream, _ = self._open.pop(rng.randrange(len(self._open)))
        return frame(rng.choice((DATA, WINDOW)), rng.choice((FIN, RST)), stream, 0)

    def _answer(self) -> bytes:
        """To a call of the host, if there is one."""
        rng = self._rng
        body = self._changed(rng.choice(self._menu.replies))
        kind = rng.choice((wire.REPLY, wire.REPLY, wire.REPLY, wire.PART, wire.END))
        said = wire.encode_message(kind, rng.choice((1, 1, 1, 2, 3)), b"" if kind == wire.END else body)
        good = rng.choice(self._menu.goods)
        agreed = HELLO + encode_line(method_name(good.method).protocol) if rng.random() < 0.5 else b""
        return data_frames(rng.choice(THEIR_STREAMS), agreed + said)

    def _request(self, good: Good, number: int) -> bytes:
        rng = self._rng
        headers, payload, count = self._tensors(good)
        kind = wire.OPEN if good.streaming else wire.REQUEST
        if rng.random() < 0.03:
            kind = wire.REQUEST if good.streaming else wire.OPEN
        name, timeout_s = method_name(good.method).name, rng.choice((0.01, 1.0, 20.0, 3600.0))
        said = wire.encode_call(kind, number, name, timeout_s, self._body(good), headers, count) + payload
        return said[: rng.randrange(len(said))] if rng.random() < 0.05 else said

    def _body(self, good: Good) -> bytes:
        rng = self._rng
        if rng.random() < 0.05:
            good = rng.choice(self._menu.goods)  # a good body, of another call
        return self._bodies.any(type(good.body)) if rng.random() < 0.05 else self._changed(good.body)

    def _changed(self, good: msgspec.Struct) -> bytes:
        body = self._bodies.like(good)
        return mutated([body], self._rng.getrandbits(30), 0) if self._rng.random() < 0.05 else body

    def _tensors(self, good: Good) -> tuple[bytes, bytes, int]:
        rng, frames = self._rng, list(good.frames)
        if rng.random() < 0.2:
            frames = [_other_frame(rng, one) for one in frames]
        if rng.random() < 0.04:
            frames = frames[:-1] or [TensorFrame("uint8", (3,), b"abc")]
        if rng.random() < 0.04:
            frames.append(TensorFrame("float32", (1,), bytes(4)))
        headers, payloads = wire.encode_frames(frames)
        payload = b"".join(payloads)
        if payload and rng.random() < 0.05:
            payload = mutated([payload], rng.getrandbits(30), 0)
        return headers, payload, len(frames)


def _other_frame(rng: random.Random, frame: TensorFrame) -> TensorFrame:
    """Of another shape, type, coding or content than the one that fits."""
    payload = bytes(frame.payload)
    match rng.randrange(7):
        case 0:  # no numbers, and infinite ones
            return TensorFrame(frame.dtype, frame.shape, rng.choice((b"\xff", b"\x7f")) * len(payload))
        case 1:
            return TensorFrame("uint8", (len(payload),), payload)
        case 2:
            return TensorFrame(frame.dtype, frame.shape[::-1], payload)
        case 3:
            return TensorFrame(frame.dtype, (0, *frame.shape), b"")
        case 4:
            return TensorFrame("float64", (1, 1, 1), rng.randbytes(8))
        case 5:
            return TensorFrame(frame.dtype, (1, *frame.shape), payload)
    return TensorFrame("int64", (2, 2), rng.randbytes(32))


def data_frames(stream: int, data: bytes, flags: int = 0) -> bytes:
    """Frames of one stream with all of this."""
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)] or [b""]
    first, *rest = (frame(DATA, flags if at == 0 else 0, stream, len(piece), piece) for at, piece in enumerate(pieces))
    return first + b"".join(rest)
