"""The donor's side of state download: frozen copies, and pieces of them for whoever asks.

A copy is frozen when somebody asks for a position of which there is none, and shared by all who ask for that
position; it is hashed a few pieces at a time, so that the worker gets to other things in between. Limits: a few
copies, of which one in use is not let go for a new one; a number of pieces on their way to one peer and to all (the
calls' limits). Beyond each, the caller hears Overloaded and when to come back.

A hostile caller may ask for copies at every step (each takes the place of its last one), for pieces that do not exist
(Refused), or take its answers slowly (it holds its own share of pieces, and a copy for STATE_COPY_LIFE_S at most).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from peerd.core.errors import Overloaded, Refused
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import (
    LINKS,
    STATE_COPIES,
    STATE_COPY_LIFE_S,
    STATE_GIVEN,
    STATE_GIVEN_PER_PEER,
    STATE_PIECES,
)
from peerd.core.messages import Empty
from peerd.core.state import DIGEST_BYTES, StateItem, StateLayout, piece_digest
from peerd.core.training import Position, StateDigests, StateManifest, StatePiece, StateRequest
from peerd.core.work import Worker
from peerd.service.rpc import Answer, Incoming, MethodLimits, Rpc

_BUSY_S = 15.0  # a copy that somebody has used within this time, and did not ask for a newer one, is in use
_IDLE_LIFE_S = 300.0  # one that nobody has asked for so long is let go
_HASHED_AT_ONCE = 16  # pieces, of a MiB each


Freeze = Callable[[], Awaitable[tuple[Position, list[StateItem]]]]


@dataclass(slots=True)
class _Copy:
    """A frozen state with its digests."""

    manifest: StateManifest
    layout: StateLayout
    payloads: list[memoryview]
    digests: bytearray
    made: float
    used: dict[PeerId, float] = field(default_factory=dict)  # by whom, and when last

    def touch(self, peer: PeerId, now: float) -> None:
        self.used[peer] = now
        if len(self.used) > LINKS:
            self.used = {peer: at for peer, at in self.used.items() if now - at < _BUSY_S}

    def used_at(self) -> float:
        return max(self.used.values(), default=self.made)

    def in_use(self, now: float) -> bool:
        return bool(self.used) and now - self.used_at() < _BUSY_S and now - self.made < STATE_COPY_LIFE_S


@dataclass(slots=True)
class _Offer:
    """What this peer gives to others: one stage of one run."""

    fingerprint: bytes
    stage: int
    freeze: Freeze
    worker: Worker
    standing: Callable[[], Position]
    copies: dict[bytes, _Copy] = field(default_factory=dict)  # by root
    lock: trio.Lock = field(default_factory=trio.Lock)


class Giving:
    """Answers calls for the state of this peer; nothing is given before `offer`."""

    def __init__(self, rpc: Rpc) -> None:
        self._offer: _Offer | None = None
        small = MethodLimits(calls_per_peer=2, calls=STATE_GIVEN)
        pieces = MethodLimits(calls_per_peer=STATE_GIVEN_PER_PEER, calls=STATE_GIVEN)
        rpc.serve("state/1/manifest", StateRequest, self._give_manifest, limits=small)
        rpc.serve("state/1/digests", StateDigests, self._give_digests, limits=small)
        rpc.serve("state/1/piece", StatePiece, self._give_piece, limits=pieces)

    def offer(
        self,
        fingerprint: bytes,
        stage: int,
        freeze: Freeze,
        worker: Worker,
        standing: Callable[[], Position],
    ) -> None:
        """From now on give the state that `freeze` returns.

        It is called once for each position that `standing` tells and somebody asks for. `worker` hashes: best one
        that computes nothing else.
        """
        self._offer = _Offer(fingerprint, stage, freeze, worker, standing)

    def let_go(self) -> None:
        """Free the copies that nobody has asked for in a while. To be called now and then: each is a whole state."""
        if self._offer is not None:
            _drop_unused(self._offer.copies, trio.current_time())

    @property
    def copies(self) -> list[Position]:
        """The positions of which there are frozen copies, oldest first."""
        return [copy.manifest.position for copy in self._offer.copies.values()] if self._offer is not None else []

    async def _give_manifest(self, call: Incoming[StateRequest]) -> Answer[StateManifest]:
        offer = self._offer
        if offer is None or offer.fingerprint != call.body.run or offer.stage != call.body.stage:
            raise Refused("this peer does not give the state of that stage")
        async with offer.lock:
            now = trio.current_time()
            for other in offer.copies.values():
                other.used.pop(call.peer, None)  # it wants another one, or will say so
            copy = _of_position(offer, offer.standing())
            if copy is None:
                _make_room(offer, now)
                copy = await _frozen(offer, now)
            copy.touch(call.peer, trio.current_time())
        return Answer(copy.manifest)

    def _copy(self, call: Incoming[StateDigests] | Incoming[StatePiece]) -> _Copy:
        offer, body = self._offer, call.body
        copy = offer.copies.get(body.root) if offer is not None and offer.fingerprint == body.run else None
        if copy is None:
            raise Refused("this copy of the state is gone: ask for a new manifest")
        copy.touch(call.peer, trio.current_time())
        return copy

    async def _give_digests(self, call: Incoming[StateDigests]) -> Answer[Empty]:
        copy = self._copy(call)
        return Answer(Empty(), (TensorFrame("uint8", (copy.layout.pieces, DIGEST_BYTES), copy.digests),))

    async def _give_piece(self, call: Incoming[StatePiece]) -> Answer[Empty]:
        copy = self._copy(call)
        if call.body.piece >= copy.layout.pieces:
            raise Refused("no such piece")
        data = copy.layout.cut_out(call.body.piece, copy.payloads)
        return Answer(Empty(), (TensorFrame("uint8", (data.nbytes,), data),))


def _of_position(offer: _Offer, position: Position) -> _Copy | None:
    return next((copy for copy in offer.copies.values() if copy.manifest.position == position), None)


def _drop_unused(copies: dict[bytes, _Copy], now: float) -> None:
    for root, copy in list(copies.items()):
        if now - copy.used_at() > _IDLE_LIFE_S or now - copy.made > STATE_COPY_LIFE_S:
            del copies[root]


def _make_room(offer: _Offer, now: float) -> None:
    """Bound the memory, before a new copy is made: the least used goes; Overloaded when all are in use."""
    copies = offer.copies
    _drop_unused(copies, now)
    if len(copies) >= STATE_COPIES:
        root, oldest = min(copies.items(), key=lambda item: (item[1].in_use(now), item[1].used_at()))
        if oldest.in_use(now):
            raise Overloaded("others are fetching older states", 2.0)
        del copies[root]


async def _frozen(offer: _Offer, now: float) -> _Copy:
    """A copy of the present state; the one there is, when there is one."""
    position, items = await offer.freeze()
    copy = _of_position(offer, position)
    if copy is not None:
        return copy
    layout = StateLayout(items)
    if layout.pieces > STATE_PIECES:
        raise Refused(f"the state has {layout.total_bytes} bytes, more than can be given")
    payloads = [item.payload for item in items]
    digests = bytearray(layout.pieces * DIGEST_BYTES)
    for begin in range(0, layout.pieces, _HASHED_AT_ONCE):
        numbers = range(begin, min(begin + _HASHED_AT_ONCE, layout.pieces))
        await offer.worker.run(partial(_hash, layout, payloads, numbers, digests), name="hash the state")
    manifest = StateManifest(position, layout.digest, layout.root(position, digests))
    copy = offer.copies[manifest.root] = _Copy(manifest, layout, payloads, digests, now)
    return copy


def _hash(layout: StateLayout, payloads: list[memoryview], numbers: range, digests: bytearray) -> None:
    for number in numbers:
        at = number * DIGEST_BYTES
        digests[at : at + DIGEST_BYTES] = piece_digest(layout.cut_out(number, payloads))
