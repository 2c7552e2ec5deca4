"""Supervision of services: if an unexpected exception ends one, it is restarted after a pause.

For each long-lived task of a peer that is not a role: the directory, reachability, status, the control socket. If a
service calls another that is down, the exception ends the caller's call, stream or role, which is restarted as well. A
ConfigError is raised to the caller, since only the user can fix it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from peerd.core.errors import ConfigError
from peerd.wire.faults import Faults, first_of

PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # before each restart; the last one repeats
HEALTHY_S: Final = 60.0  # after a run of this length, the pauses start over


class Service(Protocol):
    """An async function that runs until cancelled, and reports through `task_status` when it is ready."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


class Upkeep:
    """Supervisor of one process's services; `faults` counts the exceptions that ended them."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def run(
        self, name: str, service: Service, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run `service` until it returns or is cancelled; restart it after each fault.

        Calls `task_status.started` once the service is ready or has failed, so that no caller blocks on a failed start.
        """
        once, pauses = _Once(task_status), iter(PAUSES_S)
        while True:
            began, refusals = trio.current_time(), list[ConfigError]()
            if await self._faults.contain(lambda: _run(service, once, refusals), lambda: f"service {name}"):  # noqa: B023
                if refusals:
                    raise refusals[0]
                return
            once.started()
            if trio.current_time() - began > HEALTHY_S:
                pauses = iter(PAUSES_S)
            await trio.sleep(next(pauses, PAUSES_S[-1]))

    async def run_plain(self, name: str, service: Callable[[], Awaitable[None]]) -> None:
        """Like `run`, for a service without `task_status`."""

        async def told(*, task_status: trio.TaskStatus[None]) -> None:
            await service()

        await self.run(name, told)


class _Once:
    """A `task_status` that forwards only the first `started`, since the service may start again."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.started()


async def _run(service: Service, status: _Once, refusals: list[ConfigError]) -> None:
    try:
        await service(task_status=status)
    except* ConfigError as group:
        found = first_of(group)
        assert isinstance(found, ConfigError)
        refusals.append(found)
