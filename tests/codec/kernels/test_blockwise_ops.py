"""The torch operators of blockwise quantization: the reference's bits for any tensor, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES
from peerd.codec.kernels import native, ops, reference
from peerd.codec.kernels.reference import CodingOutputs
from tests.kit.blockwise_cases import DTYPES, INFINITY, NAMES, NAN, bits_of, from_bits, normal, same_bits

QUANTIZE = torch.ops.peerd.quantize_blockwise
DEQUANTIZE = torch.ops.peerd.dequantize_blockwise
SCALES = torch.ops.peerd.block_scales


@pytest.fixture(params=["native", "reference"])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(native.why_not())


both = pytest.mark.usefixtures("_implementation")


def coded(x: Tensor, code: str, block: int = 64) -> tuple[Tensor, Tensor]:
    """As the reference codes the values in C order."""
    return reference.quantize(x.detach().contiguous(), code, block)


def decoded(x: Tensor, code: str, block: int = 64) -> Tensor:
    """As the reference decodes what it coded, in the shape and dtype of x."""
    return reference.dequantize(*coded(x, code, block), code, block, torch.empty(x.shape, dtype=x.dtype))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: normal(960, 1).view(4, 5, 48),
    "transposed": lambda: normal(960, 1).view(30, 32).t(),
    "permuted": lambda: normal(960, 1).view(4, 5, 48).permute(2, 0, 1),
    "every second": lambda: normal(961, 1)[1::2],
    "channels last": lambda: normal(960, 1).view(2, 5, 12, 8).to(memory_format=torch.channels_last),
    "expanded": lambda: normal(30, 1).view(30, 1).expand(30, 40),
    "at an odd offset": lambda: normal(1001, 1)[3:],
    "of no dimension": lambda: normal(1, 1).view(()),
    "empty": lambda: torch.empty(0),
    "empty with a shape": lambda: torch.empty(3, 0, 2),
    "negated lazily": lambda: torch.complex(normal(99, 1), normal(99, 2)).conj().imag,
}


# --- what they compute ----------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", NAMES)
def test_a_tensor_of_any_layout_is_coded_in_c_order(code: str, dtype: torch.dtype) -> None:
    for layout, made in LAYOUTS.items():
        x = made() if layout == "negated lazily" else made().to(dtype)
        codes, scales = QUANTIZE(x, code, 64)
        assert all(map(same_bits, (codes, scales), coded(x, code))), layout
        assert same_bits(SCALES(x, 64), scales), layout
        back = DEQUANTIZE(codes, scales, code, 64, x.shape, x.dtype)
        assert back.is_contiguous(), layout
        assert same_bits(back, decoded(x, code)), layout


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", NAMES)
def test_given_buffers_are_written_and_nothing_beside_them(code: str, dtype: torch.dtype) -> None:
    x = normal(1001, 1, 1.0, dtype)
    codes, scales = coded(x, code)
    room, scale_room = torch.full((len(codes) + 32,), 77, dtype=torch.uint8), torch.full((len(scales) + 16,), 5.0)
    inner, inner_scales = room[16 : 16 + len(codes)], scale_room[8 : 8 + len(scales)]
    assert QUANTIZE.out(x, code, 64, codes=inner, scales=inner_scales) is None
    assert all(map(same_bits, (inner, inner_scales), (codes, scales)))
    assert set(room[:16].tolist() + room[16 + len(codes) :].tolist()) == {77}
    assert set(scale_room[:8].tolist() + scale_room[8 + len(scales) :].tolist()) == {5.0}
    out = torch.full((1033,), 9.0, dtype=dtype)
    assert DEQUANTIZE.out(codes, scales, code, 64, out=out[16:-16]) is None
    assert same_bits(out[16:-16], decoded(x, code))
    assert set(out[:16].tolist() + out[-16:].tolist()) == {9.0}


@both
@pytest.mark.parametrize("code", NAMES)
def test_decoding_into_a_tensor_that_is_not_contiguous_fills_it_in_c_order(code: str) -> None:
    x = normal(960, 1).view(30, 32)
    codes, scales = coded(x, code)
    for out in (torch.zeros(32, 30).t(), torch.zeros(30, 64)[:, ::2], torch.zeros(60, 32)[::2]):
        DEQUANTIZE.out(codes, scales, code, 64, out=out)
        assert same_bits(out.contiguous(), decoded(x, code))


@both
@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize("code", NAMES)
def test_codes_that_come_from_any_place_in_a_received_buffer_are_decoded(code: str, block: int) -> None:
    x = normal(5003, 1)
    codes, scales = coded(x, code, block)
    for offset in (1, 2, 3):
        buffer = bytearray(offset) + codes.numpy().tobytes()
        received = torch.frombuffer(buffer, dtype=torch.uint8)[offset:]
        assert same_bits(DEQUANTIZE(received, scales, code, block, x.shape, x.dtype), decoded(x, code, block))


@both
def test_a_block_that_cannot_be_coded_shows_in_the_scales() -> None:
    for bad in (INFINITY, NAN, 0x7F7FFFFF):
        x = normal(300, 1)
        assert ops.all_coded(QUANTIZE(x, "int8", 64)[1])
        x[200] = from_bits([bad])[0]
        _, scales = QUANTIZE(x, "int8", 64)
        assert not ops.all_coded(scales)
        assert bits_of(scales)[3] == bad
    assert ops.all_coded(torch.empty(0))


def test_without_the_compiled_kernels_the_reference_serves_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, x = torch.device("cpu"), normal(3001, 1)
    first = [QUANTIZE(x, code, 64) for code in NAMES]
    assert ops.best(cpu) is (native if native.available() else reference)
    monkeypatch.setattr(native, "available", lambda: False)
    assert ops.best(cpu) is reference
    for code, results in zip(NAMES, first, strict=True):
        assert all(map(same_bits, QUANTIZE(x, code, 64), results))


def test_many_threads_may_code_at_once() -> None:
    inputs = [normal(20_000, seed) for seed in range(16)]

    def work(x: Tensor) -> bool:
        return all(
            same_bits(DEQUANTIZE(*QUANTIZE(x, code, 64), code, 64, x.shape, x.dtype), decoded(x, code))
            for code in NAMES
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, inputs))


# --- what they refuse -----------------------------------------------------------------------------------------------
X = torch.ones(100)
CODES_100, SCALES_2 = torch.zeros(100, dtype=torch.uint8), torch.ones(2)
BUFFERS = {"codes": CODES_100, "scales": SCALES_2}
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "an unknown code": ("unknown code 'int3'; allowed: dynamic8, int8", lambda: QUANTIZE(X, "int3", 64)),
    "an odd block": ("block size of 100; allowed: 64, 128", lambda: QUANTIZE(X, "int8", 100)),
    "a block of nothing": ("block size of 0", lambda: QUANTIZE(X, "int8", 0)),
    "a block that is too small": ("block size of 32", lambda: QUANTIZE(X, "int8", 32)),
    "a block that is too large": ("block size of 8192", lambda: SCALES(X, 8192)),
    "doubles": ("values of torch.float64", lambda: QUANTIZE(X.double(), "int8", 64)),
    "whole numbers": ("values of torch.int32", lambda: SCALES(X.int(), 64)),
    "doubles to decode to": ("float64", lambda: DEQUANTIZE(CODES_100, SCALES_2, "int8", 64, [100], torch.float64)),
    "an unknown code to decode": ("int3", lambda: DEQUANTIZE(CODES_100, SCALES_2, "int3", 64, [100], torch.float32)),
    "an odd block to decode": ("100", lambda: DEQUANTIZE.out(CODES_100, SCALES_2, "int8", 100, out=X)),
    "too few codes": (
        "codes for 100 values must be 100 contiguous torch.uint8, not 99 of torch.uint8",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100[1:], scales=SCALES_2),
    ),
    "too many codes": ("codes for 100 values must be 50", lambda: QUANTIZE.out(X, "nf4", 64, **BUFFERS)),
    "too few scales": (
        "scales for 100 values must be 2",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100, scales=SCALES_2[1:]),
    ),
    "signed codes": (
        "not 100 of torch.int8",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100.to(torch.int8), scales=SCALES_2),
    ),
    "half scales": (
        "not 2 of torch.float16",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100, scales=SCALES_2.half()),
    ),
    "codes with gaps": (
        "contiguous",
        lambda: QUANTIZE.out(X, "int8", 64, codes=torch.zeros(200, dtype=torch.uint8)[::2], scales=SCALES_2),
    ),
    "a shape that does not fit the codes": (
        "codes for 101 values",
        lambda: DEQUANTIZE(CODES_100, SCALES_2, "int8", 64, [101], torch.float32),
    ),
    "more scales than blocks": (
        "scales for 100 values must be 1 contiguous",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2, "int8", 128, out=torch.empty(100)),
    ),
    "more codes than values": (
        "codes for 100 values must be 100 contiguous torch.uint8, not 101",
        lambda: DEQUANTIZE.out(torch.zeros(101, dtype=torch.uint8), SCALES_2, "int8", 64, out=torch.empty(100)),
    ),
    "fewer scales than blocks": (
        "scales for 100 values must be 2 contiguous",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2[:1], "int8", 64, out=torch.empty(100)),
    ),
    "more scales than values need": (
        "scales for 100 values must be 2",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100, scales=torch.zeros(3)),
    ),
    "double scales": (
        "not 2 of torch.float64",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100, scales=SCALES_2.double()),
    ),
    "half scales to decode": (
        "not 2 of torch.float16",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2.half(), "int8", 64, out=torch.empty(100)),
    ),
    "codes with gaps to decode": (
        "contiguous",
        lambda: DEQUANTIZE.out(torch.zeros(200, dtype=torch.uint8)[::2], SCALES_2, "int8", 64, out=torch.empty(100)),
    ),
    "whole numbers to decode to": (
        "values of torch.int32",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2, "int8", 64, out=torch.zeros(100, dtype=torch.int32)),
    ),
    "more values than codes": (
        "codes for 102 values must be 102",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2, "int8", 64, out=torch.empty(102)),
    ),
    "codes elsewhere": (
        "codes are on meta, the values on cpu",
        lambda: QUANTIZE.out(X, "int8", 64, codes=CODES_100.to("meta"), scales=SCALES_2),
    ),
    "scales elsewhere": (
        "scales are on meta, the values on cpu",
        lambda: DEQUANTIZE.out(CODES_100, SCALES_2.to("meta"), "int8", 64, out=torch.empty(100)),
    ),
}


@both
@pytest.mark.parametrize("wrong", REFUSED)
def test_a_wrong_argument_is_refused_in_words(wrong: str) -> None:
    words, call = REFUSED[wrong]
    with pytest.raises(ValueError, match=words):
        call()


SINGLES = {
    "half precision": ("expected contiguous float32 of shape .* not .* of torch.float16", X.half()),
    "two dimensions": (r"of shape \[100\] on the CPU, not \[10, 10\]", X.view(10, 10)),
    "gaps": ("expected contiguous", torch.zeros(200)[::2]),
    "another length": (r"of shape \[\d+\] on the CPU, not \[\d+\]", torch.zeros(99)),
    "another device": ("on the CPU, not .* on meta", X.to("meta")),
}


@both
@pytest.mark.parametrize("wrong", SINGLES)
@pytest.mark.parametrize("place", ["missed", "seen", "base"])
def test_what_is_summed_in_one_pass_must_be_plain(wrong: str, place: str) -> None:
    words, tensor = SINGLES[wrong]
    if place == "base":
        call = partial(ops.dequantize_onto, CODES_100, SCALES_2, "int8", 64, base=tensor, out=X.clone())
    else:
        places = {"missed": X.clone(), "seen": X.clone(), place: tensor}
        call = partial(
            ops.quantize_missing, X, "int8", 64, codes=CODES_100, scales=SCALES_2, beside=CodingOutputs(**places)
        )
    with pytest.raises(ValueError, match=words):
        call()


@both
@pytest.mark.parametrize("wrong", ["half precision", "two dimensions"])
def test_only_plain_values_are_summed_in_one_pass(wrong: str) -> None:
    tensor = SINGLES[wrong][1]
    with pytest.raises(ValueError, match="expected contiguous float32"):
        ops.quantize_missing(tensor, "int8", 64, codes=CODES_100, scales=SCALES_2, beside=CodingOutputs())
    with pytest.raises(ValueError, match="expected contiguous float32"):
        ops.dequantize_onto(CODES_100, SCALES_2, "int8", 64, base=X, out=tensor)


@both
@pytest.mark.parametrize("code", NAMES)
def test_one_pass_gives_what_three_give(code: str) -> None:
    x, before = normal(5001, 1), normal(5001, 2)
    (codes, scales), expected = coded(x, code), decoded(x, code)
    found, missed = (torch.empty_like(codes), torch.empty_like(scales)), before.clone()
    ops.quantize_missing(x, code, 64, codes=found[0], scales=found[1], beside=CodingOutputs(missed, True, x))
    assert all(map(same_bits, (*found, x), (codes, scales, expected)))
    ops.dequantize_onto(codes, scales, code, 64, base=before, out=before)
    assert same_bits(before, normal(5001, 2) + expected)
    assert same_bits(missed, normal(5001, 2) + (normal(5001, 1) - expected))


# --- as operators of torch ------------------------------------------------------------------------------------------
CHECKED = pytest.mark.parametrize("code", ["dynamic8", "nf4"])


@pytest.mark.slow
@CHECKED
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_finds_nothing_wrong_with_the_operators(code: str, requires_grad: bool) -> None:
    x = normal(999, 1).view(27, 37).requires_grad_(requires_grad)
    codes, scales = coded(x, code)
    found = [
        torch.library.opcheck(QUANTIZE.default, (x, code, 64)),
        torch.library.opcheck(QUANTIZE.out, (x, code, 64), {"codes": codes.clone(), "scales": scales.clone()}),
        torch.library.opcheck(DEQUANTIZE.default, (codes, scales, code, 64, [37, 27], torch.bfloat16)),
        torch.library.opcheck(DEQUANTIZE.out, (codes, scales, code, 64), {"out": torch.empty(999)}),
        torch.library.opcheck(SCALES.default, (x, 64)),
    ]
    assert all(set(result.values()) == {"SUCCESS"} for result in found)


def there_and_back(x: Tensor, code: str) -> Tensor:
    codes, scales = QUANTIZE(x * 2, code, 64)
    back: Tensor = DEQUANTIZE(codes, scales, code, 64, x.shape, x.dtype)
    return back + 1


def into_buffers(x: Tensor, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    QUANTIZE.out(x, "int8", 64, codes=codes, scales=scales)
    DEQUANTIZE.out(codes, scales, "int8", 64, out=out)
    return out * 2


@pytest.mark.slow
@CHECKED
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_computes_the_same(code: str, dynamic: bool) -> None:
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for count in (640, 999) if dynamic else (999,):
        x = normal(count, 1)
        assert same_bits(compiled(x, code), there_and_back(x, code))


@pytest.mark.slow
def test_a_compiled_function_writes_into_given_buffers() -> None:
    x = normal(640, 1)
    compiled = torch.compile(into_buffers, fullgraph=True, backend="aot_eager")
    results = []
    for function in (into_buffers, compiled):
        buffers = torch.zeros(640, dtype=torch.uint8), torch.zeros(10), torch.zeros(640)
        results.append((function(x, *buffers), *buffers))
    assert all(map(same_bits, *results))


def test_results_of_tensors_that_require_gradients_do_not() -> None:
    x = normal(100, 1).requires_grad_()
    codes, scales = QUANTIZE(x, "int8", 64)
    back = DEQUANTIZE(codes, scales, "int8", 64, x.shape, x.dtype)
    assert not any(result.requires_grad for result in (codes, scales, back, SCALES(x, 64)))
    assert all(map(same_bits, (codes, scales), coded(x, "int8")))
    into = torch.zeros(2)
    QUANTIZE.out(x, "int8", 64, codes=torch.zeros(100, dtype=torch.uint8), scales=into)
    assert not into.requires_grad


@both
@pytest.mark.parametrize("written", ["scales", "out"])
def test_a_buffer_that_autograd_saved_is_known_to_have_changed(written: str) -> None:
    weight, scales, out = torch.ones(1, requires_grad=True), torch.ones(2), torch.ones(100)
    loss = (weight * (scales if written == "scales" else out)).sum()
    codes = torch.zeros(100, dtype=torch.uint8)
    QUANTIZE.out(X, "int8", 64, codes=codes, scales=scales)
    DEQUANTIZE.out(codes, scales, "int8", 64, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_work_where_gradients_are_off(mode: Callable[[], Any]) -> None:
    x = normal(100, 1).requires_grad_()
    with mode():
        codes, scales = QUANTIZE(x, "nf4", 64)
        back = DEQUANTIZE(codes, scales, "nf4", 64, x.shape, x.dtype)
        DEQUANTIZE.out(codes, scales, "nf4", 64, out=back)
    assert same_bits(back, decoded(x, "nf4"))


@pytest.mark.parametrize("code", NAMES)
def test_on_the_meta_device_they_tell_shapes_and_dtypes(code: str) -> None:
    x = torch.empty(3, 335, device="meta", dtype=torch.bfloat16)
    codes, scales = QUANTIZE(x, code, 128)
    assert (codes.device.type, codes.dtype, codes.numel()) == ("meta", torch.uint8, -(-1005 * CODES[code].bits // 8))
    assert (scales.dtype, scales.shape) == (torch.float32, (8,))
    back = DEQUANTIZE(codes, scales, code, 128, x.shape, torch.float16)
    assert (back.shape, back.dtype, back.device.type) == (x.shape, torch.float16, "meta")
    assert SCALES(x, 128).shape == (8,)
    with pytest.raises(ValueError, match="codes for 1005 values"):
        DEQUANTIZE(codes[1:], scales, code, 128, [1005], torch.float32)
