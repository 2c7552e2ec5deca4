"""The frames that a call with a microbatch may bring, by their headers."""

from __future__ import annotations

import pytest

from peerd.codec.format.frame import FrameHeader
from peerd.core.keys import Keypair
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.run.runfile import ModelSection, PipelineSection, RunFile
from tests.kit.declared import declared

RUN = RunFile(
    run="shapes", model=ModelSection(d_model=16, heads=2, layers=2, context=32), pipeline=PipelineSection(microbatch=4)
)
PEER = Keypair.from_seed(b"p" * 32).peer_id


def fault(dtype: str, *shape: int) -> str:
    found = MicrobatchShapes(RUN).objection(PEER, [FrameHeader("uint8", (1, 1), "none", 1), _header(dtype, shape)])
    return "" if found is None else str(found)


def _header(dtype: str, shape: tuple[int, ...]) -> FrameHeader:
    return FrameHeader(dtype, shape, "none", 0)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_tokens_of_a_microbatch_or_less_are_taken(dtype: str) -> None:
    assert fault(dtype, 4, 32) == fault(dtype, 1, 1) == fault("float32", 4, 32, 16) == ""


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("uint8", (5, 32), "a frame of 5 samples; allowed: 4 samples"),
        ("uint8", (6000, 64), "a frame of 6000 samples"),
        ("float32", (5, 32, 16), "a frame of 5 samples"),
        ("uint8", (0, 32), "a frame of 0 samples"),
        ("uint8", (4, 33), "up to 32 tokens"),
        ("uint8", (1, 1 << 27), "up to 32 tokens"),
        ("float32", (4, 0, 16), "up to 32 tokens"),
        ("float32", (4, 32, 17), r"expected \[samples, tokens\] or float32 \[samples, tokens, 16\]"),
        ("float32", (4, 32), "expected"),
        ("float64", (4, 32, 16), "expected"),
        ("uint8", (4, 32, 16), "expected"),
        ("uint8", (4,), "expected"),
        ("uint8", (), "expected"),
    ],
)
def test_what_no_microbatch_has_is_refused(dtype: str, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(fault(dtype, *shape))


def test_limits_are_those_of_two_activations() -> None:
    limits = MicrobatchShapes(RUN).bound(declared(calls_per_peer=3))
    assert (limits.frames, limits.rows, limits.calls_per_peer) == (2, 4, 3)
    both = 2 * 4 * 32 * 16 * 4
    assert limits.objection(0, 2, both, 4) is None
    assert limits.objection(0, 2, both, 5) == "a frame of 5 samples; allowed: 4 samples"
    assert limits.objection(0, 2, 2 * both, 4) is not None
