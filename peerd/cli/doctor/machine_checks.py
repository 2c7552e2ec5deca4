"""Checks of this machine: packages, compute device, data directory and free disk space."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from peerd.cli.doctor.check_result import CheckResult, CheckVerdict, failed
from peerd.cli.doctor.idle_gpu import idle_gpu
from peerd.core.errors import ConfigError, missing_package
from peerd.core.version import VERSION
from peerd.run.home import IDENTITY_FILE, load_identity, locked, make_private_dir

_DISK_FAIL_BYTES: Final = 200 << 20  # not even one small checkpoint
_DISK_WARN_BYTES: Final = 5 << 30
_PACKAGES: Final = ("trio", "msgspec", "cryptography", "pynacl", "multiaddr", "numpy", "safetensors", "scipy", "psutil")


def version_checks() -> Iterator[CheckResult]:
    """Report the versions of peerd, Python and the required packages."""
    found: list[str] = []
    missing: list[str] = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    base = f"peerd {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield CheckResult("versions", CheckVerdict.OK, base)
    if missing:
        yield CheckResult(
            "packages", CheckVerdict.FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    else:
        yield CheckResult("packages", CheckVerdict.OK, ", ".join(found))


def device_checks(device: str) -> Iterator[CheckResult]:
    """Check that the device computes, and which implementation quantizes tensors on it."""
    try:
        from peerd.codec.kernels import ops
        from peerd.model.devices import describe

        facts = describe(device)
    except ModuleNotFoundError as error:
        found, _, advice = missing_package(error).partition("; ")
        yield CheckResult("device", CheckVerdict.FAIL, f"computing needs {found}", advice)
        return
    except ImportError as error:
        yield CheckResult(
            "device", CheckVerdict.FAIL, f"torch can't be loaded: {error}", "type: pip install --force torch"
        )
        return
    except ConfigError as error:
        yield failed("device", error, "choose another with --device")
        return
    memory = f", {facts.memory_bytes / 1e9:.0f} GB" if facts.memory_bytes else ""
    text = f"{facts.name}{memory}, torch {facts.torch_version}, {facts.threads} threads of {os.cpu_count()} cores"
    coded_by, slow_because = ops.described(device)
    yield CheckResult("device", CheckVerdict.OK, text, idle_gpu(device))
    yield CheckResult(
        "quantized transfer", CheckVerdict.WARN if slow_because else CheckVerdict.OK, coded_by, slow_because
    )


def data_dir_checks(path: Path, has_run: bool) -> Iterator[CheckResult]:
    """Check that the data directory is writable, has free space and holds a valid identity.

    If `has_run`, the free space is left to the run's checks, which know how much the checkpoints need.
    """
    try:
        place = make_private_dir(path)
    except ConfigError as error:
        yield failed("data directory", error, "choose another with --data-dir")
        return
    try:
        with locked(place):
            yield CheckResult("data directory", CheckVerdict.OK, str(place))
    except OSError as error:
        found = f"{place} can't be written: {error.strerror or error}"
        yield CheckResult("data directory", CheckVerdict.FAIL, found, "make room there, or choose another --data-dir")
        return
    except ConfigError as error:
        yield CheckResult(
            "data directory", CheckVerdict.WARN, str(error).partition("; ")[0], "a second peer needs its own --data-dir"
        )
    if not has_run:
        free = shutil.disk_usage(place).free
        small = CheckVerdict.FAIL if free < _DISK_FAIL_BYTES else CheckVerdict.WARN
        verdict = CheckVerdict.OK if free >= _DISK_WARN_BYTES else small
        advice = "" if verdict == CheckVerdict.OK else "checkpoints need space: free some, or choose another --data-dir"
        yield CheckResult("free disk", verdict, f"{free / 1e9:.1f} GB", advice)
    if not (place / IDENTITY_FILE).exists():
        yield CheckResult("identity", CheckVerdict.OK, "none yet; created at the first start, or by `peerd identity`")
        return
    try:
        yield CheckResult("identity", CheckVerdict.OK, load_identity(place).peer_id.text)
    except ConfigError as error:
        yield failed("identity", error)
