"""Encoding of tensors into frames, and decoding: codings, blockwise quantization, packing. Synchronous.

`begin` allocates the whole payload of a frame, and `advance` fills it chunk by chunk, so that encoding overlaps
sending; `encode` does both at once. Payloads are not copied: codes are written into the buffer that is sent, and the
frame of an uncoded CPU tensor shares its memory (so the tensor must not change while the frame is sent).

Values that a blockwise code cannot represent (NaN, infinity) raise `NotFinite`, which names the tensor, before a byte
is sent. Uncoded and half-precision frames do carry such values; pass `finite` to `decode` to reject them.

A malicious peer may send another dtype, shape, coding or block size than allowed; lengths that do not fit; corrupt
packed chunks; and scales whose checksum is wrong, or that are negative, tiny, huge or not numbers. Each raises
`ProtocolViolation` with the tensor's name, before more than the frame's own size is allocated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from peerd.codec import lossless
from peerd.codec.format.blockwise import BLOCKS, CODES, SCALE_BYTES, scale_count
from peerd.codec.format.frame import (
    CODINGS,
    CRC_BYTES,
    DTYPES,
    ReadyBytes,
    TensorFrame,
    expected_bytes,
    lossless_bounds,
)
from peerd.codec.kernels import ops, tables
from peerd.codec.kernels.reference import CodingOutputs
from peerd.codec.layout import FP16_MAX, ROUNDED, seal_scales
from peerd.codec.policy import CodingPlan, TensorSummary
from peerd.codec.tensors import TORCH_DTYPES, all_finite, dtype_name, fits, raw_bytes, values_of
from peerd.core.errors import LocalError, ProtocolViolation

__all__ = ["FrameEncoder", "begin", "decode", "encode", "from_frame", "sample_of", "to_frame"]

CHUNK_BYTES: Final = 1 << 20  # of codes or rounded values, made in one step
SAMPLE_VALUES: Final = 1 << 16
_GOLDEN: Final = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly and without a period

Put = Callable[[Tensor], Tensor]  # copies a flat host tensor to the result's device


class FrameEncoder:
    """A frame that is being encoded: `ready_bytes` of `payload` are final, and `advance` encodes more."""

    def __init__(
        self, dtype: str, shape: tuple[int, ...], plan: CodingPlan, payload: memoryview, steps: Iterator[int]
    ) -> None:
        """Each of `steps` encodes more of the payload and yields the number of final bytes; the first one runs here."""
        self.dtype = dtype
        self.shape = shape
        self.coding, self.block, self.lossless = plan.coding, plan.block, plan.lossless
        self.payload = payload
        self._steps = steps
        self.ready_bytes = next(steps)

    @property
    def done(self) -> bool:
        return self.ready_bytes == self.payload.nbytes

    def advance(self) -> None:
        """Encode about CHUNK_BYTES more of the payload. The tensor must not have changed since `begin`."""
        if not self.done:
            self.ready_bytes = next(self._steps)

    def frame(self, ready: ReadyBytes | None = None) -> TensorFrame:
        """The frame to send. `ready` reports to the sender how much of the payload is final while encoding goes on."""
        return TensorFrame(self.dtype, self.shape, self.payload, self.coding, self.block, self.lossless, ready)


def encode(tensor: Tensor, plan: CodingPlan, *, name: str = "a tensor") -> TensorFrame:
    """Encode the tensor into a complete frame; see `begin`."""
    encoding = begin(tensor, plan, name=name)
    while not encoding.done:
        encoding.advance()
    return encoding.frame()


def begin(tensor: Tensor, plan: CodingPlan, *, name: str = "a tensor", computed: bool = False) -> FrameEncoder:
    """Begin to encode the tensor: its first chunk is final on return.

    Accepts any shape and any dtype that frames support; integers and bools are sent uncoded. "bf16" and "fp16" round to
    nearest; a value beyond fp16's range becomes its largest. A tensor of at most one chunk, an uncoded one, and a
    packed one are complete on return. `computed`: the tensor's device has finished it, so it is not waited for. Raises
    NotFinite if a blockwise code cannot represent a value, LocalError for a dtype or plan that frames do not support.
    """
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    plan = _settled(plan, dtype, name)
    if not tensor.numel() or (plan.coding == "none" and tensor.device.type == "cpu"):
        payload = raw_bytes(tensor)
        steps = iter((payload.nbytes,))
    else:
        size = expected_bytes(dtype, (tensor.numel(),), plan.coding, plan.block)
        payload = raw_bytes(torch.empty(size, dtype=torch.uint8))
        steps = _steps(tensor, plan, payload, name, computed)
    if plan.lossless:
        for _ in steps:
            pass
        payload = lossless.pack(payload, _itemsize(plan.coding, dtype))
        steps = iter((payload.nbytes,))
    return FrameEncoder(dtype, shape, plan, payload, steps)


def decode(
    frame: TensorFrame,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | None = None,
    *,
    name: str = "a tensor",
    finite: bool = False,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Decode the tensor onto `device`; raises ProtocolViolation if it is not what the caller expects.

    `shape`: None allows any length of that dimension, or any shape. `dtype`: None allows any. `finite`: reject NaN and
    infinity in every coding (blockwise codes have none). On the CPU, the tensor shares memory with a writable, aligned
    payload that is neither coded nor packed.
    """
    found = _expected(frame, shape, dtype, name)
    payload, device = _raw_payload(frame, name), torch.device(device)
    make = partial(_dequantized if frame.coding in CODES else _values, frame, payload, found, name)
    if device.type == "cuda":
        from peerd.codec import cuda_staging  # not needed where there is no GPU

        tensor = cuda_staging.decoded(make, device, cuda_staging.lane_of(device))
    else:
        tensor = make(lambda source: source.to(device))
    if finite and frame.coding not in CODES and not all_finite(tensor):
        raise ProtocolViolation(f"{name} has values that are not finite")
    return tensor


