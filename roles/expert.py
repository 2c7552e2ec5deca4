"""Role `expert`: hosts experts of a run's layers, as many as fit into memory, and keeps checkpoints of other hosts'
experts.

`experts/hosting/host` chooses the experts to host. `experts/hosting/vault_keeper` keeps the checkpoints, so that
experts survive their host.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final

import trio

from peerd.core.errors import ConfigError
from peerd.experts.hosting.host import ExpertHost
from peerd.experts.hosting.vault_keeper import VaultKeeper
from peerd.experts.model.blocks import try_block
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.model.memory import experts_that_fit
from peerd.role.role import RoleContext
from peerd.run.grid import Uid
from peerd.run.runfile import RunFile, unused_precision
from peerd.swarm.contributions import PERIOD_S

_COUNTED_S: Final = PERIOD_S / 4  # interval for counting the updates made


class ExpertRole:
    """Role of a peer that hosts experts of a run."""

    name: ClassVar[str] = "expert"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        assert ctx.services is not None
        need_experts(ctx.run)
        self._ctx, self._services, run = ctx, ctx.services, ctx.run
        self.directory = ctx.services.experts

        def build(uid: Uid) -> HostedExpert:
            return HostedExpert(run, uid, ctx.device)

        self.host = ExpertHost(ctx, self.directory, build, partial(experts_that_fit, run, ctx.device))
        self.keeper = VaultKeeper(ctx, self.host)
        self.host.keepers.append(self.keeper)
        self.directory.contested.source = self.keeper.vault.directory
        self._tally = self._services.tally("expert", ctx.data_dir / "updates.json", ctx.worker("files"))
        self._counted = 0  # updates that are in the tally already

    @classmethod
    def check_run(cls, run: RunFile) -> None:
        """Check the run file before joining (`peerd.role.role.ChecksRun`): tries the block on one sample."""
        need_experts(run)
        try_block(run)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._services.settings.compare()
        if (unused := unused_precision(self._services.run, hosts_experts=True)) is not None:
            self._ctx.log.event("expert.precision_unused", level="warning", reason=unused)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.directory.run)
            nursery.start_soon(self._tally.run)
            nursery.start_soon(self._count)
            await self.host.run(task_status=task_status)

    async def leave(self) -> None:
        """Withdraw what is announced, and save experts that have no checkpoint yet."""
        await self.host.leave()
        self._add_up()

    async def _count(self) -> None:
        while True:
            await trio.sleep(_COUNTED_S)
            self._add_up()

    def _add_up(self) -> None:
        """Add the updates since the last call to the leaderboard's tally."""
        made = self.host.server.stats.updates
        self._tally.add(samples=made - self._counted)
        self._counted = made

    def status(self) -> dict[str, object]:
        found = self.host.status() | self.keeper.status()
        room = self.host.capacity > 0 and not self.host.experts
        why = "an expert: all of the run's experts are hosted, and their hosts hand over some from time to time"
        return found | {"waits_for": why if room else None}


def need_experts(run: RunFile) -> None:
    """Raises ConfigError if the run has no experts to host."""
    if run.experts is None:
        raise ConfigError(f"run {run.run!r} has no experts to host; role expert needs `experts:` in the run file")
