"""Detection of ciphers that the processor has in hardware.

A guess that is wrong costs speed only: both ciphers that a link may use are always there.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_CPUINFO_BYTES: Final = 16 * 1024  # more than the first processor's entry
# Of x86 and of ARM: AES itself, and the multiplication without carry that GCM needs.
_FLAGS: Final = ({"aes", "pclmulqdq"}, {"aes", "pmull"})


@cache
def has_aes() -> bool:
    """True when AES-GCM runs in hardware, where it is faster than ChaCha20; False where nobody says."""
    if sys.platform == "darwin":
        return platform.machine() in ("arm64", "x86_64")  # each that Python still runs on
    try:
        with _CPUINFO.open() as file:
            return tells_aes(file.read(_CPUINFO_BYTES))
    except (OSError, UnicodeDecodeError):
        return False


def tells_aes(cpuinfo: str) -> bool:
    """True when Linux's description of the first processor lists the instructions for AES-GCM."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return any(flags <= set(value.split()) for flags in _FLAGS)
    return False
