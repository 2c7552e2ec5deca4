"""Formats a status snapshot as metrics in the text format of Prometheus, one figure per line.

For a collector that reads a file or a command's output, such as node_exporter's textfile collector. Depends on the
snapshot's keys only, not on the daemon. Text from other peers appears in label values only, escaped. Values that are
not finite numbers are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from peerd.screen import units
from peerd.status.snapshot import StatusSnapshot

_SWARM: Final = {
    "step": "global steps completed",
    "loss": "training loss, nats per token",
    "valid_loss": "validation loss, nats per token",
    "samples_per_s": "samples per second of the whole swarm",
    "tokens_per_s": "tokens per second of the whole swarm",
    "microbatches": "microbatches counted",
    "redone": "microbatches repeated on another peer",
    "lost": "microbatches lost",
}
_NETWORK: Final = {"bytes_in": "bytes received", "bytes_out": "bytes sent", "streams": "open streams"}
_DHT: Final = {
    "peers": "peers in the routing table",
    "records_held": "records stored for others",
    "lookups": "lookups started",
    "lies": "answers that broke the directory's rules",
}
Figure = tuple[str, str, Mapping[str, str], object]  # name, help, labels, value


def metrics_text(snapshot: StatusSnapshot) -> str:
    """All figures of a snapshot that are finite numbers, grouped by metric name."""
    lines: dict[str, list[str]] = {}
    for name, words, labels, value in _figures(snapshot):
        number = units.known(int(value) if isinstance(value, bool) else value)
        if number is None:
            continue
        told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        found = lines.setdefault(name, [f"# HELP {name} {words}", f"# TYPE {name} gauge"])
        found.append(f"{name}{{{told}}} {number:.10g}")
    return "".join(f"{line}\n" for found in lines.values() for line in found)


def _figures(snapshot: StatusSnapshot) -> Iterator[Figure]:
    run, swarm = {"run": snapshot.run or ""}, snapshot.swarm
    if snapshot.uptime_s is not None:
        yield from _own(snapshot, run)
    for key, words in _SWARM.items():
        yield f"peerd_swarm_{key}", words, run, getattr(swarm, key)
    still = swarm.standstill
    still_s = still.for_s if still is not None else 0
    yield "peerd_swarm_standstill_seconds", "duration of the run's standstill, 0 while it moves", run, still_s
    for stage in swarm.stages:
        labels = run | {"stage": str(stage.stage)}
        yield "peerd_swarm_stage_peers", "peers that announce a stage", labels, len(stage.peers)
    for key, words in _DHT.items():
        yield f"peerd_dht_{key}", words, run, getattr(snapshot.dht, key, None)
    for role in snapshot.roles:
        yield from _role(run | {"role": str(role.get("role"))}, role)


def _own(snapshot: StatusSnapshot, run: Mapping[str, str]) -> Iterator[Figure]:
    """Figures of the daemon itself, which a resting one does not have."""
    yield "peerd_uptime_seconds", "time since the daemon started", run, snapshot.uptime_s
    yield "peerd_network_peers", "connected peers", run, len(snapshot.network.peers)
    for key, words in _NETWORK.items():
        yield f"peerd_network_{key}", words, run, getattr(snapshot.network, key)
    yield "peerd_faults", "internal errors of the daemon since it started", run, snapshot.faults.count


def _role(labels: Mapping[str, str], role: Mapping[str, Any]) -> Iterator[Figure]:
    """A role's own numbers, each under its key."""
    works = role.get("state") == "running" and not role.get("waits_for")
    yield "peerd_role_working", "1 while the role runs and waits for nothing", labels, works
    for key, value in role.items():
        if isinstance(value, bool | int | float) and re.fullmatch("[a-z][a-z0-9_]*", key):
            yield f"peerd_role_{key}", f"{key} of a role, as in peerd status --json", labels, value


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
