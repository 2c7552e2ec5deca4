"""Hint for peers that leave an NVIDIA GPU idle. Does not import torch, which takes seconds to load."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

GPUS: Final = Path("/proc/driver/nvidia/gpus")  # Linux: a folder for each GPU, where the driver is loaded


def idle_gpu(device: str) -> str:
    """Hint, in one sentence, for a peer that computes on `device`. Returns "" if it leaves no GPU idle."""
    with contextlib.suppress(OSError):
        if device == "cpu" and any(GPUS.iterdir()):
            return "this machine has an NVIDIA GPU; with --device cuda, peerd computes on it"
    return ""
