"""Tensors through every code: the bytes that are promised, chunk by chunk or at once, and nothing that lies."""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peerd.codec import frames
from peerd.codec.format.blockwise import CODES
from peerd.codec.format.frame import CODINGS, DTYPES, TensorFrame, encode_header
from peerd.codec.frames import FrameEncoder, begin, decode, encode, sample_of
from peerd.codec.kernels import reference, tables
from peerd.codec.layout import NotFinite
from peerd.codec.policy import CodingPlan
from peerd.core.errors import LocalError, ProtocolViolation

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3)]
SMALL_CHUNK_BYTES = 4096


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def of_any_dtype(name: str, count: int) -> Tensor:
    return (values(count) * 50).abs().to(getattr(torch, name))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CHUNK_BYTES", SMALL_CHUNK_BYTES)


@pytest.mark.parametrize("block", [0, 64, 1024])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", CODES)
def test_a_payload_is_scales_then_their_checksum_then_codes(code: str, dtype: torch.dtype, block: int) -> None:
    tensor = values(3, 431, dtype=dtype)
    frame = encode(tensor, CodingPlan(code, block))
    size = block or CODES[code].block
    assert (frame.coding, frame.block, frame.lossless, frame.shape) == (code, size, False, (3, 431))
    codes, scales = reference.quantize(tensor, code, size)
    sent = scales.numpy().tobytes()
    assert bytes(frame.payload) == sent + zlib.crc32(sent).to_bytes(4, "little") + codes.numpy().tobytes()
    expected = reference.dequantize(codes, scales, code, size, torch.empty(3, 431, dtype=dtype))
    assert torch.equal(decode(frame, (3, None), dtype), expected)


@pytest.mark.parametrize("plan", [*(CodingPlan(name) for name in CODINGS), CodingPlan("dynamic8", 4096)], ids=str)
def test_a_tensor_made_in_chunks_is_the_same_as_one_made_whole(
    plan: CodingPlan, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (0, 1, 63, 64, 65, 4095, 4096, 8192, 8193, 20_001):
        encoding = assert_made_in_chunks(plan, values(count))
        with monkeypatch.context() as patched:
            patched.setattr(frames, "CHUNK_BYTES", 1 << 20)
            assert bytes(encode(values(count), plan).payload) == bytes(encoding.payload), count
        encode_header(encoding.frame())


def assert_made_in_chunks(plan: CodingPlan, tensor: Tensor) -> FrameEncoder:
    encoding = begin(tensor, plan)
    prefixes = [(encoding.ready_bytes, bytes(encoding.payload[: encoding.ready_bytes]))]
    while not encoding.done:
        encoding.advance()
        prefixes.append((encoding.ready_bytes, bytes(encoding.payload[: encoding.ready_bytes])))
    encoding.advance()  # does nothing any more
    sizes = [size for size, _ in prefixes]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == encoding.payload.nbytes
    assert all(bytes(encoding.payload[:size]) == prefix for size, prefix in prefixes)
    if plan.coding != "none":
        bits = CODES[plan.coding].bits if plan.coding in CODES else 16
        assert len(sizes) == max(1, math.ceil(tensor.numel() * bits / 8 / SMALL_CHUNK_BYTES))
    return encoding


def test_the_first_bytes_of_a_large_tensor_leave_before_the_last_are_made() -> None:
    encoding = begin(values(5 << 18), CodingPlan("int8"))
    scales = 4 * (5 << 18) // 64
    assert (encoding.ready_bytes, encoding.done) == (scales + 4 + (1 << 20), False)
    encoding.advance()
    assert encoding.done


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (code, name)
        for code in ("none", "bf16", "int8", "nf4")
        for name in sorted(DTYPES)
        if name != "float64" or code not in CODES
    ],
)
def test_every_dtype_and_shape_comes_back(code: str, name: str) -> None:
    for shape in SHAPES:
        for packed in (False, True):
            assert_comes_back(code, name, shape, packed)


