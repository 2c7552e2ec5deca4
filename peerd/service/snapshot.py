"""Serve and fetch a stage's state in checked pieces, so that a joiner starts where the others are.

A donor freezes a copy of its state when somebody asks, and serves pieces of that copy while it goes on training;
a manifest names every tensor with its SHA-256. The receiver knows what it expects: it refuses a manifest whose
names, dtypes or shapes differ from its own before it fetches a byte, and a tensor whose digest is wrong. Nothing
is applied here; the caller gets the whole state or an error. Hashing runs on the worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from peerd.core.errors import ProtocolViolation, Refused, RemoteError, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.messages import Empty
from peerd.core.training import Position, StateManifest, StatePiece, StateRequest, StateTensor
from peerd.core.work import Worker
from peerd.service.rpc import Answer, Incoming, MethodLimits, Rpc

PIECE_BYTES = 1 << 20
_PIECES_IN_FLIGHT = 8
_KEPT_COPIES = 2
_COPY_LIFE_S = 300.0  # a frozen copy is let go when nobody has asked for so long
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class StateItem:
    """One tensor of a state: raw little-endian bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: memoryview


Freeze = Callable[[], Awaitable[tuple[Position, list[StateItem]]]]


@dataclass(slots=True)
class _Copy:
    """A frozen state with its manifest."""

    manifest: StateManifest
    items: list[StateItem]
    used: float


@dataclass(slots=True)
class _Offer:
    """What this peer gives to others: one stage of one run."""

    fingerprint: bytes
    stage: int
    freeze: Freeze
    worker: Worker
    copies: dict[int, _Copy] = field(default_factory=dict)
    next_number: int = 0
    lock: trio.Lock = field(default_factory=trio.Lock)


