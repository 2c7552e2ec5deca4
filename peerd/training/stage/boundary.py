"""Coding at a stage's boundary: decodes tensors on their way in, codes outputs and gradients on the way out.

Decodes and codes on a thread of its own, never on the device's. Tensors are larger than the frames they come in, so
only a few calls may have theirs decoded at a time; the others wait with their frames, in the order of `FairTurns`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio
from torch import Tensor

from peerd.compute.codec.async_codec import AsyncCodec
from peerd.compute.codec.frames import decode
from peerd.compute.kernels.ops import described
from peerd.compute.model.served_stage import StageOutcome
from peerd.core.blockwise import CODES
from peerd.core.errors import ProtocolViolation
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.run.runfile import RunFile
from peerd.machine.pipeline.fair_turns import FairTurns, Turn
from peerd.role import RoleContext

_DECODED_CALLS: Final = 4  # enough that the device never waits for the next one


class DecodedRoom:
    """`places` for calls with decoded tensors, given in `FairTurns`' order; at most one of them to an evaluation."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._turns = FairTurns()
        self._called: dict[int, tuple[trio.Event, bool]] = {}  # by ticket: set when the place is given; an evaluation
        self._evaluates = False  # an evaluation has a place

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self._turns)

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """A place, for as long as the context lasts."""
        ticket, called = self._turns.ask(turn), trio.Event()
        self._called[ticket] = called, turn.evaluates
        self._give()
        if not called.is_set():
            await self._wait(ticket, turn, called)
        try:
            yield
        finally:
            self._pass_on(turn)

    async def _wait(self, ticket: int, turn: Turn, called: trio.Event) -> None:
        try:
            await called.wait()
        except trio.Cancelled:
            if called.is_set():  # the place was given to us when we had been cancelled, and not run since
                self._pass_on(turn)
            else:
                del self._called[ticket]
                self._turns.give_back(ticket)
            raise

    def _pass_on(self, turn: Turn) -> None:
        self._free += 1
        self._evaluates = self._evaluates and not turn.evaluates
        self._give()

    def _give(self) -> None:
        while self._free and (ticket := self._turns.pop(may_evaluate=not self._evaluates)) is not None:
            self._free -= 1
            called, evaluates = self._called.pop(ticket)
            self._evaluates = self._evaluates or evaluates
            called.set()


class Boundary:
    """The boundary of one post; nothing passes before `run` has started."""

    def __init__(self, ctx: RoleContext, run: RunFile) -> None:
        self._ctx = ctx
        self._run = run
        self._worker = ctx.worker("coding")
        self._coder = AsyncCodec(self._worker, run.pipeline.boundary, ctx.device)
        self.room = DecodedRoom(
            _DECODED_CALLS
        )  # held from before a call's tensors are decoded until its answer is coded

    @property
    def choices(self) -> dict[str, str]:
        """Tensor -> the coding that it last travelled in, with the reason."""
        return self._coder.choices

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Code until cancelled."""
        await self._note_slow_kernels()
        await self._coder.run(task_status=task_status)

    async def decode(self, peer: PeerId, frames: Sequence[TensorFrame], *names: str) -> list[Tensor]:
        """The tensors of `peer`, decoded; ProtocolViolation of that peer when they are malformed."""
        if len(frames) != len(names):
            raise ProtocolViolation(f"the call has {len(frames)} frames; expected {len(names)}", peer)
        try:
            return await self._coder.decode(frames, names)
        except ProtocolViolation as error:
            raise error.blame(peer) from None

    async def examine(self, peer: PeerId, frame: TensorFrame, name: str, check: Callable[[Tensor], None]) -> None:
        """Have a tensor of `peer` checked that is only handed on; ProtocolViolation of that peer on its ValueError."""

        def job() -> None:
            check(decode(frame, name=name))

        try:
            await self._worker.run(job, name=f"check {name}")
        except ProtocolViolation as error:
            raise error.blame(peer) from None
        except ValueError as error:
            raise ProtocolViolation(str(error), peer) from None

    async def encode(self, outcome: StageOutcome, name: str, line_bytes_per_s: float = 0.0) -> tuple[TensorFrame, ...]:
        """The frame of an outcome, if it has any, coded for the slowest line that it has to pass.

        A repeat finds it coded.
        """
        if isinstance(outcome.answer, Tensor):
            outcome.answer = await self._coder.encode(outcome.answer, name=name, rate_bytes_per_s=line_bytes_per_s)
        return (outcome.answer,) if isinstance(outcome.answer, TensorFrame) else ()

    async def _note_slow_kernels(self) -> None:
        """Log once that this machine lacks the fast kernels for the run's codes."""
        boundary, averaging = self._run.pipeline.boundary.code, self._run.averaging.code
        devices = {self._ctx.device: boundary in CODES or boundary == "auto"}
        devices["cpu"] = devices.get("cpu", False) or averaging in CODES
        for device in (device for device, codes in devices.items() if codes):
            look: Callable[[], tuple[str, str]] = partial(described, device)
            by, reason = await self._worker.run(look, name="look for kernels")
            if reason:
                self._ctx.log.event("coding.slow", level="warning", device=device, by=by, reason=reason)
