"""Asynchronous tensor codec: encodes tensors into frames and decodes frames into tensors, on a thread of its own.

Neither the trio loop nor the device's thread does this work; only small uncoded frames are decoded in the trio loop. A
large tensor is encoded in chunks of about 1 MiB: its frame is available after the first chunk, and is sent while the
other chunks are encoded (`TensorFrame.ready`). The sender chooses the coding (`policy`); received frames are validated
here, in any coding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import trio
from torch import Tensor

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import FrameEncoder, begin, decode, sample_of
from peerd.codec.policy import choose
from peerd.codec.tensors import dtype_name
from peerd.core.errors import LocalError, PeerdError
from peerd.core.work import Worker
from peerd.run.runfile import BoundarySection

T = TypeVar("T")

_SMALL_BYTES: Final = 1 << 18
_AT_ONCE: Final = 4  # small frames of a message that the trio loop decodes


class Progress:
    """Tracks how many bytes of a frame's payload are final: a `codec.format.frame.ReadyBytes`."""

    def __init__(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self._failure: str | None = None
        self._waiting = trio.lowlevel.ParkingLot()

    def reached(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self._waiting.unpark_all()

    def fail(self, reason: str) -> None:
        """Make waiters fail: the rest of the frame will never be encoded."""
        self._failure = reason
        self._waiting.unpark_all()

    async def more(self, than_bytes: int) -> int:
        while self.ready_bytes <= than_bytes:
            if self._failure is not None:
                raise LocalError(self._failure)
            await self._waiting.park()
        return self.ready_bytes


class AsyncCodec:
    """Codec of one peer. Large tensors can be encoded only while `run` is active."""

    def __init__(self, worker: Worker, boundary: BoundarySection, device: str = "cpu") -> None:
        """`worker` must not be the device's own worker; `device` is where decoded tensors are placed."""
        self._worker = worker
        self._boundary = boundary
        self._device = device
        self._nursery: trio.Nursery | None = None
        self.choices: dict[str, str] = {}  # by tensor name: the last coding, and the reason for it

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the tasks that finish large tensors, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def encode(self, tensor: Tensor, *, name: str, rate_bytes_per_s: float | None = None) -> TensorFrame:
        """Encode the tensor into a frame with the coding that the run file sets.

        `rate_bytes_per_s` is the link's rate, None if unknown. Raises `frames.NotFinite` if the tensor has a value that
        cannot be encoded. The tensor must not change until the frame's payload is complete. It is the result of a
        worker's job, so its device has finished computing it.
        """
        encoding, why = await self._work(partial(self._begin, tensor, name, rate_bytes_per_s), f"code {name}")
        self.choices[name] = why
        if encoding.done:
            return encoding.frame()
        if self._nursery is None:
            raise LocalError("a large tensor can be encoded only while AsyncCodec.run is active")
        progress = Progress(encoding.ready_bytes)
        self._nursery.start_soon(self._finish, encoding, progress, name)
        return encoding.frame(progress)

    async def decode(self, frames: Sequence[TensorFrame], names: Sequence[str]) -> list[Tensor]:
        """Decode the tensors of a message onto this codec's device; ProtocolViolation names the tensor that is invalid.

        Any shape and dtype is accepted: the code that computes with the tensors checks them.
        """

        def job() -> list[Tensor]:
            return [decode(f, name=n, device=self._device) for f, n in zip(frames, names, strict=True)]

        if self._device == "cpu" and len(frames) <= _AT_ONCE and all(map(_is_small_and_plain, frames)):
            await trio.lowlevel.checkpoint()
            return job()
        return await self._work(job, f"decode {', '.join(names)}")

    def _begin(self, tensor: Tensor, name: str, rate_bytes_per_s: float | None) -> tuple[FrameEncoder, str]:
        """Begin a frame on the coding thread: choose the coding, and encode the first chunk."""
        sample = sample_of(tensor) if self._boundary.code == "auto" else None
        plan, why = choose(self._boundary, rate_bytes_per_s, sample, dtype_name(tensor.dtype), tensor.numel())
        return begin(tensor, plan, name=name, computed=True), f"{plan}: {why}"

    async def _finish(self, encoding: FrameEncoder, progress: Progress, name: str) -> None:
        """Encode the remaining chunks one by one, so that other tensors are encoded in between."""
        try:
            while not encoding.done:
                await self._work(encoding.advance, f"code {name}")
                progress.reached(encoding.ready_bytes)
        except PeerdError as error:
            progress.fail(f"{name} could not be encoded: {error}")
        except trio.Cancelled:
            progress.fail("the codec was stopped")
            raise

    async def _work(self, job: Callable[[], T], name: str) -> T:
        return await self._worker.run(job, name=name)


def _is_small_and_plain(frame: TensorFrame) -> bool:
    """True if decoding the frame is trivial: its tensor shares the payload's memory, or a small misaligned one is
    copied.
    """
    plain = frame.coding == "none" and not frame.lossless and frame.dtype != "bool"
    return plain and memoryview(frame.payload).nbytes <= _SMALL_BYTES
