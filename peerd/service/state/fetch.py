"""Client side of state download: a `PieceFetch` into memory allocated in advance.

The receiver's own layout alone determines the size of the memory. If a folder is given, the memory is a file there, so
that the system may page it out. Written pieces are kept for the next attempt (`BegunState`). The caller applies the
state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import NoMemory, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S
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
    read_layout,
)
from peerd.core.messages.swarm import Position
from peerd.core.work import Worker
from peerd.machine.state import download_events as dl
from peerd.machine.state.download import Download
from peerd.machine.state.quorum import Claim
from peerd.service.rpc.rpc import Rpc
from peerd.service.state.piece_fetch import BegunDownload, PieceFetch, bytes_of
from peerd.service.state.state_room import StateRoom
from peerd.service.state.state_server import LAYOUT, Methods

Donors = Sequence[PeerId] | Callable[[], Sequence[PeerId]]
_LOOK_S = 3.0  # between two requests for more donors
_RELEASE_S = 10.0  # a later release is of little use: an idle copy is freed by then anyway
_LAYOUT_S = 30.0  # to get the layout of a state, besides the time for its bytes
_TELL_S = 10.0  # between two progress notes


class BegunState(BegunDownload):
    """A state that is being fetched: memory for all of it, and the set of pieces that are there."""

    def __init__(self, claim: Claim, layout: StateLayout, folder: Path | None = None, needs_file: bool = False) -> None:
        """Allocate the memory; arguments as in `FetchPlan`. Raises OSError or OverflowError if there is not enough."""
        super().__init__(layout, claim.root)
        self.claim = claim
        self.layout = layout
        self.room = StateRoom(layout.total_bytes, folder, needs_file)  # quick to allocate at any size

    @property
    def row(self) -> memoryview:
        """The tensors, one after the other, aligned."""
        return self.room.row

    def root_of(self, digests: memoryview) -> bytes:
        return self.layout.root(self.claim.position, digests)

    def write(self, number: int, data: memoryview) -> None:
        begin, end = self.layout.piece(number)
        self.row[begin:end] = data
        self.room.used(end - begin)


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


class StateFetch(PieceFetch[BegunState]):
    """One attempt to fetch a state."""

    def __init__(self, rpc: Rpc, plan: FetchPlan, begun: BegunState | None, rng: Random) -> None:
        self._rpc = rpc
        self._plan = plan
        self._piece_bytes = max(1, min(plan.layout.piece_bytes, plan.layout.total_bytes))
        kept = dl.PartialState(piece_s={name: pace * self._piece_bytes for name, pace in plan.paces.items()})
        if begun is not None and begun.digests is not None:
            kept.root, kept.have = begun.root, begun.have
        now, known = trio.current_time(), plan.all_have_it
        machine = Download(now, plan.layout.pieces, rng, self._names(), kept, all_have_it=known)
        super().__init__("the state", plan.layout, machine, plan.worker, begun)

    def _names(self) -> list[str]:
        return [peer.text for peer in self._plan.donors()]

    async def fetched(self) -> BegunState:
        """Fetch the whole state; raises like `run`."""
        try:
            begun = await self.run(self._look_for_donors, self._tell)
        finally:
            self._remember_paces()
        self._release()
        return begun

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

    def _begin(self, chosen: dl.Chosen) -> None:
        claim, layout = chosen.claim, self._plan.layout
        if self.begun is None or self.begun.claim != claim:
            try:
                self.begun = BegunState(claim, layout, self._plan.folder, self._plan.needs_file)
            except (OSError, OverflowError) as error:  # OverflowError: too large for any memory
                raise self._lacking_room(error) from error
        self._plan.chosen(claim.position)
        self.report.step, self.report.had = claim.position.step, len(self.begun.have)
        size = f"{layout.total_bytes / 1e6:.1f} MB"
        there = f", {self.report.had} of {layout.pieces} pieces are there already" if self.report.had else ""
        self._plan.notes(f"fetching the state of step {claim.position.step}, {size}{there}: {chosen.why}")

    def _lacking_room(self, error: OSError | OverflowError) -> NoMemory:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        place = f"{self._plan.folder}: " if self._plan.folder is not None else ""
        return NoMemory(f"no room for a state of {self._plan.layout.total_bytes / 1e6:.1f} MB: {place}{reason}")

    def _blamed(self, donor: str, why: str) -> None:
        self._plan.notes(f"donor {donor[-6:]} is not asked again: {why}")

    # --- calls ------------------------------------------------------------------------------------------------

    async def _answer(self, donor: PeerId, ask: dl.AskDonor) -> dl.Event:
        if ask.piece == dl.MANIFEST:
            return dl.ClaimReceived(ask.ask, await self._claim(donor, ask))
        return await super()._answer(donor, ask)

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

    async def _get(self, donor: PeerId, number: int, timeout_s: float) -> memoryview:
        begun, methods, run = self.begun, self._plan.methods, self._plan.request.run
        assert begun is not None
        body: StateDigests | StatePiece
        if number == dl.DIGESTS:
            shape: tuple[int, ...] = (begun.layout.pieces, DIGEST_BYTES)
            method, body = methods.digests, StateDigests(run, begun.root)
        else:
            begin, end = begun.layout.piece(number)
            shape = (end - begin,)
            method, body = methods.piece, StatePiece(run, begun.root, number)
        size = math.prod(shape)
        answer = await self._rpc.call(donor, method, body, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
        return bytes_of(answer.frames, shape, donor)


async def fetch_layout(rpc: Rpc, donor: PeerId, request: StateRequest, wanted: tuple[bytes, int]) -> list[TensorSpec]:
    """Fetch the layout of a state, for a caller without a model. Raises RemoteError if `donor` has no such layout.

    `wanted`: digest and length of the layout's text, from the run file.
    """
    digest, size = wanted
    timeout_s = _LAYOUT_S + size / RPC_LEAST_BYTES_PER_S
    answer = await rpc.call(donor, LAYOUT, request, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
    try:
        return read_layout(bytes_of(answer.frames, (size,), donor), digest)
    except ValueError as error:
        raise ProtocolViolation(str(error), donor) from None
