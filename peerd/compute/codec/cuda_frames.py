"""Encoding of tensors on a GPU: the kernels run there, and only the encoded bytes are copied to the host.

The frames are bit for bit those that `frames` makes on the CPU. All work is enqueued on a `CopyLane`, a stream beside
the computing stream. Codes are copied in chunks, so the first chunks are sent while later ones are still being copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from peerd.compute.codec.cuda_staging import CopyLane, download, upload
from peerd.compute.codec.layout import FP16_MAX, ROUNDED, seal_scales
from peerd.compute.codec.policy import CodingPlan
from peerd.compute.tensors import values_of
from peerd.core.blockwise import CODES, SCALE_BYTES, code_bytes, scale_count
from peerd.core.frame import CRC_BYTES


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
