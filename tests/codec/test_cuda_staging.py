"""Copies between a device and payloads in the order that a stream keeps, on a lane that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peerd.codec import cuda_staging, frames
from peerd.codec.cuda_staging import SLOT_BYTES, SLOTS, download, upload
from peerd.codec.format.frame import TensorFrame
from peerd.codec.layout import NotFinite
from peerd.codec.policy import CodingPlan

COPY = torch.ops.aten.copy_.default
SIZES = [1, 1000, SLOT_BYTES - 4, SLOT_BYTES, SLOT_BYTES + 4, SLOTS * SLOT_BYTES, (2 * SLOTS + 1) * SLOT_BYTES + 4]


class LateLane:
    """A device's stream on the CPU that copies only when somebody waits, or when a later operation needs it."""

    def __init__(self) -> None:
        self._late: list[Callable[[], object]] = []
        self.followed: list[Tensor] = []
        self.led: list[Tensor] = []
        self.waited: list[bool] = []  # for computing, at each `follow`
        self.most_slots = 0

    def active(self) -> AbstractContextManager[object]:
        return self._active()

    @contextmanager
    def _active(self) -> Iterator[None]:
        lane = self

        class Late(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is COPY:
                    lane._late.append(lambda: function(*args, **(kwargs or {})))
                    return args[0]
                if not function.is_view:
                    lane.catch_up(len(lane._late))
                return function(*args, **(kwargs or {}))

        with Late():
            yield

    def catch_up(self, count: int) -> None:
        due, self._late = self._late[:count], self._late[count:]
        for copy in due:
            copy()

    def follow(self, *sources: Tensor, computed: bool = False) -> None:
        self.followed += sources
        self.waited.append(not computed)

    def lead(self, *results: Tensor) -> None:
        self.catch_up(len(self._late))
        self.led += results

    def slot(self) -> Tensor:
        self.most_slots += 1
        return torch.full((SLOT_BYTES,), 0xEE, dtype=torch.uint8)

    def mark(self) -> Callable[[], None]:
        done = [*self._late]

        def wait() -> None:
            self.catch_up(sum(copy in done for copy in self._late))

        return wait


@pytest.fixture
def lane() -> LateLane:
    return LateLane()


def some_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_is_downloaded_is_what_was_there(lane: LateLane, size: int) -> None:
    source, target = some_bytes(size), torch.zeros(size, dtype=torch.uint8)
    done = 0
    for now in download(lane, source, target):
        assert done < now <= size
        assert torch.equal(target[:now], source[:now])
        done = now
    assert done == size
    assert lane.most_slots <= SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_is_uploaded_arrives_and_its_source_may_go(lane: LateLane, size: int) -> None:
    source, target = some_bytes(size), torch.zeros(size, dtype=torch.uint8)
    expected = source.clone()
    upload(lane, source, target)
    source.zero_()
    lane.lead(target)
    assert torch.equal(target, expected)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["none", "bf16", "fp16", "dynamic8", "int8", "int4", "nf4", "fp8-e4m3"])
@pytest.mark.parametrize("count", [1, 1001, (5 << 20) + 3])
def test_a_device_makes_the_same_frames_and_tensors(lane: LateLane, code: str, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    expected = frames.encode(values, CodingPlan(code))
    payload = memoryview(bytearray(memoryview(expected.payload).nbytes))
    plan = CodingPlan(code, expected.block)
    done = [*cuda_staging.coded(values, plan, payload, "x", lane)]
    assert done == sorted(set(done))
    assert done[-1] == payload.nbytes
    assert bytes(payload) == bytes(expected.payload)
    assert any(source is values for source in lane.followed)

    def put_on(monkey: pytest.MonkeyPatch) -> Tensor:
        """Decode as for a GPU, on this lane."""
        monkey.setattr(torch, "device", lambda _: FakeCuda())
        monkey.setattr(cuda_staging, "lane_of", lambda _: lane)
        real = cuda_staging.decoded
        monkey.setattr(cuda_staging, "decoded", lambda make, _, lane: real(make, CPU, lane))
        return frames.decode(TensorFrame("float32", (count,), payload, code, plan.block), name="x", device="cuda")

    with pytest.MonkeyPatch.context() as monkey:
        found = put_on(monkey)
    assert torch.equal(found, frames.decode(expected))
    assert any(result is found for result in lane.led)


CPU = torch.device("cpu")


class FakeCuda:
    type = "cuda"


def test_what_the_device_has_done_waits_for_nothing_else_on_it(lane: LateLane) -> None:
    payload = memoryview(bytearray(4000))
    for computed in (False, True):
        [*cuda_staging.coded(torch.ones(1000), CodingPlan("none"), payload, "x", lane, computed)]
    assert lane.waited == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_a_real_device_codes_beside_what_it_computes_now() -> None:
    values, factor = torch.randn(4 << 20, device="cuda"), torch.randn(8192, 8192, device="cuda")
    frames.encode(values, CodingPlan("dynamic8"))  # the kernels are compiled once
    torch.cuda.synchronize()
    for _ in range(60):  # some seconds' worth in single precision
        factor @ factor
    encoding = frames.begin(values, CodingPlan("dynamic8"), computed=True)
    while not encoding.done:
        encoding.advance()
    assert not torch.cuda.default_stream().query(), "the product was waited for, or is too quick for this test"
    assert torch.equal(
        frames.decode(encoding.frame()), frames.decode(frames.encode(values.cpu(), CodingPlan("dynamic8")))
    )


def test_what_a_device_cannot_code_is_refused_before_anything_is_final(lane: LateLane) -> None:
    values = torch.ones(1000)
    values[700] = torch.inf
    payload = memoryview(bytearray(memoryview(frames.encode(torch.ones(1000), CodingPlan("int8")).payload).nbytes))
    with pytest.raises(NotFinite, match=r"the output has NaN or infinite values, first in block 10"):
        next(cuda_staging.coded(values, CodingPlan("int8", 64), payload, "the output", lane))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
@pytest.mark.parametrize("code", ["none", "bf16", "dynamic8", "int4"])
def test_a_real_device_makes_the_same_frames_and_tensors(code: str) -> None:
    values = torch.randn((9 << 20) + 3)
    expected = frames.encode(values, CodingPlan(code))
    frame = frames.encode(values.cuda(), CodingPlan(code))
    assert bytes(frame.payload) == bytes(expected.payload)
    found = frames.decode(frame, name="x", device="cuda")
    assert torch.equal(found.cpu(), frames.decode(expected))
