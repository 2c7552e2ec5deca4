"""The Role interface: what a plug-in of the daemon implements, and the parts of the daemon that it may use.

A role is one class in one file. It serves calls, announces records and does its own work through its `RoleContext`,
and has no other access to the daemon. The daemon creates it, runs `run` under a supervisor, shows its `status` to the
user, and calls `leave` before it cancels `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import trio

from peerd.core.clock import Clock
from peerd.core.work import RateLimitedRead, Worker, read_at_once
from peerd.dht.dht import Dht
from peerd.log import EventLog
from peerd.role.run_services import RunServices
from peerd.rpc.rpc import Rpc
from peerd.run.runfile import RunFile
from peerd.wire.host.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """Everything that a role may use. `data_dir` is the role's own directory, which exists."""

    run: RunFile | None  # None only for roles with `needs_run = False`
    services: RunServices | None = None  # of that run; shared by all roles of the process
    beside: frozenset[str] = frozenset()  # names of the other roles in this process
    host: Host
    rpc: Rpc
    dht: Dht
    clock: Clock
    data_dir: Path
    device: str  # "cpu", "cuda", "cuda:1"
    log: EventLog  # events carry the role's name
    worker: Callable[[str], Worker]  # one worker per device, shared by all roles; its thread starts with the first job
    read_in_turn: RateLimitedRead = (
        read_at_once  # for jobs that read from the network themselves, within the rate limit
    )


@runtime_checkable
class ChecksRun(Protocol):
    """Role class that checks what a run file names before the peer joins."""

    def check_run(self, run: RunFile) -> None:
        """Raise ConfigError for text, code or sizes that this role cannot use. A class method; takes a few seconds."""
        ...


@runtime_checkable
class ActsAs(Protocol):
    """Role class that needs a token for another role (`acts_as`) instead of one for its own name."""

    acts_as: ClassVar[str]


class Role(Protocol):
    """Interface of a role: one kind of work that a peer does in the swarm."""

    name: ClassVar[str]  # as in the entry point group `peerd.roles`
    needs_run: ClassVar[bool]  # True if it cannot start without a run file

    def __init__(self, ctx: RoleContext) -> None: ...

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve calls and work until the work is finished. When all roles have returned, the daemon leaves and exits
        with code 0.

        Calls `task_status.started()` when it is ready, or waits for something that `status` names. After an exception
        the supervisor creates the role again after a pause; `ConfigError` stops the daemon with its message instead.
        However it ends, it must unserve its calls (`ctx.rpc.unserve`), since the next instance serves them again.
        """
        ...

    async def leave(self) -> None:
        """Accept no new work, and send finished results. Called once before `run` is cancelled, with a deadline of a
        few seconds.

        A role may have an attribute `unsaved`: a message while it saves a state that no other peer is known to have,
        else None. While it is a message, the deadline is extended.
        """
        ...

    def status(self) -> dict[str, object]:
        """Plain data for users and programs. `waits_for` is the reason to wait, or None if the role does not wait."""
        ...
