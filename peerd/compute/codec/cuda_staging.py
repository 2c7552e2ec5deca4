"""Copies between a GPU's memory and payloads: in chunks through pinned buffers, on a stream beside the one that
computes.

Copies from and to pinned memory overlap computing, and the copy of one chunk overlaps what the host does with the
one before. Payloads themselves are not pinned: a step's answers are kept, and pinned memory is scarce. Torch keeps
pinned buffers that were let go for the next one, so they cost nothing after the first.

Whoever calls waits for its own copies only. `CopyLane` hides the device, so that the order of things can be tested
without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

SLOT_BYTES: Final = 1 << 20
SLOTS: Final = 4  # chunks on their way at once: one that the host reads, and some that keep the line busy


class CopyLane(Protocol):
    """One thread's stream beside a device's computing."""

    def active(self) -> AbstractContextManager[object]:
        """Inside this context, what is enqueued goes to this lane."""
        ...

    def follow(self, *sources: Tensor, computed: bool = False) -> None:
        """Order what is enqueued from now on after all that computing has enqueued; keeps `sources` alive for it.

        `computed`: the device has done `sources`, there is nothing to wait for.
        """
        ...

    def lead(self, *results: Tensor) -> None:
        """Wait for all that was enqueued; `results` may be used by computing from now on."""
        ...

    def slot(self) -> Tensor:
        """Pinned memory of SLOT_BYTES."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that waits for what was enqueued so far."""
        ...


class CudaLane:
    """A lane on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def follow(self, *sources: Tensor, computed: bool = False) -> None:
        if not computed:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        for source in sources:
            source.record_stream(self._stream)

    def lead(self, *results: Tensor) -> None:
        self._stream.synchronize()
        for result in results:
            result.record_stream(torch.cuda.default_stream(self._device))

    def slot(self) -> Tensor:
        return torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize


class _Lanes(threading.local):
    """Each thread's lanes, by device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, CudaLane] = {}


_LANES: Final = _Lanes()


def lane_of(device: torch.device) -> CopyLane:
    """The calling thread's lane on this CUDA device."""
    lane = _LANES.by_device.get(device)
    if lane is None:
        lane = _LANES.by_device[device] = CudaLane(device)
    return lane


def download(lane: CopyLane, source: Tensor, target: Tensor) -> Iterator[int]:
    """Copy `source` (flat, on the device) into `target` (flat, on the CPU, as many bytes); gives the bytes done so far.

    The first chunks are on their way when this returns; `source` must not change before the end.
    """
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    slots = [lane.slot() for _ in range(min(SLOTS, -(-source.numel() // SLOT_BYTES)))]
    waits: list[Callable[[], None]] = []

    def send(at: int) -> None:
        chunk = source[at : at + SLOT_BYTES]
        with lane.active():
            slots[len(waits) % SLOTS][: chunk.numel()].copy_(chunk, non_blocking=True)
            waits.append(lane.mark())

    for at in range(0, min(source.numel(), SLOTS * SLOT_BYTES), SLOT_BYTES):
        send(at)
    return _received(send, slots, waits, target)


def _received(
    send: Callable[[int], None], slots: list[Tensor], waits: list[Callable[[], None]], target: Tensor
) -> Iterator[int]:
    for number, at in enumerate(range(0, target.numel(), SLOT_BYTES)):
        waits[number]()
        chunk = target[at : at + SLOT_BYTES]
        chunk.copy_(slots[number % SLOTS][: chunk.numel()])
        if at + SLOTS * SLOT_BYTES < target.numel():
            send(at + SLOTS * SLOT_BYTES)
        yield at + chunk.numel()


def upload(lane: CopyLane, source: Tensor, target: Tensor) -> None:
    """Enqueue the copy of `source` (flat, on the CPU) into `target` (flat, on the device, as many bytes).

    `source` may be let go afterwards; `lane.lead` waits for the end. Torch keeps a pinned buffer while it is copied.
    """
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    slots = [lane.slot() for _ in range(min(SLOTS, -(-source.numel() // SLOT_BYTES)))]
    waits: list[Callable[[], None]] = []
    for number, at in enumerate(range(0, source.numel(), SLOT_BYTES)):
        if number >= SLOTS:
            waits[number - SLOTS]()
        chunk = source[at : at + SLOT_BYTES]
        slot = slots[number % SLOTS][: chunk.numel()]
        slot.copy_(chunk)
        with lane.active():
            target[at : at + SLOT_BYTES].copy_(slot, non_blocking=True)
            waits.append(lane.mark())
