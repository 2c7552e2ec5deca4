"""A guest's limits on its own machine: merges flags with the run file, and has this process keep to them.

A volunteer's part, never sent. What bounds the network is `net/tcp/rate_limit`'s, the hours are `control/open_hours`'s,
processor time is kept by `compute/cpu_pace`; here are priority, threads of libraries, and memory as the system tells
it. Loads no torch: `obey` has to come before anything starts threads of its own.
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
from peerd.core.run.check import limits_faults
from peerd.core.run.runfile import LimitsSection

GUEST_NICE: Final = 10  # others' programs come first; on an idle machine it costs nothing
GB: Final = 10**9
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_BELOW_NORMAL, _IDLE = 0x4000, 0x40  # Windows' classes of priority
_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFlags:
    """Limits given on the command line; None: not given."""

    upload_mbit: float | None = None
    download_mbit: float | None = None
    threads: int | None = None
    nice: int | None = None
    memory_gb: float | None = None
    hours: str | None = None
    trust: list[str] | None = None
    disk_gb: float | None = None

    def over(self, limits: LimitsSection) -> LimitsSection:
        """`limits` with the flags in their place; ConfigError names the first flag that makes no sense."""
        given = {key: value for key in self.__slots__ if (value := getattr(self, key)) is not None}
        for key, message in limits_faults(structs.replace(LimitsSection(), **given)):
            raise ConfigError(f"--{key.replace('_', '-')} {message}")
        return structs.replace(limits, **given)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What the user gives beside a line `peerd://...`: only this may name code and files of this machine."""

    yes: bool = False
    data: str | None = None
    token: str | None = None
    allow_code: tuple[str, ...] = ()
    tokenizer: str | None = None


def settled(limits: LimitsSection, roles: list[str]) -> LimitsSection:
    """`limits` with what depends on the roles: a guest is nice, a backbone has no hours (ConfigError)."""
    if "backbone" in roles and limits.hours:
        raise ConfigError(
            f"hours {limits.hours} are given, but a backbone has to stay, as others join through it; leave them out"
        )
    if limits.nice is not None:
        return limits
    return structs.replace(limits, nice=0 if "backbone" in roles else GUEST_NICE)


def obey(limits: LimitsSection) -> None:
    """Have this process, and threads that it starts from now on, keep to priority and number of threads."""
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
    with contextlib.suppress(OSError):  # a system that forbids it; status shows what holds
        # A process that was started nicer stays so: going back takes a right that users have not.
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def niceness() -> int | None:
    """The priority that this process has, as `nice` counts it; None where the system counts otherwise."""
    return None if sys.platform == "win32" else os.getpriority(os.PRIO_PROCESS, 0)


def resident_bytes() -> int | None:
    """Memory that this process holds now; None where the system does not say."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def limits_told(limits: LimitsSection, rests_until: str | None = None) -> dict[str, Any]:
    """Plain data for `peerd status`: each limit, what is used of it where that is known, and `text`, for people."""
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