def assert_comes_back(code: str, name: str, shape: tuple[int, ...], packed: bool) -> None:
    tensor = of_any_dtype(name, math.prod(shape)).view(shape)
    frame = encode(tensor, CodingPlan(code, lossless=packed))
    encode_header(frame)
    exact = code == "none" or not tensor.is_floating_point()
    assert (frame.dtype, frame.coding) == (name, "none" if exact else code)
    for payload in (bytes(frame.payload), bytearray(frame.payload), memoryview(b"." + bytes(frame.payload))[1:]):
        back = decode(dataclasses.replace(frame, payload=payload), shape, tensor.dtype, finite=True)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        if exact:
            assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_decoded_value_is_larger_than_the_largest_of_its_dtype(dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, 2.99e38)
    tensor = torch.full((64,), largest, dtype=dtype) * torch.tensor([1.0, -1.0] * 32, dtype=dtype)
    for code in CODES:
        back = decode(encode(tensor, CodingPlan(code)), finite=True)
        assert (back - tensor).abs().max() <= 1e-2 * largest


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("count", [100, 20_000])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (float("nan"), "NaN or infinite values"),
        (float("-inf"), "NaN or infinite values"),
        (-3.2e38, "values beyond 3e38"),
    ],
)
def test_what_cannot_be_coded_is_refused_before_a_byte_leaves(
    bad: float, words: str, count: int, code: str, small_chunks: None
) -> None:
    tensor = values(count)
    tensor[-1] = bad
    block = (count - 1) // CODES[code].block
    with pytest.raises(NotFinite, match=f"^the output of stage 1 has {words}, first in block {block}$"):
        begin(tensor, CodingPlan(code), name="the output of stage 1")


@pytest.mark.parametrize("code", ["none", "bf16", "fp16"])
def test_codes_without_blocks_carry_nan_and_who_asks_for_finite_values_hears_it(code: str) -> None:
    frame = encode(torch.tensor([1.0, math.nan]), CodingPlan(code))
    assert decode(frame).isnan().tolist() == [False, True]
    with pytest.raises(ProtocolViolation, match="x has values that are not finite"):
        decode(frame, finite=True, name="x")


