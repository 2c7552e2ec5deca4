"""Computing devices of this machine: describes them for `peerd doctor`, and rejects a device that does not exist.

Computes one small product, to check that the device works.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peerd.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a device that works."""

    name: str
    torch_version: str
    threads: int  # used by torch for one operation on the CPU
    memory_bytes: int | None  # of a GPU, else None


def describe(device: str) -> DeviceFacts:
    """Test the device and describe it; ConfigError explains in one sentence what is wrong."""
    _refuse_missing(device)
    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum())
    except RuntimeError as error:
        raise ConfigError(f"device {device} does not work: {str(error).splitlines()[0]}") from error
    if total != 512.0:
        raise ConfigError(f"device {device} is faulty: a product of 8 x 8 ones sums to {total}, not 512")
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = device, None
    return DeviceFacts(name, torch.__version__, torch.get_num_threads(), memory)


def _refuse_missing(device: str) -> None:
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
            raise ConfigError(f"device {device} is not available: {built}; use --device cpu")
        count = torch.cuda.device_count()
        number = int(device.partition(":")[2] or 0)
        if number >= count:
            raise ConfigError(f"device {device} is not available: there are {count}, cuda:0 to cuda:{count - 1}")
    elif device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps is not available on this machine; use --device cpu")
