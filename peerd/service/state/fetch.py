"""Client side of state download: drives one `machine/state/download` over calls, into memory allocated in advance.

The receiver's own layout alone determines the size of the memory. If a folder is given, the memory is a file there, so
that the system may page it out. The worker hashes each piece and writes it only if its digest is right. Written pieces
are kept for the next attempt (`BegunDownload`). The caller applies the state. A hostile donor may send other bytes,
frames or digests than it vouched for: it is named, and its data is discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import NoMemory, Overloaded, ProtocolViolation, Refused, RemoteError, TooSlow, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, STATE_PIECE_BYTES
from peerd.core.messages.encoding import Empty
from peerd.core.messages.state import (
    DIGEST_BYTES,
    StateDigests,
    StateLayout,
    StateManifest,
    StatePiece,
    StateRelease,
    StateRequest,
    TensorSpec,
    piece_digest,
    read_layout,
)
from peerd.core.messages.swarm import Position
from peerd.core.work import Worker
from peerd.machine.state import download_events as dl
from peerd.machine.state.download import Download
from peerd.machine.state.quorum import Claim
from peerd.net.timer import Timer
from peerd.service.rpc.rpc import Rpc
from peerd.service.state.state_room import StateRoom
from peerd.service.state.state_server import LAYOUT, Methods

Donors = Sequence[PeerId] | Callable[[], Sequence[PeerId]]
_LOOK_S = 3.0  # between two requests for more donors
_RELEASE_S = 10.0  # a later release is of little use: an idle copy is freed by then anyway
_LAYOUT_S = 30.0  # to get the layout of a state, besides the time for its bytes
_TELL_S = 10.0  # between two progress notes


class BegunDownload:
    """A state that is being fetched: memory for all of it, and the set of pieces that are there."""

    def __init__(self, claim: Claim, layout: StateLayout, folder: Path | None = None, needs_file: bool = False) -> None:
        """Allocate the memory; arguments as in `FetchPlan`. Raises OSError or OverflowError if there is not enough."""
        self.claim = claim
        self.layout = layout
        self.digests: memoryview | None = None  # of all pieces, once verified
        self.have: set[int] = set()
        self.room = StateRoom(layout.total_bytes, folder, needs_file)  # quick to allocate at any size

    @property
    def row(self) -> memoryview:
        """The tensors, one after the other, aligned."""
        return self.room.row

    def take_digests(self, digests: memoryview) -> bool:
        """Accept the digests of all pieces if their root is the claimed one. Returns whether it is."""
        right = self.layout.root(self.claim.position, digests) == self.claim.root
        if right:
            self.digests = digests
        return right

    def take(self, number: int, data: memoryview) -> bool:
        """Write a piece if its digest is right. Returns whether it is."""
        assert self.digests is not None
        at = number * DIGEST_BYTES
        if piece_digest(data) != self.digests[at : at + DIGEST_BYTES]:
            return False
        begin, end = self.layout.piece(number)
        self.row[begin:end] = data
        self.room.used(end - begin)
        return True


@dataclass(slots=True)
class FetchReport:
    """Figures of a download. Pieces are of STATE_PIECE_BYTES."""

    step: int = 0
    total_bytes: int = 0
    pieces: int = 0
    had: int = 0  # pieces from an earlier attempt
    by_donor: Counter[str] = field(default_factory=Counter)  # pieces that each donor sent
    asked: int = 0  # requests for pieces, including repeated and failed ones
    liars: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def received(self) -> int:
        """Bytes of the pieces that were received."""
        return min(self.total_bytes, sum(self.by_donor.values()) * STATE_PIECE_BYTES)

    def text(self) -> str:
        shares = ", ".join(f"{count} from {name[-6:]}" for name, count in self.by_donor.most_common())
        told = f"{self.total_bytes / 1e6:.1f} MB of step {self.step} in {self.seconds:.1f} s: {shares or 'nothing new'}"
        return told + (f", {self.had} pieces from earlier" if self.had else "")


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Settings of a download.

    `donors` returns the current donors; `chosen` is called with the chosen position, `notes` with texts on progress;
    `folder` is where the state is stored during the download, or None for memory alone. `needs_file`: fail if the
    folder has no space for the state, instead of using memory.
    """

    methods: Methods
    request: StateRequest
    layout: StateLayout
    donors: Callable[[], Sequence[PeerId]]
    worker: Worker
    notes: Callable[[str], None]
    chosen: Callable[[Position], None]
    folder: Path | None
    needs_file: bool
    all_have_it: bool  # all donors are known to have the state, even if they do not answer
    paces: BoundedDict[str, float]  # donor -> seconds per byte in earlier downloads; updated here


