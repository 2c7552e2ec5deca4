"""Coding at a stage's boundary: decodes incoming tensors; encodes outputs and gradients to be sent.

Runs on a thread of its own, never on the device's. Decoded tensors are larger than their frames, so only a few calls
may have theirs decoded at a time. The others wait with their frames, in the order of `FairTurns`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio
from torch import Tensor

from peerd.codec.async_codec import AsyncCodec
from peerd.codec.format.blockwise import CODES
from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode
from peerd.codec.kernels.ops import described
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.model.stage.microbatch_books import StageOutcome
from peerd.pipeline.routes.fair_turns import FairTurns, Turn
from peerd.role.role import RoleContext
from peerd.run.runfile import RunFile

_DECODED_CALLS: Final = 4  # enough to keep the device busy


class DecodedRoom:
    """Lets at most `places` calls have decoded tensors, in the order of `FairTurns`; at most one is an evaluation."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._turns = FairTurns()
        self._called: dict[int, tuple[trio.Event, bool]] = {}  # ticket -> (place assigned, is an evaluation)
        self._evaluates = False  # an evaluation has a place

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a place."""
        return len(self._turns)

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Wait for a place, and occupy it until the block ends."""
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
            if called.is_set():  # the place was assigned after the cancellation
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
    """Encodes and decodes the tensors of one post. Start `run` before using it."""

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
        """Tensor name -> the coding last used for it, with the reason."""
        return self._coder.choices

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Encode and decode tensors until cancelled."""
        await self._note_slow_kernels()
        await self._coder.run(task_status=task_status)

    async def decode(self, peer: PeerId, frames: Sequence[TensorFrame], *names: str) -> list[Tensor]:
        """Decode the tensors that `peer` sent. Raises ProtocolViolation, which names the peer, if one is malformed."""
        if len(frames) != len(names):
            raise ProtocolViolation(f"the call has {len(frames)} frames; expected {len(names)}", peer)
        try:
            return await self._coder.decode(frames, names)
        except ProtocolViolation as error:
            raise error.blame(peer) from None

    async def examine(self, peer: PeerId, frame: TensorFrame, name: str, check: Callable[[Tensor], None]) -> None:
        """Check a tensor of `peer` that is only forwarded. A ValueError of `check` becomes a ProtocolViolation of that
        peer.
        """

        def job() -> None:
            check(decode(frame, name=name))

        try:
            await self._worker.run(job, name=f"check {name}")
        except ProtocolViolation as error:
            raise error.blame(peer) from None
        except ValueError as error:
            raise ProtocolViolation(str(error), peer) from None

    async def encode(self, outcome: StageOutcome, name: str, line_bytes_per_s: float = 0.0) -> tuple[TensorFrame, ...]:
        """Encode an outcome's tensor, if it has one, for the slowest link on its route; returns its frames.

        The frame is stored in the outcome, so that a repeated call does not encode it again.
        """
        if isinstance(outcome.answer, Tensor):
            outcome.answer = await self._coder.encode(outcome.answer, name=name, rate_bytes_per_s=line_bytes_per_s)
        return (outcome.answer,) if isinstance(outcome.answer, TensorFrame) else ()

    async def _note_slow_kernels(self) -> None:
        """Log once if this machine lacks fast kernels for the run's codes."""
        boundary, averaging = self._run.pipeline.boundary.code, self._run.averaging.code
        devices = {self._ctx.device: boundary in CODES or boundary == "auto"}
        devices["cpu"] = devices.get("cpu", False) or averaging in CODES
        for device in (device for device, codes in devices.items() if codes):
            look: Callable[[], tuple[str, str]] = partial(described, device)
            by, reason = await self._worker.run(look, name="look for kernels")
            if reason:
                self._ctx.log.event("coding.slow", level="warning", device=device, by=by, reason=reason)