def to_frame(tensor: Tensor, coding: str = "none") -> TensorFrame:
    """Encode the tensor with `encode`; an uncoded frame shares memory with a contiguous CPU tensor."""
    return encode(tensor, CodingPlan(coding))


def from_frame(
    frame: TensorFrame,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | None = None,
    *,
    name: str = "a tensor",
    finite: bool = False,
) -> Tensor:
    """Decode the tensor onto the CPU with `decode`; raises ProtocolViolation if it is not what the caller expects."""
    return decode(frame, shape, dtype, name=name, finite=finite)


def encode_missing(values: Tensor, plan: CodingPlan, beside: CodingOutputs, *, name: str = "a tensor") -> TensorFrame:
    """Like `encode`, for a flat CPU tensor; also writes the coding error and the decoded values to `beside`.

    For a blockwise code, one pass over the values does both. If NotFinite is raised, the contents of `beside` are
    undefined.
    """
    dtype, count = dtype_name(values.dtype), values.numel()
    plan = _settled(plan, dtype, name)
    if plan.coding in CODES and not plan.lossless and count and values.dtype == torch.float32:
        payload = raw_bytes(torch.empty(expected_bytes(dtype, (count,), plan.coding, plan.block), dtype=torch.uint8))
        scales, codes = _laid_out(payload, count, plan.block)
        ops.quantize_missing(values, plan.coding, plan.block, codes=codes, scales=scales, beside=beside)
        seal_scales(payload, scales.nbytes, name)
        return TensorFrame(dtype, (count,), payload, plan.coding, plan.block)
    frame = encode(values, plan, name=name)
    beside.take(values, decode(frame, name=name))
    return frame


def decode_onto(frame: TensorFrame, into: Tensor, base: Tensor | None = None, *, name: str = "a tensor") -> None:
    """Decode a frame into a flat CPU tensor, whose shape and dtype it must have; `base`, if given, is added.

    `base` may be `into`. NaN and infinity are rejected, as by `decode`; `into` is then unchanged.
    """
    blockwise = frame.coding in CODES and not frame.lossless and into.dtype == torch.float32 and into.numel()
    if not blockwise:
        decoded = decode(frame, into.shape, into.dtype, name=name, finite=True)
        into.copy_(decoded if base is None else base + decoded)
        return
    _expected(frame, into.shape, into.dtype, name)
    codes_and_scales = _codes_and_scales(frame, _raw_payload(frame, name), into.dtype, name)
    assert codes_and_scales is not None  # `into` is not empty
    if base is None:
        torch.ops.peerd.dequantize_blockwise.out(*codes_and_scales, frame.coding, frame.block, out=into)
    else:
        ops.dequantize_onto(*codes_and_scales, frame.coding, frame.block, base=base, out=into)


