"""Coding at a stage's boundary: decodes trainers' tensors on their way in, codes outputs and gradients on the way out.

Decodes and codes on a thread of its own, never on the device's. Tensors are larger than the frames they come in, so
only a few calls may have theirs decoded at a time; the others wait with their frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio
from torch import Tensor

from peerd.compute.codec.async_codec import Coder
from peerd.compute.kernels.ops import described
from peerd.compute.model.served_stage import StageOutcome
from peerd.core.blockwise import CODES
from peerd.core.errors import ProtocolViolation
from peerd.core.frame import TensorFrame
from peerd.core.messages.swarm import StageAnswer
from peerd.core.run.runfile import RunFile
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming

_DECODED_CALLS: Final = 4  # enough that the device never waits for the next one


class Boundary:
    """The boundary of one post; nothing passes before `run` has started."""

    def __init__(self, ctx: RoleContext, run: RunFile) -> None:
        self._ctx = ctx
        self._run = run
        self._worker = ctx.worker("coding")
        self._coder = Coder(self._worker, run.pipeline.boundary, ctx.device)
        self.room = trio.Semaphore(_DECODED_CALLS)  # held from before a call's tensors are decoded until it is answered

    @property
    def choices(self) -> dict[str, str]:
        """Tensor -> the coding that it last travelled in, with the reason."""
        return self._coder.choices

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Code until cancelled."""
        await self._note_slow_kernels()
        await self._coder.run(task_status=task_status)

    async def tensors(self, call: Incoming[Any], *names: str) -> list[Tensor]:
        """A trainer's tensors, decoded; ProtocolViolation of the trainer when they are malformed."""
        if len(call.frames) != len(names):
            raise ProtocolViolation(f"the call has {len(call.frames)} frames; expected {len(names)}", call.peer)
        try:
            return await self._coder.decode(call.frames, names)
        except ProtocolViolation as error:
            raise error.blame(call.peer) from None

    async def answer(
        self, call: Incoming[Any], outcome: StageOutcome, name: str, line_bytes_per_s: float = 0.0
    ) -> Answer[StageAnswer]:
        """Code the outcome for the slowest line that it has to pass. A repeat finds it coded."""
        if isinstance(outcome.answer, Tensor):
            outcome.answer = await self._coder.encode(outcome.answer, name=name, rate_bytes_per_s=line_bytes_per_s)
        frames = (outcome.answer,) if isinstance(outcome.answer, TensorFrame) else ()
        arrival = self._ctx.rpc.arrival_rate(call.peer) or 0.0
        return Answer(StageAnswer(outcome.loss_sum, outcome.seconds, arrival), frames)

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
