"""Detection of AES support in the CPU, for the choice of a link's cipher.

A wrong result only costs speed, since both ciphers are always available.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_CPUINFO_BYTES: Final = 16 * 1024  # more than the first processor's entry
# On x86 and on ARM: AES, and the carry-less multiplication that GCM needs.
_FLAGS: Final = ({"aes", "pclmulqdq"}, {"aes", "pmull"})


@cache
def has_aes() -> bool:
    """True if the CPU supports AES-GCM, which is then faster than ChaCha20. False if unknown."""
    if sys.platform == "darwin":
        return platform.machine() in ("arm64", "x86_64")  # all Macs that Python supports have it
    try:
        with _CPUINFO.open() as file:
            return tells_aes(file.read(_CPUINFO_BYTES))
    except (OSError, UnicodeDecodeError):
        return False


def tells_aes(cpuinfo: str) -> bool:
    """True if `cpuinfo` (/proc/cpuinfo of Linux) lists the instructions for AES-GCM for the first CPU."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return any(flags <= set(value.split()) for flags in _FLAGS)
    return False