def sample_of(tensor: Tensor) -> TensorSummary:
    """Summary of up to SAMPLE_VALUES of the tensor's values, in blocks of 64 spread over the whole tensor.

    A GPU tensor must be finished: it is read on the copy stream, which does not wait for the computing stream.
    """
    if tensor.device.type == "cuda":
        from peerd.codec import cuda_staging  # not needed where there is no GPU

        with cuda_staging.lane_of(tensor.device).active():
            return _sample_of(tensor)
    return _sample_of(tensor)


def _sample_of(tensor: Tensor) -> TensorSummary:
    flat = tensor.detach().reshape(-1)
    if not flat.numel() or not flat.is_floating_point():
        return TensorSummary(0.0)
    block = min(64, flat.numel())
    rows = flat[: flat.numel() // block * block].view(-1, block)
    most = SAMPLE_VALUES // block
    if len(rows) > most:  # equally spaced rows could all belong to the same few channels
        spread = torch.arange(most, dtype=torch.float64, device=rows.device) * _GOLDEN % 1
        rows = rows[(spread * len(rows)).long()]
    squares = rows.double().square()
    mean = float(squares.mean())
    return TensorSummary(float(squares.amax(dim=1).mean()) / mean if mean else 0.0)


# --- sending -------------------------------------------------------------------------------------------------------


def _settled(plan: CodingPlan, dtype: str, name: str) -> CodingPlan:
    """The plan that applies to tensors of `dtype`, with the block size filled in."""
    coding, block = plan.coding, plan.block
    if dtype not in DTYPES or coding not in CODINGS:
        raise LocalError(f"{name} has dtype {dtype} and coding {coding!r}, which frames do not support")
    if not DTYPES[dtype].floating:
        return CodingPlan("none", 0, plan.lossless)
    if coding not in CODES:
        return CodingPlan(coding, 0, plan.lossless)
    if DTYPES[dtype].itemsize > 4:
        raise LocalError(f"{name} is of {dtype}; {coding} is for float32, float16 and bfloat16")
    if block and block not in BLOCKS:
        raise LocalError(f"{name} in blocks of {block} values; allowed: {', '.join(map(str, BLOCKS))}")
    return CodingPlan(coding, block or CODES[coding].block, plan.lossless)


def _steps(tensor: Tensor, plan: CodingPlan, payload: memoryview, name: str, computed: bool) -> Iterator[int]:
    """Steps that encode the tensor, on its own device."""
    if tensor.device.type == "cuda":
        from peerd.codec import cuda_staging  # not needed where there is no GPU

        return cuda_staging.coded(tensor, plan, payload, name, cuda_staging.lane_of(tensor.device), computed)
    flat = tensor.detach().cpu().contiguous().view(-1)
    return _quantized(flat, plan, payload, name) if plan.coding in CODES else _rounded(flat, plan, payload)


def _itemsize(coding: str, dtype: str) -> int:
    """Bytes per item, by which packing sorts them into planes."""
    return 1 if coding in CODES else 2 if coding in ROUNDED else DTYPES[dtype].itemsize


def _rounded(flat: Tensor, plan: CodingPlan, payload: memoryview) -> Iterator[int]:
    out = values_of(payload, ROUNDED.get(plan.coding, flat.dtype))
    step = CHUNK_BYTES // out.itemsize
    for at in range(0, flat.numel(), step):
        chunk = flat[at : at + step]
        out[at : at + step] = chunk.clamp(-FP16_MAX, FP16_MAX) if plan.coding == "fp16" else chunk
        yield min(at + step, flat.numel()) * out.itemsize


def _quantized(flat: Tensor, plan: CodingPlan, payload: memoryview, name: str) -> Iterator[int]:
    """Write the scales, their checksum and the codes. With several chunks, a pass of its own makes all scales first."""
    count = flat.numel()
    scales, codes = _laid_out(payload, count, plan.block)
    scale_bytes = scales.nbytes
    step = CHUNK_BYTES * 8 // CODES[plan.coding].bits  # values: whole blocks, whole bytes
    if count > step:
        scales.copy_(torch.ops.peerd.block_scales(flat, plan.block))
    else:
        torch.ops.peerd.quantize_blockwise.out(flat, plan.coding, plan.block, codes=codes, scales=scales)
    seal_scales(payload, scale_bytes, name)
    if count <= step:
        yield payload.nbytes
        return
    code_bytes = 0
    for at in range(0, count, step):
        chunk = flat[at : at + step]
        part = codes[code_bytes : code_bytes + CHUNK_BYTES]
        # Scales that may already be sent are overwritten here with the same values.
        own = scales[at // plan.block :][: scale_count(chunk.numel(), plan.block)]
        torch.ops.peerd.quantize_blockwise.out(chunk, plan.coding, plan.block, codes=part, scales=own)
        code_bytes += part.numel()
        yield scale_bytes + CRC_BYTES + code_bytes


def _laid_out(payload: memoryview, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Views of the scales and codes of `count` values in a blockwise payload; a checksum lies between them."""
    scale_bytes = SCALE_BYTES * scale_count(count, block)
    return values_of(payload[:scale_bytes], torch.float32), values_of(payload[scale_bytes + CRC_BYTES :], torch.uint8)


# --- receiving -----------------------------------------------------------------------------------------------------


def _expected(
    frame: TensorFrame, shape: Sequence[int | None] | None, dtype: torch.dtype | None, name: str
) -> torch.dtype:
    """Check the frame's dtype and shape against what the caller expects; returns the dtype."""
    found = TORCH_DTYPES.get(frame.dtype)
    if found is None or (dtype is not None and found != dtype):
        wanted = f"; expected {dtype_name(dtype)}" if dtype is not None else ""
        raise ProtocolViolation(f"{name} is of {frame.dtype}{wanted}")
    if shape is not None and not fits(frame.shape, shape):
        dims = ", ".join("any" if dim is None else str(dim) for dim in shape)
        raise ProtocolViolation(f"{name} has shape {list(frame.shape)}; expected [{dims}]")
    return found


def _raw_payload(frame: TensorFrame, name: str) -> memoryview:
    """The payload, unpacked, after checking its length against the frame's header."""
    try:
        expected = expected_bytes(frame.dtype, frame.shape, frame.coding, frame.block)
    except ValueError as error:
        raise ProtocolViolation(f"{name}: {error}") from None
    payload = memoryview(frame.payload).cast("B")
    if not frame.lossless:
        if payload.nbytes != expected:
            raise ProtocolViolation(f"{name} has {payload.nbytes} payload bytes; expected {expected}")
        return payload
    least, most = lossless_bounds(expected)
    if not least <= payload.nbytes <= most:
        raise ProtocolViolation(f"{name} has {payload.nbytes} packed bytes; expected {least} to {most}")
    return lossless.unpack(payload, expected, _itemsize(frame.coding, frame.dtype), name=name)


def _values(frame: TensorFrame, payload: memoryview, dtype: torch.dtype, name: str, put: Put) -> Tensor:
    """The tensor of a payload that is not blockwise and whose length was checked."""
    if dtype is torch.bool:
        return put(values_of(payload, torch.uint8)).ne(0).view(frame.shape)
    return put(values_of(payload, ROUNDED.get(frame.coding, dtype))).to(dtype).view(frame.shape)


def _dequantized(frame: TensorFrame, payload: memoryview, dtype: torch.dtype, name: str, put: Put) -> Tensor:
    """The tensor of a blockwise payload whose length was checked."""
    parts = _codes_and_scales(frame, payload, dtype, name)
    if parts is None:
        return put(torch.empty(0, dtype=dtype)).view(frame.shape)
    codes, scales = map(put, parts)
    tensor: Tensor = torch.ops.peerd.dequantize_blockwise(codes, scales, frame.coding, frame.block, frame.shape, dtype)
    return tensor


def _codes_and_scales(
    frame: TensorFrame, payload: memoryview, dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor] | None:
    """Codes and checked scales of a blockwise payload whose length was checked, or None if it is empty."""
    if not payload.nbytes:
        return None
    scales, codes = _laid_out(payload, math.prod(frame.shape), frame.block)
    scale_bytes = scales.nbytes
    head = payload[:scale_bytes]
    given = int.from_bytes(payload[scale_bytes : scale_bytes + CRC_BYTES], "little")
    if zlib.crc32(head) != given:
        raise ProtocolViolation(f"{name} has scales whose checksum is wrong")
    bits = np.frombuffer(head, dtype="<i4")  # a sign bit makes these negative; NaN and infinity are above all limits
    largest = tables.FLOAT16_LARGEST_BITS if dtype is torch.float16 else tables.LARGEST_BITS
    if not ((bits == 0) | ((bits > tables.SMALLEST_BITS) & (bits <= largest))).all():
        raise ProtocolViolation(f"{name} has scales that no tensor of {frame.dtype} has")
    return codes, scales
