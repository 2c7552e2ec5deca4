"""Several roles in one process, as the daemon holds them: one set of services, a directory of its own for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from peerd.role import Role, RoleContext


class Together:
    """Roles that begin in the order in which they are given, and end together."""

    def __init__(self, classes: tuple[type[Role], ...], ctx: RoleContext) -> None:
        self.roles: list[Any] = []
        for cls in classes:
            folder = ctx.data_dir / cls.name
            folder.mkdir(exist_ok=True)
            beside = frozenset(other.name for other in classes if other is not cls)
            self.roles.append(cls(replace(ctx, data_dir=folder, beside=beside)))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for role in self.roles:
                nursery.start_soon(role.run)
                await trio.sleep(0.01)
            task_status.started()

    def status(self) -> dict[str, object]:
        return {role.name: role.status() for role in self.roles}


def together(*classes: type[Role]) -> Callable[[RoleContext], Together]:
    return partial(Together, classes)
