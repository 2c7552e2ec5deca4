"""What a role is given in a test: one builder for all worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from peerd.core.work import Worker
from peerd.log import EventLog
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.runfile import RunFile

DEVICES = ("cpu", "files", "data", "held-out", "coding", "planning", "digests")


class Stack(Protocol):
    """The protocol stack of a peer, or a node that has one."""

    host: Any
    rpc: Any
    dht: Any
    clock: Any


def role_context(
    stack: Stack, run: RunFile | None, folder: Path, worker: Callable[[str], Worker], log: Any = None
) -> RoleContext:
    """The context of a role with a folder of its own. `worker`: by device."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"host": stack.host, "rpc": stack.rpc, "dht": stack.dht, "clock": stack.clock}
    return RoleContext(
        run=run,
        services=RunServices(run, **parts) if run is not None else None,
        **parts,
        data_dir=folder,
        device="cpu",
        log=log or EventLog(stack.clock),
        worker=worker,
    )
