"""Services that are kept running: a fault of ours in one ends that one, and begins it again after a pause.

Around each long-lived task of a peer that is no role: the directory, ways in, status, the control socket. Services
call each other while one of them rests; what that raises ends the caller's call, stream or role, which begin again as
well. A ConfigError passes: it is the user's to mend, and no restart mends it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from peerd.core.errors import ConfigError
from peerd.net.faults import Faults, first_of

PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # before each new try; the last one again and again
HEALTHY_S: Final = 60.0  # a service that ran this long begins again after the first pause


class Service(Protocol):
    """Runs until cancelled; says when it is ready for others."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


class Upkeep:
    """Supervisor of one process's services; `faults` counts what ended them."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def run(
        self, name: str, service: Service, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run `service` until it returns or is cancelled, again after each fault.

        Started means: it is, or has failed: whoever waits for it goes on without it.
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
        """`run`, for a service that nobody waits for."""

        async def told(*, task_status: trio.TaskStatus[None]) -> None:
            await service()

        await self.run(name, told)


class _Once:
    """Says started at the first time only: one who waits has gone on when the service begins again."""

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
