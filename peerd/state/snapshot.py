"""State download, both sides: serves this peer's state to newcomers, and fetches a state from several donors at once.

Totals of steps (`state/catchup/step_totals`) and kept checkpoints (`state/checkpoints/keeper`) are transferred in
the same way.

A fetched state is complete, and matches the digests on which the largest group of donors agrees (at least two donors,
if two answer). The caller applies it, or gets an error. The pieces of a failed attempt stay in memory, for one state,
and the next attempt at the same state continues from there. Donors that sent wrong data are not asked for 10 minutes.
`state_server` has the server side; `piece_fetch` drives `state/download`, which decides what to ask of which
donor. The receiver's own layout alone determines the size of the memory. If a folder is given, the memory is a file
there, so that the system may page it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import NoMemory, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS, RPC_LEAST_BYTES_PER_S
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
    read_layout,
)
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Rpc
from peerd.state import download_events as dl
from peerd.state.download import Download
from peerd.state.piece_fetch import BegunDownload, FetchReport, PieceFetch, Shunned, bytes_of
from peerd.state.quorum import Claim
from peerd.state.state_room import StateRoom
from peerd.state.state_server import KEPT, LAYOUT, STATE, Methods, StateServer

__all__ = [
    "KEPT",
    "Donors",
    "Fetched",
    "SnapshotFetcher",
    "Snapshots",
    "StateItem",
    "StateServer",
]

Donors = Sequence[PeerId] | Callable[[], Sequence[PeerId]]
_LOOK_S = 3.0  # between two requests for more donors
_RELEASE_S = 10.0  # a later release is of little use: an idle copy is freed by then anyway
_LAYOUT_S = 30.0  # to get the layout of a state, besides the time for its bytes
_TELL_S = 10.0  # between two progress notes


class Fetched(NamedTuple):
    """A complete fetched state; `items` are views of the memory of `room`."""

    position: Position
    items: list[StateItem]
    room: StateRoom


class BegunState(BegunDownload):
    """A state that is being fetched: memory for all of it, and the set of pieces that are there."""

    def __init__(self, claim: Claim, layout: StateLayout, folder: Path | None = None, needs_file: bool = False) -> None:
        """Allocate the memory (see `SnapshotFetcher`). Raises OSError or OverflowError if there is not enough."""
        self.claim = claim
        self.layout = layout
        room = self.room = StateRoom(layout.total_bytes, folder, needs_file)  # quick to allocate at any size

        def write(number: int, data: memoryview) -> None:  # not a method: in a cycle, the memory would be freed late
            begin, end = layout.piece(number)
            room.row[begin:end] = data
            room.used(end - begin)

        super().__init__(layout, claim.root, partial(layout.root, claim.position), write)

    @property
    def row(self) -> memoryview:
        """The tensors, one after the other, aligned."""
        return self.room.row


class SnapshotFetcher:
    """The client side: one download at a time."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, methods: Methods = STATE) -> None:
        """`rng` chooses the donor of the digests among equals, and the times when busy donors are asked again."""
        self.notes: Callable[[str], None] = lambda _: None  # called with texts on the progress of a download
        self.chosen: Callable[[Position], None] = lambda _: None  # called with the position, once it is chosen
        self.folder: Path | None = None  # where the state is stored during a download, or None for memory alone
        self.needs_file = False  # a fetch fails if the folder has no space, instead of using memory
        self.report: FetchReport | None = None  # of the newest download
        self.rpc, self.methods = rpc, methods
        self.rng = rng or Random(0)
        self._lock = trio.Lock()
        self._begun: BegunState | None = None  # pieces of a failed attempt
        self.shunned = Shunned()
        self.paces = BoundedDict[str, float](LINKS)  # donor -> seconds per byte in earlier downloads

    async def fetch(
        self, donors: Donors, request: StateRequest, expected: Sequence[TensorSpec | StateItem], worker: Worker
    ) -> Fetched:
        """Fetch the whole state that most of `donors` vouch for.

        Raises RemoteError if it cannot be fetched now, or NoMemory if there is no memory or disk space for it.

        `donors`: peers, or a function that returns the current donors and is called repeatedly during the download. The
        peers that it returns are known to have the state, so if there are several, one that answers alone is not
        trusted. `expected`: name, dtype and shape of each tensor, in the donors' order.
        """
        layout = StateLayout(expected)
        async with self._lock:
            # Not stored in `self` meanwhile: if another state is chosen, this one's memory is freed at once.
            fetching = StateFetch(self, request, layout, donors, worker, self._take_kept(layout))
            self.report = fetching.report
            try:
                begun = await fetching.fetched()
            finally:
                self._begun = fetching.begun
                self.shunned.add(fetching.report.liars)
            self._begun = None  # now owned by the caller
            self.notes(fetching.report.text())
            parts = zip(layout.tensors, layout.views(begun.row), strict=True)
            items = [StateItem(t.name, t.dtype, t.shape, view) for t, view in parts]
            return Fetched(begun.claim.position, items, begun.room)

    async def layout(self, donor: PeerId, request: StateRequest, wanted: tuple[bytes, int]) -> list[TensorSpec]:
        """Fetch the layout of a state, for a caller without a model. Raises RemoteError if `donor` has no such layout.

        `wanted`: digest and length of the layout's text, from the run file.
        """
        digest, size = wanted
        timeout_s = _LAYOUT_S + size / RPC_LEAST_BYTES_PER_S
        answer = await self.rpc.call(donor, LAYOUT, request, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
        try:
            return read_layout(bytes_of(answer.frames, (size,), donor), digest)
        except ValueError as error:
            raise ProtocolViolation(str(error), donor) from None

    def _take_kept(self, layout: StateLayout) -> BegunState | None:
        begun, self._begun = self._begun, None
        return begun if begun is not None and begun.layout.digest == layout.digest else None

    def honest(self, donors: Donors) -> list[str]:
        """The donors that have not sent wrong data lately."""
        return self.shunned.honest(donors() if callable(donors) else donors)


class StateFetch(PieceFetch[BegunState]):
    """One attempt to fetch a state."""

    def __init__(
        self,
        fetcher: SnapshotFetcher,
        request: StateRequest,
        layout: StateLayout,
        donors: Donors,
        worker: Worker,
        begun: BegunState | None,
    ) -> None:
        self._fetcher, self._request, self._layout, self._donors = fetcher, request, layout, donors
        self._piece_bytes = max(1, min(layout.piece_bytes, layout.total_bytes))
        kept = dl.PartialState(piece_s={name: pace * self._piece_bytes for name, pace in fetcher.paces.items()})
        if begun is not None and begun.digests is not None:
            kept.root, kept.have = begun.root, begun.have
        known = callable(donors) and request.of is None  # not every donor has an old total or checkpoint
        names = fetcher.honest(donors)
        machine = Download(trio.current_time(), layout.pieces, fetcher.rng, names, kept, all_have_it=known)
        super().__init__("the state", layout, machine, worker, begun)

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
        run = self._request.run
        for name, claim in self._machine.claims().items():
            body = StateRelease(run, claim.root)
            self._fetcher.rpc.tell(PeerId.parse(name), self._fetcher.methods.release, body, timeout_s=_RELEASE_S)

    def _remember_paces(self) -> None:
        """Store the donors' paces, so that the next download does not mistake a slow connection for a failure."""
        measured = self._machine.piece_s().items()
        self._fetcher.paces.update({name: piece_s / self._piece_bytes for name, piece_s in measured})

    async def _look_for_donors(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            self._perform(self._machine.add(trio.current_time(), self._fetcher.honest(self._donors)))

    async def _tell(self) -> None:
        """Report the progress regularly, for the user."""
        report = self.report
        while True:
            await trio.sleep(_TELL_S)
            if self.begun is None or self._machine.chosen is None:
                why = self._machine.undecided
                self._fetcher.notes("asking donors for their states" + (f": {why}" if why else ""))
                continue
            share, size = len(self.begun.have) / max(1, report.pieces), f"{report.total_bytes / 1e6:.1f} MB"
            self._fetcher.notes(f"{share:.0%} of {size} of step {report.step}, from {len(report.by_donor)} donors")

    def _begin(self, chosen: dl.Chosen) -> None:
        claim, layout = chosen.claim, self._layout
        if self.begun is None or self.begun.claim != claim:
            try:
                self.begun = BegunState(claim, layout, self._fetcher.folder, self._fetcher.needs_file)
            except (OSError, OverflowError) as error:  # OverflowError: too large for any memory
                raise self._lacking_room(error) from error
        self._fetcher.chosen(claim.position)
        self.report.step, self.report.had = claim.position.step, len(self.begun.have)
        size = f"{layout.total_bytes / 1e6:.1f} MB"
        there = f", {self.report.had} of {layout.pieces} pieces are there already" if self.report.had else ""
        self._fetcher.notes(f"fetching the state of step {claim.position.step}, {size}{there}: {chosen.why}")

    def _lacking_room(self, error: OSError | OverflowError) -> NoMemory:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        place = f"{self._fetcher.folder}: " if self._fetcher.folder is not None else ""
        return NoMemory(f"no space for a state of {self._layout.total_bytes / 1e6:.1f} MB: {place}{reason}")

    def _blamed(self, donor: str, why: str) -> None:
        self._fetcher.notes(f"donor {donor[-6:]} is not asked again: {why}")

    # --- calls ------------------------------------------------------------------------------------------------

    async def _answer(self, donor: PeerId, ask: dl.AskDonor) -> dl.Event:
        if ask.piece == dl.MANIFEST:
            return dl.ClaimReceived(ask.ask, await self._claim(donor, ask))
        return await super()._answer(donor, ask)

    async def _claim(self, donor: PeerId, ask: dl.AskDonor) -> Claim:
        methods = self._fetcher.methods
        request = msgspec.structs.replace(self._request, meet=ask.meet)
        answer = await self._fetcher.rpc.call(
            donor, methods.manifest, request, StateManifest, timeout_s=ask.timeout_s, reply_frame_bytes=0
        )
        if answer.body.layout != self._layout.digest:
            raise ProtocolViolation("the state offered does not fit this stage: other names, dtypes or shapes", donor)
        asked, found = request.of, answer.body.position
        fits = asked is None or (found.step == asked.step + methods.ahead if methods.ahead else found == asked)
        if not fits:
            raise ProtocolViolation(f"the state offered is of step {found.step}, which was not requested", donor)
        return Claim(found, answer.body.root)

    async def _get(self, donor: PeerId, number: int, timeout_s: float) -> memoryview:
        begun, methods, run = self.begun, self._fetcher.methods, self._request.run
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
        answer = await self._fetcher.rpc.call(donor, method, body, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
        return bytes_of(answer.frames, shape, donor)


class Snapshots(SnapshotFetcher):
    """Both sides of state transfer. `totals` fetches the totals of steps, even while a state is fetched."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, giving: StateServer | None = None) -> None:
        """`giving`: a server that several stages of this peer share."""
        super().__init__(rpc, rng)
        self.giving = giving if giving is not None else StateServer(rpc)
        self.totals = SnapshotFetcher(rpc, rng)
        self.totals.shunned = self.shunned  # a donor that lies about one thing is not asked for another
        self.totals.paces = self.paces