class StateFetch:
    """One attempt of a download. `begun` has the pieces received, also after a failure."""

    def __init__(self, rpc: Rpc, plan: FetchPlan, begun: BegunDownload | None, rng: Random) -> None:
        self.begun = begun
        self.report = FetchReport(pieces=plan.layout.pieces, total_bytes=plan.layout.total_bytes)
        self._rpc = rpc
        self._plan = plan
        self._piece_bytes = max(1, min(plan.layout.piece_bytes, plan.layout.total_bytes))
        kept = dl.PartialState(piece_s={name: pace * self._piece_bytes for name, pace in plan.paces.items()})
        if begun is not None and begun.digests is not None:
            kept.root, kept.have = begun.claim.root, begun.have
        now, known = trio.current_time(), plan.all_have_it
        self._machine = Download(now, plan.layout.pieces, rng, self._names(), kept, all_have_it=known)
        self._nursery: trio.Nursery | None = None
        self._timer = Timer(self._machine.wake_at, self._wake)
        self._scopes: dict[int, trio.CancelScope] = {}
        self._errors: dict[str, RemoteError] = {}
        self._last: dl.Downloaded | dl.GaveUp | None = None
        self._no_room: NoMemory | None = None

    def _names(self) -> list[str]:
        return [peer.text for peer in self._plan.donors()]

    async def run(self) -> BegunDownload:
        """Fetch the whole state, with each piece verified.

        Raises RemoteError if it cannot be fetched now, or NoMemory if there is no memory or disk space for it.
        """
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._wake()
            nursery.start_soon(self._look_for_donors)
            nursery.start_soon(self._tell)
            await self._timer.run()  # until `_perform` cancels the nursery
        self.report.seconds = trio.current_time() - began
        self._remember_paces()
        if self._no_room is not None:
            raise self._no_room
        if isinstance(self._last, dl.GaveUp):
            raise self._failure(self._last)
        assert self.begun is not None
        self._release()
        return self.begun

    def _wake(self) -> None:
        self._perform(self._machine.wake(trio.current_time()))

    def _release(self) -> None:
        """Release the donors' copies that we used: other callers may wait for the memory."""
        run = self._plan.request.run
        for name, claim in self._machine.claims().items():
            body = StateRelease(run, claim.root)
            self._rpc.tell(PeerId.parse(name), self._plan.methods.release, body, timeout_s=_RELEASE_S)

    def _remember_paces(self) -> None:
        """Store the donors' paces, so that the next download does not take a slow line for a failure."""
        measured = self._machine.piece_s().items()
        self._plan.paces.update({name: piece_s / self._piece_bytes for name, piece_s in measured})

    async def _look_for_donors(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            self._perform(self._machine.add(trio.current_time(), self._names()))

    async def _tell(self) -> None:
        """Report the progress regularly, for the user."""
        report = self.report
        while True:
            await trio.sleep(_TELL_S)
            if self.begun is None or self._machine.chosen is None:
                why = self._machine.undecided
                self._plan.notes("asking donors for their states" + (f": {why}" if why else ""))
                continue
            share, size = len(self.begun.have) / max(1, report.pieces), f"{report.total_bytes / 1e6:.1f} MB"
            self._plan.notes(f"{share:.0%} of {size} of step {report.step}, from {len(report.by_donor)} donors")

    # --- outputs ----------------------------------------------------------------------------------------------

    def _perform(self, outputs: list[dl.Output]) -> None:
        assert self._nursery is not None
        for output in outputs:
            match output:
                case dl.AskDonor():
                    self.report.asked += output.piece >= 0
                    self._nursery.start_soon(self._ask, output)
                case dl.Cancel(ask):
                    if ask in self._scopes:
                        self._scopes[ask].cancel()
                    else:
                        self._scopes[ask] = trio.CancelScope()  # its task has not started yet
                        self._scopes[ask].cancel()
                case dl.Chosen():
                    try:
                        self._begin(output)
                    except (OSError, OverflowError) as error:  # OverflowError: too large for any memory
                        self._no_room = self._lacking_room(error)
                        self._nursery.cancel_scope.cancel()
                        return
                case dl.BlameDonor(donor, why):
                    self.report.liars.append(donor)
                    self._plan.notes(f"donor {donor[-6:]} is not asked again: {why}")
                case dl.Downloaded() | dl.GaveUp():
                    self._last = output
                    self._nursery.cancel_scope.cancel()
        self._timer.rearm()

    def _begin(self, chosen: dl.Chosen) -> None:
        claim, layout = chosen.claim, self._plan.layout
        if self.begun is None or self.begun.claim != claim:
            self.begun = BegunDownload(claim, layout, self._plan.folder, self._plan.needs_file)
        self._plan.chosen(claim.position)
        self.report.step, self.report.had = claim.position.step, len(self.begun.have)
        size = f"{layout.total_bytes / 1e6:.1f} MB"
        there = f", {self.report.had} of {layout.pieces} pieces are there already" if self.report.had else ""
        self._plan.notes(f"fetching the state of step {claim.position.step}, {size}{there}: {chosen.why}")

    def _lacking_room(self, error: OSError | OverflowError) -> NoMemory:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        place = f"{self._plan.folder}: " if self._plan.folder is not None else ""
        return NoMemory(f"no room for a state of {self._plan.layout.total_bytes / 1e6:.1f} MB: {place}{reason}")

    async def _ask(self, ask: dl.AskDonor) -> None:
        event: dl.Event | None = None
        with self._scopes.setdefault(ask.ask, trio.CancelScope()):
            event = await self._answer(ask)
        del self._scopes[ask.ask]
        if event is not None:
            self._perform(self._machine.handle(trio.current_time(), event))

    async def _answer(self, ask: dl.AskDonor) -> dl.Event:
        """Send one request, and return its outcome as an event of the machine."""
        donor = PeerId.parse(ask.donor)
        try:
            if ask.piece == dl.MANIFEST:
                return dl.ClaimReceived(ask.ask, await self._claim(donor, ask))
            if ask.piece == dl.DIGESTS:
                await self._fetch_digests(donor, ask.timeout_s)
            else:
                await self._fetch_piece(donor, ask)
                self.report.by_donor[ask.donor] += 1
            return dl.Arrived(ask.ask)
        except RemoteError as error:
            self._errors[ask.donor] = error
            text = str(error.args[0])
            if isinstance(error, ProtocolViolation):
                return dl.Wrong(ask.ask, text)
            if isinstance(error, Overloaded):
                return dl.DonorFailed(ask.ask, text, retry_after_s=error.retry_after_s)
            return dl.DonorFailed(ask.ask, text, gone=isinstance(error, Refused))

    # --- calls ------------------------------------------------------------------------------------------------

    async def _claim(self, donor: PeerId, ask: dl.AskDonor) -> Claim:
        methods = self._plan.methods
        request = msgspec.structs.replace(self._plan.request, meet=ask.meet)
        answer = await self._rpc.call(
            donor, methods.manifest, request, StateManifest, timeout_s=ask.timeout_s, reply_frame_bytes=0
        )
        if answer.body.layout != self._plan.layout.digest:
            raise ProtocolViolation("the state offered does not fit this stage: other names, dtypes or shapes", donor)
        asked, found = request.of, answer.body.position
        fits = asked is None or (found.step == asked.step + methods.ahead if methods.ahead else found == asked)
        if not fits:
            raise ProtocolViolation(f"the state offered is of step {found.step}, which was not requested", donor)
        return Claim(found, answer.body.root)

    async def _fetch_digests(self, donor: PeerId, timeout_s: float) -> None:
        begun = self.begun
        assert begun is not None
        shape = (begun.layout.pieces, DIGEST_BYTES)
        answer = await self._rpc.call(
            donor,
            self._plan.methods.digests,
            StateDigests(self._plan.request.run, begun.claim.root),
            Empty,
            timeout_s=timeout_s,
            reply_frame_bytes=shape[0] * shape[1],
        )
        digests = _bytes_of(answer.frames, shape, donor)
        if not await self._plan.worker.run(partial(begun.take_digests, digests), name="check the digests of the state"):
            raise ProtocolViolation("the digests of the state have the wrong digest", donor)

    async def _fetch_piece(self, donor: PeerId, ask: dl.AskDonor) -> None:
        begun = self.begun
        assert begun is not None
        begin, end = begun.layout.piece(ask.piece)
        answer = await self._rpc.call(
            donor,
            self._plan.methods.piece,
            StatePiece(self._plan.request.run, begun.claim.root, ask.piece),
            Empty,
            timeout_s=ask.timeout_s,
            reply_frame_bytes=end - begin,
        )
        data = _bytes_of(answer.frames, (end - begin,), donor)
        if not await self._plan.worker.run(partial(begun.take, ask.piece, data), name="check a piece of the state"):
            raise ProtocolViolation(f"piece {ask.piece} of the state has the wrong digest", donor)
        begun.have.add(ask.piece)

    def _failure(self, last: dl.GaveUp) -> RemoteError:
        """The error for the caller: of the donors' own kind if all that failed agree, else Unreachable."""
        kinds = {type(error) for error in self._errors.values()}
        peer = next(iter(self._errors.values())).peer if len(self._errors) == 1 else None
        if last.moved_on:
            return Refused(f"the donors have dropped that state, the swarm has moved on: {last.why}", peer)
        for kind in (ProtocolViolation, Refused, TooSlow):
            if kinds == {kind}:
                return kind(last.why, peer)
        return Unreachable(last.why, peer)


async def fetch_layout(rpc: Rpc, donor: PeerId, request: StateRequest, wanted: tuple[bytes, int]) -> list[TensorSpec]:
    """Fetch the layout of a state, for a caller without a model. Raises RemoteError if `donor` has no such layout.

    `wanted`: digest and length of the layout's text, from the run file.
    """
    digest, size = wanted
    timeout_s = _LAYOUT_S + size / RPC_LEAST_BYTES_PER_S
    answer = await rpc.call(donor, LAYOUT, request, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
    try:
        return read_layout(_bytes_of(answer.frames, (size,), donor), digest)
    except ValueError as error:
        raise ProtocolViolation(str(error), donor) from None


def _bytes_of(frames: Sequence[TensorFrame], shape: tuple[int, ...], donor: PeerId) -> memoryview:
    """The payload of the answer's only frame, if it has the requested form. Raises ProtocolViolation otherwise."""
    frame = frames[0] if len(frames) == 1 else None
    if frame is None or (frame.dtype, frame.shape, frame.coding) != ("uint8", shape, "none") or frame.lossless:
        raise ProtocolViolation(f"a part of a state must be one uint8 frame of shape {list(shape)}", donor)
    return memoryview(frame.payload)