@pytest.mark.parametrize(("code", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounded_values_are_rounded_to_nearest_in_every_chunk(
    code: str, dtype: torch.dtype, small_chunks: None
) -> None:
    for tensor in (values(10_000), values(10_000, dtype=torch.float64)):
        assert torch.equal(decode(encode(tensor, CodingPlan(code))), tensor.to(dtype).to(tensor.dtype))


def test_an_uncoded_frame_shares_memory_and_a_gradient_does_not_matter() -> None:
    tensor = torch.zeros(8, requires_grad=True)
    encoding = begin(tensor, CodingPlan())
    assert encoding.done
    with torch.no_grad():
        tensor[3] = 1.0
    assert decode(encoding.frame())[3] == 1.0
    assert decode(encode(tensor, CodingPlan("int8"))).tolist() == tensor.tolist()


def test_a_tensor_that_is_not_contiguous_is_coded_in_c_order() -> None:
    tensor = values(70, 50).t()
    for name in CODINGS:
        plan = CodingPlan(name)
        assert bytes(encode(tensor, plan).payload) == bytes(encode(tensor.contiguous(), plan).payload)


def test_packing_makes_smooth_values_small_and_noise_hardly_larger() -> None:
    smooth = torch.linspace(-1, 1, 3 << 18)
    packed = encode(smooth, CodingPlan("bf16", lossless=True))
    assert memoryview(packed.payload).nbytes < 0.2 * 2 * smooth.numel()
    assert torch.equal(decode(packed), smooth.bfloat16().float())
    noise = torch.randint(0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    frame = encode(noise, CodingPlan(lossless=True))
    assert memoryview(frame.payload).nbytes == 100_000 + 4
    assert torch.equal(decode(frame), noise)


def test_plans_that_no_frame_has_are_our_own_error() -> None:
    for tensor, plan, words in [
        (torch.zeros(1, dtype=torch.complex64), CodingPlan(), "x has dtype complex64"),
        (torch.zeros(1), CodingPlan("zip"), "x has dtype float32 and coding 'zip'"),
        (torch.zeros(1, dtype=torch.float64), CodingPlan("int8"), "x is of float64; int8 is for float32"),
        (torch.zeros(1), CodingPlan("int8", 100), "x in blocks of 100 values; allowed: 64, 128"),
    ]:
        with pytest.raises(LocalError, match=words):
            begin(tensor, plan, name="x")


# --- hostile frames ------------------------------------------------------------------------------------------------


def with_scale(bits: int, dtype: torch.dtype = torch.float32) -> TensorFrame:
    """A frame of two blocks whose second scale has these bits; the checksum is right."""
    frame = encode(torch.ones(128, dtype=dtype), CodingPlan("int8"))
    payload = bytearray(frame.payload)
    payload[4:8] = bits.to_bytes(4, "little")
    payload[8:12] = zlib.crc32(payload[:8]).to_bytes(4, "little")
    return dataclasses.replace(frame, payload=payload)


@pytest.mark.parametrize(
    "bits",
    [
        0xBF800000,  # negative
        0x80000000,  # minus zero
        0x7FC00000,  # not a number
        0xFFC00000,
        0x7F800000,  # infinity
        0x00000001,  # denormal
        0x02081CEA,  # the largest that counts as zero
        0x7F61B1E7,  # beyond 3e38
    ],
)
def test_a_scale_that_no_tensor_has_is_refused(bits: int) -> None:
    with pytest.raises(ProtocolViolation, match="the input has scales that no tensor of float32 has"):
        decode(with_scale(bits), name="the input")


@pytest.mark.parametrize("bits", [0, 0x02081CEB, 0x3F800000, 0x7F61B1E6])
def test_every_scale_that_a_tensor_can_have_is_taken(bits: int) -> None:
    assert decode(with_scale(bits)).isfinite().all()


def test_scales_beyond_float16_are_refused_for_float16_only() -> None:
    assert decode(with_scale(0x477FE000, torch.float16), finite=True)[64] == 65504
    with pytest.raises(ProtocolViolation, match="scales that no tensor of float16 has"):
        decode(with_scale(0x477FE001, torch.float16))
    assert decode(with_scale(0x477FE001, torch.bfloat16)).isfinite().all()


def damaged(change: Callable[[bytearray], object], plan: CodingPlan, count: int = 500) -> TensorFrame:
    frame = encode(values(count), plan)
    payload = bytearray(frame.payload)
    change(payload)
    return dataclasses.replace(frame, payload=payload)


def flip_first(payload: bytearray) -> None:
    payload[0] ^= 1


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (damaged(flip_first, CodingPlan("int8")), "x has scales whose checksum is wrong"),
        (damaged(bytearray.pop, CodingPlan("int8")), "x has 535 payload bytes; expected 536"),
        (damaged(lambda p: p.append(0), CodingPlan("nf4")), "x has 287 payload bytes; expected 286"),
        (TensorFrame("float32", (500,), bytes(536), "int8"), "x: a block of 0 values in coding int8"),
        (TensorFrame("float32", (500,), bytes(536), "int8", 96), "x: a block of 96 values"),
        (TensorFrame("float32", (500,), bytes(2000), "none", 64), "x: a block of 64 values in coding none"),
        (TensorFrame("float64", (500,), bytes(536), "int8", 64), "x: coding int8 is for floats of 2 or 4 bytes"),
        (TensorFrame("int32", (500,), bytes(536), "int8", 64), "x: coding int8 is for floating point"),
        (TensorFrame("float32", (1 << 20, 1 << 20), b"", "int8", 64), "x: a tensor of shape"),
        (TensorFrame("float32", (1 << 26,), b"123", lossless=True), "x has 3 packed bytes; expected 1280 to"),
        (damaged(bytearray.clear, CodingPlan(lossless=True)), "x has 0 packed bytes"),
        (damaged(bytearray.pop, CodingPlan("bf16", lossless=True)), "x: packed chunk 0 has a wrong length"),
        (damaged(lambda p: p.append(0), CodingPlan("bf16", lossless=True)), "1 bytes after its last packed chunk"),
    ],
)
def test_a_frame_that_is_not_what_it_says_is_refused_by_name(frame: TensorFrame, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        decode(frame, name="x")


def test_any_codes_at_all_decode_to_finite_values() -> None:
    generator = torch.Generator().manual_seed(1)
    for code in CODES:
        frame = encode(torch.ones(4097), CodingPlan(code))
        payload = bytearray(frame.payload)
        start = len(payload) - math.ceil(4097 * CODES[code].bits / 8)
        noise = torch.randint(0, 256, (len(payload) - start,), dtype=torch.uint8, generator=generator)
        payload[start:] = noise.numpy().tobytes()
        back = decode(dataclasses.replace(frame, payload=payload))
        assert back.abs().max() <= 1.000001


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", CODES)
def test_every_code_under_the_largest_scale_that_is_let_in_is_finite(code: str, dtype: torch.dtype) -> None:
    """Decoded frames are not scanned for infinities later, so the limit on scales must rule them out."""
    largest = tables.FLOAT16_LARGEST_BITS if dtype is torch.float16 else tables.LARGEST_BITS
    name, count = str(dtype).removeprefix("torch."), 256 * 8 // CODES[code].bits

    def frame(bits: int) -> TensorFrame:
        scales = struct.pack("<I", bits) * (count // 64)
        return TensorFrame(name, (count,), scales + struct.pack("<I", zlib.crc32(scales)) + bytes(range(256)), code, 64)

    assert decode(frame(largest)).isfinite().all()
    with pytest.raises(ProtocolViolation, match="scale"):
        decode(frame(largest + 1))


# --- samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (1000,), (3, 50_000), (400_000,)])
@pytest.mark.parametrize("outliers", [False, True])
def test_a_sample_tells_what_int8_would_get_wrong(shape: tuple[int, ...], outliers: bool) -> None:
    tensor = values(*shape)
    if outliers:
        tensor.view(-1)[::64] *= 100
    error = (decode(encode(tensor, CodingPlan("int8", 64))) - tensor).norm() / tensor.norm()
    assert sample_of(tensor).int8_error == pytest.approx(float(error), rel=0.3)


@pytest.mark.parametrize("channel", [0, 100, 1500, 2047])
def test_a_sample_sees_an_outlier_in_whatever_channel_it_is(channel: int) -> None:
    tensor = torch.ones(512, 2048)
    tensor[:, channel] = 1000.0
    assert sample_of(tensor).crest == pytest.approx(64, rel=0.1)
    assert sample_of(tensor[:, :2047]).crest == pytest.approx(64 if channel < 2047 else 1, rel=0.1)


def test_samples_of_nothing_of_zeros_of_numbers_and_of_extremes() -> None:
    assert sample_of(torch.zeros(0)).crest == 0.0
    assert sample_of(torch.zeros(1000)).crest == 0.0
    assert sample_of(torch.arange(1000)).crest == 0.0
    assert sample_of(torch.tensor(3.0)).crest == 1.0
    assert sample_of(torch.full((70,), 1e38)).crest == pytest.approx(1.0)
    assert sample_of(torch.full((70,), 1e-30)).crest == pytest.approx(1.0)
    assert math.isnan(sample_of(torch.full((70,), math.nan)).crest)
    assert sample_of(values(100, 100).t()).crest == sample_of(values(100, 100).t().contiguous()).crest
