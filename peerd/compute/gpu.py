"""Threads and a CUDA device: a context before the first product, waiting until it is done, and memory, free or lacking.

Torch hands work to a GPU and goes on. Here a job of the device's worker ends when the device has done it, so that its
time can be told, an error is its own, and whoever copies its result need not wait for the job after it.
"""

from __future__ import annotations

from typing import Final

import torch

_CUDA: Final = "cuda"


def is_gpu(device: str | torch.device) -> bool:
    """True for a CUDA device."""
    return str(device).startswith(_CUDA)


def wake(device: str | torch.device) -> None:
    """Give this thread, and autograd's of this device, their context: torch warns when a product comes first."""
    if is_gpu(device) and torch.cuda.is_available():
        one = torch.ones(1, device=device, requires_grad=True)
        (one * one).sum().backward()  # type: ignore[no-untyped-call]


def settle(device: str | torch.device) -> None:
    """Wait until the device has done all that computing has asked of it. RuntimeError tells what went wrong there."""
    if is_gpu(device) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_stream(torch.device(device)).synchronize()


def lacks_memory(error: BaseException) -> bool:
    """True where a computation failed since its device, or this machine, had no memory left for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no type for that


def free_bytes(device: str | torch.device) -> tuple[int, int]:
    """The bytes that can still be allocated on a GPU, and the most that this process may take of it.

    What torch holds and does not use counts as free; a limit that was set (`limits.memory_gb`) counts.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # older torch has none
    most = int(share * total)
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, most - used)), most
