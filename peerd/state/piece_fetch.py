"""Download of a byte array in pieces from several peers at once: drives one `state/download` over calls.

The worker hashes each piece and writes it only if its digest is right. Written pieces stay in the `BegunDownload`, also
after a failure. States (`state/snapshot`) and experts' checkpoints (`experts/calls/vault_fetch`) differ in
the calls and in the destination of the pieces. A hostile donor may send other bytes, frames or digests than it vouched
for: it is named, and its data is discarded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import (
    NoMemory,
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
    Untrusted,
)
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS, STATE_PIECE_BYTES
from peerd.core.work import Worker
from peerd.messages.state import Pieces
from peerd.state import download_events as dl
from peerd.state.download import Download
from peerd.wire.rate.suspicion import Suspicion
from peerd.wire.timer import Timer

Write = Callable[[int, memoryview], None]
_SHUN_S: Final = 600.0  # time for which a donor that sent wrong data is not asked


class BegunDownload:
    """A byte array that is being fetched, and the set of pieces that are there. Methods are called on the worker."""

    def __init__(self, pieces: Pieces, root: bytes, root_of: Callable[[memoryview], bytes], write: Write) -> None:
        """`root`: root digest of the wanted array, which `root_of` computes from the digests of all pieces. `write`
        stores a piece that was checked, or raises OSError.
        """
        self.pieces, self.root = pieces, root
        self.digests: memoryview | None = None  # of all pieces, once verified
        self.have: set[int] = set()
        self._root_of, self._write = root_of, write

    def take_digests(self, digests: memoryview) -> bool:
        """Accept the digests of all pieces if their root is the claimed one. Returns whether it is."""
        right = self._root_of(digests) == self.root
        if right:
            self.digests = digests
        return right

    def take(self, number: int, data: memoryview) -> bool:
        """Write a piece if its digest is right. Returns whether it is."""
        assert self.digests is not None
        right = self.pieces.is_right(number, data, self.digests)
        if right:
            self._write(number, data)
        return right


@dataclass(slots=True)
class FetchReport:
    """Figures of a download. Pieces are STATE_PIECE_BYTES long."""

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


class Shunned:
    """Donors that sent wrong data, which are not asked for some time: for `what` only, if it is given."""

    def __init__(self) -> None:
        self._liars = Suspicion[tuple[str, bytes]](_SHUN_S, _SHUN_S, LINKS)

    def honest(self, donors: Iterable[PeerId], what: bytes = b"") -> list[str]:
        """Those of `donors` that have not sent wrong data lately."""
        now = trio.current_time()
        return [peer.text for peer in dict.fromkeys(donors) if not self._liars.is_aside(now, (peer.text, what))]

    def add(self, liars: Iterable[str], what: bytes = b"") -> None:
        """Add donors that sent wrong data now."""
        for name in liars:
            self._liars.failed(trio.current_time(), (name, what))


B = TypeVar("B", bound=BegunDownload)


class PieceFetch(ABC, Generic[B]):
    """One attempt of a download. `begun` has the pieces received, also after a failure."""

    def __init__(self, what: str, pieces: Pieces, machine: Download, worker: Worker, begun: B | None) -> None:
        """`what` names the byte array in errors."""
        self.begun = begun
        self.report = FetchReport(pieces=pieces.pieces, total_bytes=pieces.total_bytes)
        self._what, self._machine, self._worker = what, machine, worker
        self._nursery: trio.Nursery | None = None
        self._timer = Timer(machine.wake_at, self._wake)
        self._scopes: dict[int, trio.CancelScope] = {}
        self._errors: dict[str, RemoteError] = {}
        self._last: dl.Downloaded | dl.GaveUp | None = None
        self._broken: NoMemory | OSError | None = None  # failure of this side

    # --- what differs -----------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, chosen: dl.Chosen) -> None:
        """Set `begun` to a download of the chosen array. Raises NoMemory if there is no memory or disk space."""

    @abstractmethod
    async def _get(self, donor: PeerId, number: int, timeout_s: float) -> memoryview:
        """Call a donor for a piece or, with DIGESTS, for the digests of all pieces. Checks the size alone."""

    def _blamed(self, donor: str, why: str) -> None:
        """Called for a donor that sent wrong data."""

    # --- the attempt ------------------------------------------------------------------------------------------

    async def run(self, *beside: Callable[[], Awaitable[None]]) -> B:
        """Fetch the whole array, with each piece verified, and run `beside` meanwhile.

        Raises RemoteError if it cannot be fetched now, NoMemory if there is no memory or disk space for it,
        or OSError if writing fails.
        """
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._wake()
            for task in beside:
                nursery.start_soon(task)
            await self._timer.run()  # until the nursery is cancelled
        self.report.seconds = trio.current_time() - began
        if self._broken is not None:
            raise self._broken
        if isinstance(self._last, dl.GaveUp):
            raise self._failure(self._last)
        assert self.begun is not None
        return self.begun

    def _wake(self) -> None:
        self._perform(self._machine.wake(trio.current_time()))

    def _perform(self, outputs: list[dl.Output]) -> None:
        assert self._nursery is not None
        for output in outputs:
            match output:
                case dl.AskDonor():
                    self.report.asked += output.piece >= 0
                    self._nursery.start_soon(self._ask, output)
                case dl.Cancel(ask):
                    self._scopes.setdefault(ask, trio.CancelScope()).cancel()  # its task may not have started yet
                case dl.Chosen():
                    try:
                        self._begin(output)
                    except (NoMemory, OSError) as error:
                        self._break(error)
                        return
                case dl.BlameDonor(donor, why):
                    self.report.liars.append(donor)
                    self._blamed(donor, why)
                case dl.Downloaded() | dl.GaveUp():
                    self._last = output
                    self._nursery.cancel_scope.cancel()
        self._timer.rearm()

    def _break(self, error: NoMemory | OSError) -> None:
        assert self._nursery is not None
        self._broken = error
        self._nursery.cancel_scope.cancel()

    async def _ask(self, ask: dl.AskDonor) -> None:
        event: dl.Event | None = None
        with self._scopes.setdefault(ask.ask, trio.CancelScope()):
            try:
                event = await self._outcome(ask)
            except OSError as error:  # the piece could not be written
                self._break(error)
        del self._scopes[ask.ask]
        if event is not None:
            self._perform(self._machine.handle(trio.current_time(), event))

    async def _outcome(self, ask: dl.AskDonor) -> dl.Event:
        """Send one request, and return its outcome as an event of the machine."""
        try:
            return await self._answer(PeerId.parse(ask.donor), ask)
        except RemoteError as error:
            self._errors[ask.donor] = error
            text = str(error.args[0])
            if isinstance(error, ProtocolViolation):
                return dl.Wrong(ask.ask, text)
            if isinstance(error, Overloaded):
                return dl.DonorFailed(ask.ask, text, retry_after_s=error.retry_after_s)
            return dl.DonorFailed(ask.ask, text, gone=isinstance(error, Refused))

    async def _answer(self, donor: PeerId, ask: dl.AskDonor) -> dl.Event:
        """Get a piece or the digests, and take them if they are right."""
        begun, number, what = self.begun, ask.piece, self._what
        assert begun is not None
        data = await self._get(donor, number, ask.timeout_s)
        if number == dl.DIGESTS:
            if not await self._worker.run(partial(begun.take_digests, data), name=f"check the digests of {what}"):
                raise ProtocolViolation(f"the digests of {what} have the wrong digest", donor)
        else:
            if not await self._worker.run(partial(begun.take, number, data), name=f"check a piece of {what}"):
                raise ProtocolViolation(f"piece {number} of {what} has the wrong digest", donor)
            begun.have.add(number)
            self.report.by_donor[ask.donor] += 1
        return dl.Arrived(ask.ask)

    def _failure(self, last: dl.GaveUp) -> RemoteError:
        """The error for the caller: of the donors' own kind if all that failed agree, else Unreachable."""
        kinds = {type(error) for error in self._errors.values()}
        if self._machine.unanswered:
            kinds.add(TooSlow)
        peer = next(iter(self._errors.values())).peer if len(self._errors) == 1 else None
        if last.moved_on:
            return Refused(f"the donors have dropped that state, the swarm has moved on: {last.why}", peer)
        for kind in (ProtocolViolation, Refused, TooSlow, Untrusted):
            if kinds == {kind}:
                return kind(last.why, peer)
        return Unreachable(last.why, peer)


def bytes_of(frames: Sequence[TensorFrame], shape: tuple[int, ...], donor: PeerId) -> memoryview:
    """The payload of an answer's only frame, if it has the requested form. Raises ProtocolViolation otherwise."""
    frame = frames[0] if len(frames) == 1 else None
    if frame is None or (frame.dtype, frame.shape, frame.coding) != ("uint8", shape, "none") or frame.lossless:
        raise ProtocolViolation(f"a part of a state must be one uint8 frame of shape {list(shape)}", donor)
    return memoryview(frame.payload)
