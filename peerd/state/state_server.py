"""Server side of state download: frozen copies, and pieces of them for peers that ask.

A copy is frozen when a caller asks for a position that has no copy yet, and all callers for that position share it. It
is hashed a few pieces at a time, so that the worker can do other work in between. State that is requested by name (the
total of a step, a kept checkpoint) exists already and is only hashed. Limits: a few copies of either kind, where a copy
in use is not dropped for a new one; a number of pieces in flight to one peer and to all (the calls' limits). Beyond a
limit the caller gets Overloaded, with the time to retry. A caller that names a later step, or asks for the total of our
next step, is answered when we reach it, or after _MEET_S; if STATE_MEETING callers wait already, at once.

A hostile caller may ask for copies at every step (each replaces its last one), ask for pieces that do not exist
(Refused), or read its answers slowly (which occupies only its own share of pieces). A copy counts as in use only while
a caller makes progress: after _START_S it must have received new pieces at a least rate, for at most STATE_COPY_LIFE_S.
If a member of the run needs a copy, strangers' use does not count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import (
    STATE_COPIES,
    STATE_COPY_LIFE_S,
    STATE_DONORS,
    STATE_GIVEN,
    STATE_GIVEN_PER_PEER,
    STATE_LEAST_BYTES_PER_S,
    STATE_MEETING,
    STATE_NAMED_COPIES,
    STATE_PIECE_BYTES,
    STATE_PIECES,
    STATE_USERS,
)
from peerd.core.work import Worker
from peerd.messages.encoding import Empty
from peerd.messages.state import (
    DIGEST_BYTES,
    StateDigests,
    StateItem,
    StateLayout,
    StateManifest,
    StatePiece,
    StateRelease,
    StateRequest,
    TensorSpec,
    piece_digest,
)
from peerd.messages.swarm import Position
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.state.state_room import StateRoom

# A copy counts as in use for this time after a call, unless it is released: longer than a piece may take, so that a
# joiner on a slow line does not lose its copy between two pieces.
_BUSY_S = 35.0
_START_S = 60.0  # without required progress: other donors may send the digests and first pieces
_IDLE_LIFE_S = 300.0  # a copy without requests for this time is dropped
_MEET_S = 20.0  # longest wait for the step that a joiner names
_HASHED_AT_ONCE = 16  # pieces of 1 MiB each


class Methods(NamedTuple):
    """Names of the calls. `ahead`: steps between the position of a request by name and the position of its answer."""

    manifest: str
    digests: str
    piece: str
    release: str
    ahead: int


STATE = Methods("state/1/manifest", "state/1/digests", "state/1/piece", "state/1/release", ahead=1)
KEPT = Methods("kept/1/manifest", "kept/1/digests", "kept/1/piece", "kept/1/release", ahead=0)
LAYOUT: Final = "state/1/layout"  # names, dtypes and shapes in a state, for keepers that have no model
# A peer may ask for a state and a total at once. All callers share the copies of the state (STATE_COPIES). Besides
# callers that wait for a step (STATE_MEETING), there is room for requests of strangers that are answered at once.
_SMALL: Final = Declaration(
    shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0, calls_per_peer=4, calls=2 * STATE_GIVEN
)
_FREEZING: Final = replace(_SMALL, memory_bytes=Needs.STATE)
_PIECE: Final = replace(_SMALL, memory_bytes=STATE_PIECE_BYTES, calls_per_peer=STATE_GIVEN_PER_PEER, calls=STATE_GIVEN)
DECLARED: Final = {
    name: declared
    for methods in (STATE, KEPT)
    for name, declared in (
        (methods.manifest, _FREEZING),
        (methods.digests, _SMALL),
        (methods.piece, _PIECE),
        (methods.release, _SMALL),
    )
} | {LAYOUT: _SMALL}
Outline = Callable[[], Awaitable[list[TensorSpec]]]
Reached = Callable[[int], Awaitable[None]]
Freeze = Callable[[], Awaitable[tuple[Position, "Frozen"]]]
Named = Callable[[Position], Awaitable[tuple[Position, list[StateItem]] | None]]


class Frozen(Protocol):
    """A state that is read once, from its first tensor to its last, such as `model.frozen_state.FrozenState`."""

    @property
    def specs(self) -> Sequence[TensorSpec]: ...

    def read(self, tensor: int, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of a tensor."""
        ...


@dataclass(slots=True)
class _Use:
    """One caller's use of a copy."""

    since: float
    at: float  # time of its last call
    had: bytearray  # one bit for each piece that it received
    had_bytes: int = 0
    wanted: bool = True  # it has not released the copy

    def gets_on(self, now: float, least_bytes_per_s: float) -> bool:
        """True while the caller receives new pieces at the least rate."""
        due = (now - self.since - _START_S) * least_bytes_per_s
        return self.wanted and now - self.at < _BUSY_S and self.had_bytes >= due


