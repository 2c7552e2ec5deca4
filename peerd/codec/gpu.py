"""Helpers for CUDA devices: creating a context, waiting for completion, free memory, and out-of-memory errors.

Torch enqueues work on a GPU and returns at once. In peerd a job of the device's worker ends when the device has
finished it, so that its time can be measured, its errors are not attributed to another job, and readers of its result
do not wait for the next job.
"""

from __future__ import annotations

from typing import Final

import torch

_CUDA: Final = "cuda"


def is_gpu(device: str | torch.device) -> bool:
    """True for a CUDA device."""
    return str(device).startswith(_CUDA)


def wake(device: str | torch.device) -> None:
    """Create the CUDA context in this thread and in autograd's thread: torch warns if a matrix product comes first."""
    if is_gpu(device) and torch.cuda.is_available():
        one = torch.ones(1, device=device, requires_grad=True)
        (one * one).sum().backward()  # type: ignore[no-untyped-call]


def settle(device: str | torch.device) -> None:
    """Wait until the device has finished the default stream's work. Raises RuntimeError if that work failed."""
    if is_gpu(device) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_stream(torch.device(device)).synchronize()


def lacks_memory(error: BaseException) -> bool:
    """True if a computation failed because its device, or this machine, was out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no exception type for it


def free_bytes(device: str | torch.device) -> tuple[int, int]:
    """Bytes that can still be allocated on a GPU, and the most that this process may use.

    Memory that torch has cached but does not use counts as free. A limit that was set (`limits.memory_gb`) applies.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # older torch lacks it
    most = int(share * total)
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, most - used)), most
