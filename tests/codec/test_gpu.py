"""The room on a GPU, and jobs of its worker that end when it has done them."""

from __future__ import annotations

import pytest
import torch

from peerd.codec import gpu
from peerd.core.errors import NoMemory
from peerd.model.worker import DeviceWorker

GB = 1_000_000_000


class Memory:
    """A GPU of 80 GB, as torch would tell of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int, share: float) -> None:
        facts = {"memory_reserved": reserved, "memory_allocated": allocated, "get_per_process_memory_fraction": share}
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80 * GB))
        for name, value in facts.items():
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value, raising=False)


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, free=10 * GB, reserved=50 * GB, allocated=20 * GB, share=1.0)
    assert gpu.free_bytes("cuda:0") == (40 * GB, 80 * GB)


def test_no_more_is_free_than_a_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, free=70 * GB, reserved=8 * GB, allocated=6 * GB, share=0.1)
    assert gpu.free_bytes("cuda:0") == (2 * GB, 8 * GB)
    Memory(monkeypatch, free=70 * GB, reserved=9 * GB, allocated=9 * GB, share=0.1)
    assert gpu.free_bytes("cuda:0") == (0, 8 * GB)


def test_a_processor_needs_no_waiting() -> None:
    assert not gpu.is_gpu("cpu")
    assert gpu.is_gpu(torch.device("cuda", 1))
    gpu.wake("cpu")
    gpu.settle("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
async def test_a_job_on_a_gpu_ends_when_the_gpu_has_done_it() -> None:
    async with DeviceWorker("cuda:0") as worker:
        factor = await worker.run(lambda: torch.randn(8192, 8192, device="cuda"), name="a matrix")

        def job() -> torch.Tensor:
            for _ in range(20):
                found = factor @ factor
            return found

        await worker.run(job, name="products")
        assert torch.cuda.default_stream().query()
        assert worker.busy_s > 0.005  # 22 teraflop


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
async def test_a_job_that_finds_no_memory_on_a_gpu_says_so_and_the_next_one_is_done() -> None:
    async with DeviceWorker("cuda:0") as worker:
        with pytest.raises(NoMemory, match="there is no memory for the job “too much”: CUDA out of memory"):
            await worker.run(lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"), name="too much")
        assert (await worker.run(lambda: torch.ones(3, device="cuda").sum(), name="little")).item() == 3