@dataclass(slots=True)
class _Copy:
    """A frozen state with its digests."""

    manifest: StateManifest
    layout: StateLayout
    payloads: Sequence[memoryview]
    digests: bytearray
    made: float
    room: StateRoom | None = None  # memory of `payloads`, if the copy owns it
    name: Position | None = None  # position by which it is requested
    # By caller; one that returns keeps its progress.
    used: BoundedDict[PeerId, _Use] = field(default_factory=lambda: BoundedDict(STATE_USERS))

    def touch(self, peer: PeerId, now: float) -> None:
        use = self.used.get(peer) or _Use(now, now, bytearray(-(-self.layout.pieces // 8)))
        use.at, use.wanted = now, True
        self.used[peer] = use

    def gave(self, peer: PeerId, piece: int, count: int) -> None:
        """Record that `peer` was sent a piece. A piece that it had before is no progress."""
        if self.room is not None:
            self.room.used(count)
        use, bit = self.used.get(peer), 1 << piece % 8
        if use is not None and not use.had[piece // 8] & bit:
            use.had[piece // 8] |= bit
            use.had_bytes += count

    def let_go(self, peer: PeerId) -> None:
        if use := self.used.get(peer):
            use.wanted = False

    def used_at(self) -> float:
        return max((use.at for use in self.used.values() if use.wanted), default=self.made)

    def in_use(self, now: float, by: Callable[[PeerId], bool]) -> bool:
        """True if any of the callers that `by` accepts makes progress."""
        whole_in_time = self.layout.total_bytes / (STATE_DONORS * STATE_COPY_LIFE_S)
        rate = max(STATE_LEAST_BYTES_PER_S, whole_in_time)
        used = any(use.gets_on(now, rate) for peer, use in self.used.items() if by(peer))
        return used and now - self.made < STATE_COPY_LIFE_S


@dataclass(slots=True)
class _Shelf:
    """Copies of a stage's state of one kind, by root: `frozen` copies of the current state, or copies `by_name`, which
    are of the position that the request names. At most `most` copies.
    """

    most: int
    copies: dict[bytes, _Copy] = field(default_factory=dict)
    lock: trio.Lock = field(default_factory=trio.Lock)  # one copy is made at a time

    def of(self, position: Position) -> _Copy | None:
        return next((copy for copy in self.copies.values() if copy.manifest.position == position), None)

    def drop_unused(self, now: float) -> None:
        for root, copy in list(self.copies.items()):
            if now - copy.used_at() > _IDLE_LIFE_S:
                del self.copies[root]

    def make_room(self, now: float, respected: Callable[[PeerId], bool]) -> None:
        """Drop the least used copy if there is no room for a new one. Raises Overloaded if all are in use.

        Only use by `respected` callers protects a copy.
        """
        self.drop_unused(now)
        if len(self.copies) >= self.most:

            def value(item: tuple[bytes, _Copy]) -> tuple[bool, bool, float]:
                return item[1].in_use(now, respected), item[1].in_use(now, _anybody), item[1].used_at()

            root, least = min(self.copies.items(), key=value)
            if least.in_use(now, respected):
                raise Overloaded("others are fetching older states", 2.0)
            del self.copies[root]


@dataclass(slots=True)
class _Offer:
    """What this peer serves for one stage of one run."""

    fingerprint: bytes
    worker: Worker
    freeze: Freeze | None = None
    standing: Callable[[], Position] | None = None
    reached: Reached | None = None
    outline: Outline | None = None
    named: Named | None = None
    folder: Path | None = None
    frozen: _Shelf = field(default_factory=lambda: _Shelf(STATE_COPIES))
    by_name: _Shelf = field(default_factory=lambda: _Shelf(STATE_NAMED_COPIES))

    @property
    def shelves(self) -> tuple[_Shelf, _Shelf]:
        return self.frozen, self.by_name


class StateServer:
    """Serves this peer's states and named states. Serves nothing before `offer` or `offer_named`."""

    def __init__(self, rpc: Rpc, methods: Methods = STATE) -> None:
        self.is_member: Callable[[PeerId], bool] = lambda _: False  # of the run, as far as we know
        self.given_bytes = 0  # of pieces
        self._offers: dict[int, _Offer] = {}  # by stage
        self._meeting: set[PeerId] = set()  # callers that wait for a step
        rpc.serve(methods.manifest, StateRequest, self._give_manifest, declared=DECLARED[methods.manifest])
        rpc.serve(methods.digests, StateDigests, self._give_digests, declared=DECLARED[methods.digests])
        rpc.serve(methods.piece, StatePiece, self._give_piece, declared=DECLARED[methods.piece])
        if methods is STATE:
            rpc.serve(LAYOUT, StateRequest, self._give_layout, declared=DECLARED[LAYOUT])
        rpc.serve(methods.release, StateRelease, self._release, declared=DECLARED[methods.release])

    def offer(
        self,
        fingerprint: bytes,
        stage: int,
        freeze: Freeze,
        worker: Worker,
        standing: Callable[[], Position],
        reached: Reached,
        outline: Outline | None = None,
        folder: Path | None = None,
    ) -> None:
        """Serve the state that `freeze` returns, from now on.

        `freeze` is called once for each requested position. `standing` returns our current position; `reached` waits
        for a step; `outline` returns the tensors without their values. `worker` hashes and writes, and should compute
        nothing else. `folder`: for copies, or None to keep them in memory.
        """
        offer = self._offers.setdefault(stage, _Offer(fingerprint, worker))
        offer.freeze, offer.standing, offer.reached = freeze, standing, reached
        offer.outline, offer.folder = outline, folder

    def offer_named(self, fingerprint: bytes, stage: int, named: Named, worker: Worker) -> None:
        """Also serve what `named` returns for a position, from now on. What it returns must never change."""
        self._offers.setdefault(stage, _Offer(fingerprint, worker)).named = named

    def withdraw(self, stage: int) -> None:
        """Stop serving `stage`, and free its copies."""
        self._offers.pop(stage, None)

    def let_go(self) -> None:
        """Free the copies that nobody has requested for a while. Call it regularly: each is a whole state."""
        for offer in self._offers.values():
            for shelf in offer.shelves:
                shelf.drop_unused(trio.current_time())

    @property
    def copies(self) -> list[Position]:
        """The positions of the frozen copies, oldest first."""
        return [copy.manifest.position for offer in self._offers.values() for copy in offer.frozen.copies.values()]

    @property
    def in_use(self) -> bool:
        """True while any caller fetches a copy from here."""
        now = trio.current_time()
        copies = (copy for offer in self._offers.values() for shelf in offer.shelves for copy in shelf.copies.values())
        return any(copy.in_use(now, _anybody) for copy in copies)

    async def _give_manifest(self, call: Incoming[StateRequest]) -> Answer[StateManifest]:
        body, offer = call.body, self._offers.get(call.body.stage)
        if offer is None or offer.fingerprint != body.run:
            raise Refused("this peer does not serve the state of that stage")
        shelf = offer.frozen if body.of is None else offer.by_name
        if body.of is None and body.meet:
            await self._meet(offer, call.peer, body.meet)
        elif body.of is not None and offer.standing is not None and offer.standing().step == body.of.step:
            await self._meet(offer, call.peer, body.of.step + 1)  # others may make that step before us
        async with shelf.lock:
            for other in shelf.copies.values():
                other.let_go(call.peer)  # it now needs another copy, or will ask for this one again
            respected = self.is_member if self.is_member(call.peer) else _anybody
            copy = await (_newest(offer, respected) if body.of is None else _of_name(offer, body.of, respected))
            copy.touch(call.peer, trio.current_time())
        return Answer(copy.manifest)

    async def _meet(self, offer: _Offer, caller: PeerId, step: int) -> None:
        """Wait until we reach `step`: for a limited time, and not if too many callers wait already."""
        if offer.reached is None or caller in self._meeting or len(self._meeting) >= STATE_MEETING:
            return
        self._meeting.add(caller)
        try:
            with trio.move_on_after(_MEET_S):
                await offer.reached(step)
        finally:
            self._meeting.discard(caller)

    def _find(self, run: bytes, root: bytes) -> _Copy | None:
        shelves = [shelf for o in self._offers.values() if o.fingerprint == run for shelf in o.shelves]
        return next((shelf.copies[root] for shelf in shelves if root in shelf.copies), None)

    async def _release(self, call: Incoming[StateRelease]) -> Answer[Empty]:
        if copy := self._find(call.body.run, call.body.root):
            copy.let_go(call.peer)
        return Answer(Empty())

    def _copy(self, call: Incoming[StateDigests] | Incoming[StatePiece]) -> _Copy:
        copy = self._find(call.body.run, call.body.root)
        if copy is None:
            raise Refused("this copy of the state is gone: ask for a new manifest")
        copy.touch(call.peer, trio.current_time())
        return copy

    async def _give_digests(self, call: Incoming[StateDigests]) -> Answer[Empty]:
        copy = self._copy(call)
        return Answer(Empty(), (TensorFrame("uint8", (copy.layout.pieces, DIGEST_BYTES), copy.digests),))

    async def _give_layout(self, call: Incoming[StateRequest]) -> Answer[Empty]:
        offer = self._offers.get(call.body.stage)
        if offer is None or offer.fingerprint != call.body.run or offer.outline is None:
            raise Refused("this peer does not serve the state of that stage")
        text = StateLayout(await offer.outline()).text
        return Answer(Empty(), (TensorFrame("uint8", (len(text),), text),))

    async def _give_piece(self, call: Incoming[StatePiece]) -> Answer[Empty]:
        copy = self._copy(call)
        if call.body.piece >= copy.layout.pieces:
            raise Refused("no such piece")
        data = copy.layout.cut_out(call.body.piece, copy.payloads)
        copy.gave(call.peer, call.body.piece, data.nbytes)
        self.given_bytes += data.nbytes
        return Answer(Empty(), (TensorFrame("uint8", (data.nbytes,), data),))


def _anybody(_: PeerId) -> bool:
    return True


async def _newest(offer: _Offer, respected: Callable[[PeerId], bool]) -> _Copy:
    """A copy of the current state: an existing one, or a new one."""
    if offer.freeze is None or offer.standing is None:
        raise Refused("this peer has no state of its own to serve")
    copy = offer.frozen.of(offer.standing())
    if copy is None:
        offer.frozen.make_room(trio.current_time(), respected)
        position, state = await offer.freeze()
        copy = offer.frozen.of(position) or await _written(offer, position, state)
    return copy


async def _of_name(offer: _Offer, name: Position, respected: Callable[[PeerId], bool]) -> _Copy:
    """A copy of the data that has this name now: after a rollback, another step starts from the same position."""
    shelf = offer.by_name
    copy = next((copy for copy in shelf.copies.values() if copy.name == name), None)
    if copy is None or copy.manifest.position != name:
        found = await offer.named(name) if offer.named is not None else None
        if copy is not None and (found is None or found[0] == copy.manifest.position):
            return copy
        if found is None:
            raise Refused(f"the requested data of step {name.step} is not kept here")
        if copy is not None:
            copy.name = None  # callers that fetch it may continue
        shelf.make_room(trio.current_time(), respected)
        copy = await _hashed(shelf, *found, offer.worker)
        copy.name = name
    return copy


async def _written(offer: _Offer, position: Position, state: Frozen) -> _Copy:
    """Make a copy of the current state, in a file if possible, and add it to the shelf."""
    layout, folder = StateLayout(state.specs), offer.folder
    _need_room_for_digests(layout)
    room = await offer.worker.run(
        lambda: StateRoom(layout.total_bytes, folder), name="make room for a copy of the state"
    )
    payloads = layout.views(room.row)

    def write(number: int) -> None:
        for tensor, first, last, _ in layout.spans(number):
            payloads[tensor][first:last] = state.read(tensor, first, last)
            room.used(last - first)

    digests = await _digests(layout, payloads, offer.worker, write)
    return _shelved(offer.frozen, position, (layout, payloads, digests), room)


async def _hashed(shelf: _Shelf, position: Position, items: list[StateItem], worker: Worker) -> _Copy:
    """Hash a state that exists already, and add it to the shelf."""
    layout, payloads = StateLayout(items), [item.payload for item in items]
    _need_room_for_digests(layout)
    digests = await _digests(layout, payloads, worker, lambda number: None)
    return _shelved(shelf, position, (layout, payloads, digests))


def _need_room_for_digests(layout: StateLayout) -> None:
    if layout.pieces > STATE_PIECES:
        raise Refused(f"the state has {layout.total_bytes} bytes, more than can be served")


def _shelved(
    shelf: _Shelf,
    position: Position,
    found: tuple[StateLayout, Sequence[memoryview], bytearray],
    room: StateRoom | None = None,
) -> _Copy:
    layout, payloads, digests = found
    manifest = StateManifest(position, layout.digest, layout.root(position, digests))
    copy = shelf.copies[manifest.root] = _Copy(manifest, layout, payloads, digests, trio.current_time(), room)
    return copy


async def _digests(
    layout: StateLayout, payloads: Sequence[memoryview], worker: Worker, write: Callable[[int], None]
) -> bytearray:
    """Write and hash all pieces, 16 in each job of the worker. Returns the digests."""
    digests = bytearray(layout.pieces * DIGEST_BYTES)

    def hash_some(numbers: range) -> None:
        for number in numbers:
            write(number)
            at = number * DIGEST_BYTES
            digests[at : at + DIGEST_BYTES] = piece_digest(layout.cut_out(number, payloads))

    for begin in range(0, layout.pieces, _HASHED_AT_ONCE):
        numbers = range(begin, min(begin + _HASHED_AT_ONCE, layout.pieces))
        await worker.run(partial(hash_some, numbers), name="hash the state")
    return digests
