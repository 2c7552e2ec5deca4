"""The Role contract: the interface of a plug-in of the daemon, and everything of the daemon that it may use.

A role is one class in one file: it serves calls, announces records and does its own work, through the
`RoleContext` it is given. It sees nothing else of the daemon. The daemon builds it, runs `run` under a
supervisor, shows the user its `status`, and calls `leave` before it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import trio

from peerd.core.clock import Clock
from peerd.core.run.runfile import RunFile
from peerd.core.work import ReadInTurn, Worker, read_at_once
from peerd.log import EventLog
from peerd.net.host.host import Host
from peerd.service.dht.dht import Dht
from peerd.service.rpc.rpc import Rpc
from peerd.service.run_services import RunServices


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """Everything a role may use. `data_dir` is the role's own directory; it exists."""

    run: RunFile | None  # None only for roles with `needs_run = False`
    services: RunServices | None = None  # of that run; the process's roles have one in common
    beside: frozenset[str] = frozenset()  # names of the other roles in this process
    host: Host
    rpc: Rpc
    dht: Dht
    clock: Clock
    data_dir: Path
    device: str  # "cpu", "cuda", "cuda:1"
    seed: int
    log: EventLog  # events carry the role's name
    worker: Callable[[str], Worker]  # one worker per device, shared by all roles; its thread starts with the first job
    read_in_turn: ReadInTurn = read_at_once  # for jobs that read from the network themselves


@runtime_checkable
class ChecksRun(Protocol):
    """A role's class that looks at what a run file names before anything is joined."""

    def check_run(self, run: RunFile) -> None:
        """ConfigError for text, code or sizes that this role could not work with; a class method, seconds at most."""
        ...


@runtime_checkable
class ActsAs(Protocol):
    """A role's class that needs another role's rights in a run with tokens, in place of its own name's."""

    acts_as: ClassVar[str]


class Role(Protocol):
    """One part that a peer plays in the swarm."""

    name: ClassVar[str]  # as in the entry point group `peerd.roles`
    needs_run: ClassVar[bool]  # True when it can't start without a run file

    def __init__(self, ctx: RoleContext) -> None: ...

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and work. Calls `task_status.started()` when ready, or when it waits for something that `status`
        names. Returning means the work is finished: when all roles have returned the daemon leaves and exits
        with 0. An exception makes the supervisor build the role anew after a pause; `ConfigError` does not: it
        stops the daemon with the message. It unserves its calls (`ctx.rpc.unserve`) when it ends, however it
        ends: the next role object of its kind will serve them again."""
        ...

    async def leave(self) -> None:
        """Stop taking new work and hand in what is finished; called once before `run` is cancelled, under the
        daemon's deadline (a few seconds). A role may have an attribute `unsaved`: a sentence on a state that it still
        writes and that nobody else is known to have, else None; while it is a sentence the role has longer."""
        ...

    def status(self) -> dict[str, object]:
        """Plain data for users and programs; `waits_for` is a sentence, or None when nothing is awaited."""
        ...