class Snapshots:
    """Both sides of state transfer."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._offer: _Offer | None = None
        rpc.serve("state/1/manifest", StateRequest, self._give_manifest, limits=MethodLimits(calls_per_peer=2))
        rpc.serve("state/1/piece", StatePiece, self._give_piece, limits=MethodLimits(calls_per_peer=16, calls=64))

    def offer(self, fingerprint: bytes, stage: int, freeze: Freeze, worker: Worker) -> None:
        """From now on give the state that `freeze` returns; it is called once for each new position."""
        self._offer = _Offer(fingerprint, stage, freeze, worker)

    def withdraw(self) -> None:
        self._offer = None

    async def fetch(
        self, donors: Sequence[PeerId], request: StateRequest, expected: Sequence[StateItem], worker: Worker
    ) -> tuple[Position, list[StateItem]]:
        """The state of the first donor that gives a whole one; the last donor's error when none does."""
        error: RemoteError = Unreachable("no peer of the stage gives its state")
        for donor in donors:
            try:
                return await self._fetch_from(donor, request, expected, worker)
            except RemoteError as failure:
                error = failure
        raise error

    # --- receiving --------------------------------------------------------------------------------------------

    async def _fetch_from(
        self, donor: PeerId, request: StateRequest, expected: Sequence[StateItem], worker: Worker
    ) -> tuple[Position, list[StateItem]]:
        answer = await self._rpc.call(donor, "state/1/manifest", request, StateManifest, timeout_s=_CALL_TIMEOUT_S)
        manifest = answer.body
        _compare(manifest, expected, donor)
        buffers = [bytearray(item.payload.nbytes) for item in expected]
        pieces = iter([(i, begin) for i, buffer in enumerate(buffers) for begin in range(0, len(buffer), PIECE_BYTES)])
        failures: list[RemoteError] = []

        async def fetch_pieces(scope: trio.CancelScope) -> None:
            for tensor, begin in pieces:
                body = StatePiece(request.run, manifest.snapshot, tensor, begin)
                try:
                    data = await self._fetch_piece(donor, body, min(PIECE_BYTES, len(buffers[tensor]) - begin))
                except RemoteError as error:
                    failures.append(error)
                    scope.cancel()
                    return
                buffers[tensor][begin : begin + len(data)] = data

        async with trio.open_nursery() as nursery:
            for _ in range(_PIECES_IN_FLIGHT):
                nursery.start_soon(fetch_pieces, nursery.cancel_scope)
        if failures:
            raise failures[0]
        for spec, buffer in zip(manifest.tensors, buffers, strict=True):
            digest = await worker.run(partial(_digest, buffer), name="check a tensor")
            if digest != spec.sha256:
                raise ProtocolViolation(f"tensor {spec.name} has the wrong digest", donor)
        items = [
            StateItem(item.name, item.dtype, item.shape, memoryview(buffer))
            for item, buffer in zip(expected, buffers, strict=True)
        ]
        return manifest.position, items

    async def _fetch_piece(self, donor: PeerId, body: StatePiece, size: int) -> memoryview:
        answer = await self._rpc.call(
            donor, "state/1/piece", body, Empty, timeout_s=_CALL_TIMEOUT_S, reply_frame_bytes=PIECE_BYTES
        )
        frame = answer.frames[0] if len(answer.frames) == 1 else None
        if frame is None or frame.lossless or (frame.dtype, frame.shape) != ("uint8", (size,)):
            raise ProtocolViolation(f"a piece of a state must be {size} bytes", donor)
        return memoryview(answer.frames[0].payload)

    # --- giving -----------------------------------------------------------------------------------------------

    async def _give_manifest(self, call: Incoming[StateRequest]) -> Answer[StateManifest]:
        offer = self._offer
        if offer is None or offer.fingerprint != call.body.run or offer.stage != call.body.stage:
            raise Refused("this peer does not give the state of that stage")
        async with offer.lock:
            position, items = await offer.freeze()
            now = trio.current_time()
            for copy in offer.copies.values():
                if copy.manifest.position == position:
                    copy.used = now
                    return Answer(copy.manifest)
            tensors = await offer.worker.run(lambda: [_describe(item) for item in items], name="describe the state")
            manifest = StateManifest(position, offer.next_number, tensors)
            offer.next_number += 1
            self._keep(offer, _Copy(manifest, items, now), now)
        return Answer(manifest)

    def _keep(self, offer: _Offer, copy: _Copy, now: float) -> None:
        """Bound the memory: at most so many copies, the least used goes first."""
        offer.copies[copy.manifest.snapshot] = copy
        stale = [n for n, c in offer.copies.items() if now - c.used > _COPY_LIFE_S]
        by_use = sorted(offer.copies, key=lambda n: offer.copies[n].used)
        for number in {*stale, *by_use[:-_KEPT_COPIES]}:
            del offer.copies[number]

    async def _give_piece(self, call: Incoming[StatePiece]) -> Answer[Empty]:
        body, offer = call.body, self._offer
        copy = offer.copies.get(body.snapshot) if offer is not None and offer.fingerprint == body.run else None
        if copy is None:
            raise Refused("this copy of the state is gone: ask for a new manifest")
        copy.used = trio.current_time()
        if body.tensor >= len(copy.items) or body.offset_bytes >= max(1, copy.items[body.tensor].payload.nbytes):
            raise Refused("no such piece")
        piece = copy.items[body.tensor].payload[body.offset_bytes : body.offset_bytes + PIECE_BYTES]
        return Answer(Empty(), (TensorFrame("uint8", (piece.nbytes,), piece),))


def _describe(item: StateItem) -> StateTensor:
    return StateTensor(item.name, item.dtype, list(item.shape), hashlib.sha256(item.payload).digest())


def _compare(manifest: StateManifest, expected: Sequence[StateItem], donor: PeerId) -> None:
    theirs = [(t.name, t.dtype, tuple(t.shape)) for t in manifest.tensors]
    mine = [(item.name, item.dtype, item.shape) for item in expected]
    if theirs != mine:
        odd = next((b for a, b in zip(mine, theirs, strict=False) if a != b), None)
        raise ProtocolViolation(f"the state offered does not fit this stage (first difference: {odd})", donor)


def _digest(data: bytearray) -> bytes:
    return hashlib.sha256(data).digest()
