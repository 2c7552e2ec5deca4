"""A hint at an NVIDIA GPU that a peer leaves idle. Torch is not asked, which takes seconds to load."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

GPUS: Final = Path("/proc/driver/nvidia/gpus")  # Linux: a folder for each GPU, where the driver is loaded


def idle_gpu(device: str) -> str:
    """One sentence for a peer that computes on `device`; "" where there is nothing to say."""
    with contextlib.suppress(OSError):
        if device == "cpu" and any(GPUS.iterdir()):
            return "this machine has an NVIDIA GPU; with --device cuda, peerd computes on it"
    return ""
