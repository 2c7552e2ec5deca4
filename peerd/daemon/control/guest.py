"""A volunteer's limits on its own machine: merges command line options with the run file, and applies them.

The limits are local and never sent. This module sets the priority and the libraries' number of threads, and reads the
memory in use. `wire/tcp/rate_limit` limits the network, `daemon/control/open_hours` the hours, `model/worker` the
processor time. Imports no torch, since `obey` must be called before any library starts threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from peerd.core.errors import ConfigError
from peerd.run.check import limits_faults
from peerd.run.runfile import LimitsSection

GUEST_NICE: Final = 10  # other programs run first; costs nothing on an idle machine
GB: Final = 10**9
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_BELOW_NORMAL, _IDLE = 0x4000, 0x40  # Windows' classes of priority
_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFlags:
    """Limits from the command line. None means that the option was not used."""

    upload_mbit: float | None = None
    download_mbit: float | None = None
    threads: int | None = None
    nice: int | None = None
    memory_gb: float | None = None
    hours: str | None = None
    trust: list[str] | None = None
    disk_gb: float | None = None

    def over(self, limits: LimitsSection) -> LimitsSection:
        """`limits` with the values of the given flags. Raises ConfigError for the first invalid flag."""
        given = {key: value for key in self.__slots__ if (value := getattr(self, key)) is not None}
        for key, message in limits_faults(structs.replace(LimitsSection(), **given)):
            raise ConfigError(f"--{key.replace('_', '-')} {message}")
        return structs.replace(limits, **given)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Options of `peerd join peerd://...`. Only these may allow code and files of this machine."""

    yes: bool = False
    data: str | None = None
    token: str | None = None
    allow_code: tuple[str, ...] = ()
    tokenizer: str | None = None


def settled(limits: LimitsSection, roles: list[str]) -> LimitsSection:
    """`limits` with the default niceness of the roles. Raises ConfigError if a backbone has hours."""
    if "backbone" in roles and limits.hours:
        raise ConfigError(
            f"hours {limits.hours} are set, but a backbone must always run, as others join through it; leave them out"
        )
    if limits.nice is not None:
        return limits
    return structs.replace(limits, nice=0 if "backbone" in roles else GUEST_NICE)


def obey(limits: LimitsSection) -> None:
    """Set the priority of this process, and the number of threads that libraries will start."""
    if limits.nice:
        _be_nice(limits.nice)
    if limits.threads:
        os.environ.update(dict.fromkeys(_THREADS, str(limits.threads)))


def _be_nice(nice: int) -> None:
    if sys.platform == "win32":
        import ctypes

        kernel = ctypes.windll.kernel32
        kernel.SetPriorityClass(kernel.GetCurrentProcess(), _IDLE if nice >= 15 else _BELOW_NORMAL)
        return
    with contextlib.suppress(OSError):  # some systems forbid it; status shows the actual value
        # A process that was started with a higher niceness keeps it: lowering it needs a privilege.
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def niceness() -> int | None:
    """The niceness of this process. Returns None on Windows, which has none."""
    return None if sys.platform == "win32" else os.getpriority(os.PRIO_PROCESS, 0)


def resident_bytes() -> int | None:
    """Resident memory of this process. Returns None if the system does not report it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def limits_told(limits: LimitsSection, rests_until: str | None = None) -> dict[str, Any]:
    """Plain data for `peerd status`: each limit, its use if known, and all of it as `text`."""
    held, nice = resident_bytes(), niceness()
    told: dict[str, Any] = {
        "upload_mbit": limits.upload_mbit or None,
        "download_mbit": limits.download_mbit or None,
        "threads": limits.threads or None,
        "nice": nice,
        "memory_gb": limits.memory_gb or None,
        "memory_used_gb": round(held / GB, 3) if held is not None else None,
        "hours": limits.hours or None,
        "rests_until": rests_until,
    }
    return told | {"text": _text(told)}


def _text(told: Mapping[str, Any]) -> str:
    used, most = told["memory_used_gb"], told["memory_gb"]
    held = "" if used is None else f"{used:.1f} of "
    parts = [f"{way} {told[key]:g} Mb/s" for way, key in _WAYS if told[key]]
    if told["threads"]:
        parts.append(f"{told['threads']} thread{'s' * (told['threads'] > 1)}")
    parts += [f"nice {told['nice']}"] if told["nice"] else []
    parts += [f"memory {held}{most:g} GB"] if most else []
    parts += [f"hours {told['hours']}"] if told["hours"] else []
    parts += [f"rests until {told['rests_until']}"] if told["rests_until"] else []
    return ", ".join(parts) or "none"


_WAYS: Final = (("upload", "upload_mbit"), ("download", "download_mbit"))
