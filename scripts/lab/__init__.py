"""Labs of hosts in network namespaces of Linux, for tests and benchmarks. Nothing in one leads to the real network.

`Lab` (rates.py) has public hosts behind lines of chosen rates. `WideLab` (wide.py) has lines with delay and loss too,
and routers: homes behind NATs of every kind, and firewalls.

All processes of a lab are killed and its namespaces removed when its block ends. When the owner was killed itself, the
next lab removes what is left. Needs Linux and root; `why_not` and `why_not_wide` tell what else is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys

from .nat import Kind, Unexpected
from .rates import Host, Lab, Traffic
from .space import LabError, Space, born, ip, labels
from .wan import Line
from .wide import Router, WideHost, WideLab

__all__ = [
    "Host",
    "Kind",
    "Lab",
    "LabError",
    "Line",
    "Router",
    "Space",
    "Traffic",
    "Unexpected",
    "WideHost",
    "WideLab",
    "born",
    "ip",
    "labels",
    "why_not",
    "why_not_wide",
]


@functools.cache
def why_not() -> str | None:
    """Why there can be no lab on this machine; None when there can."""
    if sys.platform != "linux":
        return "a network lab needs Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a network lab needs {' and '.join(missing)} of iproute2"
    if os.geteuid() != 0:
        return "a network lab needs root"
    try:
        with Lab() as lab:
            lab.host("probe", up_mbit=1, down_mbit=1)
    except LabError as error:
        return f"this machine cannot have a network lab: {error}"
    return None


@functools.cache
def why_not_wide() -> str | None:
    """Why there can be no lab with routers and delays on this machine; None when there can."""
    if (reason := why_not()) is not None:
        return reason
    needs = {"nft": "nft of nftables", "gcc": "gcc"}
    missing = [words for name, words in needs.items() if shutil.which(name) is None]
    if missing:
        return f"a wide network lab needs {' and '.join(missing)}"
    if not os.path.exists("/dev/net/tun"):
        return "a wide network lab needs /dev/net/tun"
    try:
        with WideLab() as lab:
            lab.host("probe", "addr-restricted", delay_ms=1)
    except LabError as error:
        return f"this machine cannot have a wide network lab: {error}"
    return None
