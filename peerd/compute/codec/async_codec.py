"""The tensor coder: makes frames of tensors and tensors of frames in a thread of its own.

Neither the trio loop nor the device's thread codes anything; what is small and came uncoded is a tensor as it is. A
large tensor is coded in chunks of about 1 MiB: its frame is there as soon as the first chunk is, and travels while the
others are made (`TensorFrame.ready`). How a tensor travels, its sender decides (`policy`); what arrives is checked
here, whatever its code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import trio
from torch import Tensor

from peerd.compute.codec.frames import FrameEncoder, begin, decode, sample_of
from peerd.compute.codec.policy import choose
from peerd.compute.tensors import dtype_name
from peerd.core.errors import LocalError, PeerdError
from peerd.core.frame import TensorFrame
from peerd.core.run.runfile import BoundarySection
from peerd.core.work import Worker

T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 18
_AT_ONCE: Final = 4  # small frames of a message


class Progress:
    """Number of a frame's payload bytes that are final: a `core.frame.Ready`."""

    def __init__(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self._failure: str | None = None
        self._waiting = trio.lowlevel.ParkingLot()

    def reached(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self._waiting.unpark_all()

    def fail(self, reason: str) -> None:
        """Fail the frame: the rest will never be made."""
        self._failure = reason
        self._waiting.unpark_all()

    async def more(self, than_bytes: int) -> int:
        while self.ready_bytes <= than_bytes:
            if self._failure is not None:
                raise LocalError(self._failure)
            await self._waiting.park()
        return self.ready_bytes


class AsyncCodec:
    """Codes for one peer; nothing is coded before `run` has started."""

    def __init__(self, worker: Worker, boundary: BoundarySection, device: str = "cpu") -> None:
        """`worker` must not be the device's own; `device` is where decoded tensors go."""
        self._worker = worker
        self._boundary = boundary
        self._device = device
        self._nursery: trio.Nursery | None = None
        self.choices: dict[str, str] = {}  # by tensor: how it travelled last, and why

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry the coding of large tensors until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def encode(self, tensor: Tensor, *, name: str, rate_bytes_per_s: float | None = None) -> TensorFrame:
        """The tensor as a frame, coded as the run file says; `rate_bytes_per_s` is the line's, where it is known.

        Raises `frames.NotFinite` when it holds what cannot be coded. The tensor must not change until the frame's
        payload is whole; it is the result of a worker's job, so its device has done it.
        """
        encoding, why = await self._work(partial(self._begin, tensor, name, rate_bytes_per_s), f"code {name}")
        self.choices[name] = why
        if encoding.done:
            return encoding.frame()
        if self._nursery is None:
            raise LocalError("nothing is coded before Coder.run has started, nor after it has ended")
        progress = Progress(encoding.ready_bytes)
        self._nursery.start_soon(self._finish, encoding, progress, name)
        return encoding.frame(progress)

    async def decode(self, frames: Sequence[TensorFrame], names: Sequence[str]) -> list[Tensor]:
        """The tensors of a message on this coder's device; ProtocolViolation names the one that cannot be decoded.

        Of any shape and dtype: what they must be, whoever computes with them knows.
        """

        def job() -> list[Tensor]:
            return [decode(f, name=n, device=self._device) for f, n in zip(frames, names, strict=True)]

        if self._device == "cpu" and len(frames) <= _AT_ONCE and all(map(_is_small_and_plain, frames)):
            await trio.lowlevel.checkpoint()
            return job()
        return await self._work(job, f"decode {', '.join(names)}")

    def _begin(self, tensor: Tensor, name: str, rate_bytes_per_s: float | None) -> tuple[FrameEncoder, str]:
        """Begin a frame, on the coding thread: choose how the tensor travels, and make the first chunk."""
        sample = sample_of(tensor) if self._boundary.code == "auto" else None
        plan, why = choose(self._boundary, rate_bytes_per_s, sample, dtype_name(tensor.dtype), tensor.numel())
        return begin(tensor, plan, name=name, computed=True), f"{plan}: {why}"

    async def _finish(self, encoding: FrameEncoder, progress: Progress, name: str) -> None:
        """Finish a frame chunk after chunk, so that others' tensors are coded in between."""
        try:
            while not encoding.done:
                await self._work(encoding.advance, f"code {name}")
                progress.reached(encoding.ready_bytes)
        except PeerdError as error:
            progress.fail(f"{name} could not be coded: {error}")
        except trio.Cancelled:
            progress.fail("the coder was stopped")
            raise

    async def _work(self, job: Callable[[], T], name: str) -> T:
        return await self._worker.run(job, name=name)


def _is_small_and_plain(frame: TensorFrame) -> bool:
    """True when its tensor shares its memory, or is copied in no time where that is not aligned."""
    plain = frame.coding == "none" and not frame.lossless and frame.dtype != "bool"
    return plain and memoryview(frame.payload).nbytes <= _SMALL_BYTES
