"""Encoding of tensors on a GPU, and copies between its memory and payloads.

The kernels run on the GPU, and only the encoded bytes are copied: in chunks through pinned buffers, on a `CopyLane`, a
stream beside the computing stream. So the first chunks are sent while later ones are still being copied. The frames are
bit for bit those that `frames` makes on the CPU.

Copies from and to pinned memory overlap computing, and the copy of one chunk overlaps the host's work on the previous
one. Payloads themselves are not pinned: a step's answers are kept, and pinned memory is scarce. Torch caches freed
pinned buffers, so reusing them costs nothing.

A caller waits only for its own copies. `CopyLane` hides the device, so that the order of operations can be tested
without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, SCALE_BYTES, code_bytes, scale_count
from peerd.codec.format.frame import CRC_BYTES
from peerd.codec.layout import FP16_MAX, ROUNDED, seal_scales
from peerd.codec.policy import CodingPlan
from peerd.codec.tensors import values_of

T = TypeVar("T")

SLOT_BYTES: Final = 1 << 20
SLOTS: Final = 4  # chunks in flight: one that the host reads, and others that keep the bus busy


class CopyLane(Protocol):
    """One thread's copy stream beside a device's computing stream."""

    def active(self) -> AbstractContextManager[object]:
        """Inside this context, operations are enqueued on this lane."""
        ...

    def follow(self, *sources: Tensor, computed: bool = False) -> None:
        """Order later operations of this lane after all that the computing stream has enqueued; keeps `sources` alive.

        `computed`: the device has finished `sources`, so there is nothing to wait for.
        """
        ...

    def lead(self, *results: Tensor) -> None:
        """Wait for all enqueued operations; the computing stream may use `results` afterwards."""
        ...

    def slot(self) -> Tensor:
        """A pinned buffer of SLOT_BYTES."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all operations enqueued so far."""
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
    """Copy `source` (flat, on the device) into `target` (flat, on the CPU, same bytes); yields the bytes done so far.

    The first copies are enqueued when this returns; `source` must not change until the end.
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
    """Enqueue the copy of `source` (flat, on the CPU) into `target` (flat, on the device, same number of bytes).

    `source` may be freed afterwards; `lane.lead` waits for the end. Torch keeps a pinned buffer while it is being
    copied.
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


def coded(
    tensor: Tensor, plan: CodingPlan, payload: memoryview, name: str, lane: CopyLane, computed: bool = False
) -> Iterator[int]:
    """Encode `tensor`, which is not empty, into `payload`; yields the number of bytes that are final so far.

    `computed`: the device has finished `tensor`, so its computing stream is not waited for. Raises NotFinite, before
    any byte is final, if a blockwise code cannot represent a value.
    """
    with lane.active():
        lane.follow(tensor, computed=computed)
        flat = tensor.detach().contiguous().view(-1)
        if plan.coding in CODES:
            return _quantized(flat, plan, payload, name, lane)
        if plan.coding in ROUNDED:
            flat = flat.clamp(-FP16_MAX, FP16_MAX) if plan.coding == "fp16" else flat
            flat = flat.to(ROUNDED[plan.coding])
        return download(lane, flat, values_of(payload, torch.uint8))


def _quantized(flat: Tensor, plan: CodingPlan, payload: memoryview, name: str, lane: CopyLane) -> Iterator[int]:
    """Quantize the whole tensor at once, since a GPU takes microseconds where the network takes milliseconds."""
    blocks = scale_count(flat.numel(), plan.block)
    codes = flat.new_empty(code_bytes(flat.numel(), plan.coding), dtype=torch.uint8)
    scales = flat.new_empty(blocks, dtype=torch.float32)
    torch.ops.peerd.quantize_blockwise.out(flat, plan.coding, plan.block, codes=codes, scales=scales)
    head_bytes = SCALE_BYTES * blocks + CRC_BYTES
    head = download(lane, scales, values_of(payload[: SCALE_BYTES * blocks], torch.uint8))
    body = download(lane, codes, values_of(payload[head_bytes:], torch.uint8))

    def steps() -> Iterator[int]:
        for _ in head:
            pass
        seal_scales(payload, SCALE_BYTES * blocks, name)
        for done in body:
            yield head_bytes + done

    return steps()


def decoded(make: Callable[[Callable[[Tensor], Tensor]], Tensor], device: torch.device, lane: CopyLane) -> Tensor:
    """Return the result of `make` on the device, ready for the computing stream.

    `make` is called with a function that copies a flat host tensor to the device.
    """

    def put(source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        upload(lane, source.contiguous(), target)
        return target

    with lane.active():
        result = make(put)
    lane.lead(result)
    return result
