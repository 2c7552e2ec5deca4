"""Custodian: what lets the experts of a host outlive it, put together: its vault, its checkpoints, and adoption.

Opens the vault before the host takes its first experts, so that those of its own that lie on the disk come back, and
none that has a checkpoint anywhere is begun anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import trio

from peerd.core.errors import ConfigError, RemoteError
from peerd.core.experts.grid import Uid
from peerd.role import RoleContext
from peerd.service.experts.vault import Vault
from peerd.service.experts.vault_disk import VaultDisk
from peerd.training.expert.adoption import Adoption
from peerd.training.expert.checkpoints import ExpertCheckpoints
from peerd.training.expert.host import ExpertHost, Recalled

FOLDER = "kept"  # below the role's data directory


class Custodian:
    """The keeper of one host's experts; see `peerd.training.expert.host.Keeper`. `state_bytes`: the most that a state
    of this run takes.
    """

    def __init__(self, ctx: RoleContext, host: ExpertHost, state_bytes: int) -> None:
        assert ctx.run is not None
        self._ctx = ctx
        self._folder: Path = ctx.data_dir / FOLDER
        self.vault = Vault(ctx.run, ctx, VaultDisk(self._folder), ctx.worker("files"))
        self.checkpoints = ExpertCheckpoints(ctx, self.vault, host)
        self.adoption = Adoption(ctx, self.vault, host, self.checkpoints, state_bytes)

    async def recall(self) -> Mapping[Uid, Recalled]:
        """The newest checkpoints of this host's own experts, from its own disk; those that are damaged left out."""
        try:
            await self.vault.open()
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be used for checkpoints of experts: {error.strerror}") from None
        found = dict[Uid, Recalled]()
        for uid in sorted({pointer.expert.uid for pointer in self.vault.held}):
            pointer = self.vault.own(uid)
            if pointer is None:
                continue
            try:
                found[uid] = Recalled(pointer.generation, bytes(await self.vault.read(pointer)))
            except ValueError as error:
                reason = str(error)
                self._ctx.log.event("expert.checkpoint_unusable", level="warning", expert=str(uid), reason=reason)
        return found

    async def orphans(self, uids: Collection[Uid]) -> Collection[Uid]:
        """Those of `uids` that have a checkpoint somewhere, and must not be begun anew."""
        try:
            view = await self.vault.directory.look(list(dict.fromkeys(uid.prefix for uid in uids)))
        except RemoteError as error:
            self._ctx.log.event("dht.read_failed", level="debug", reason=str(error))
            return ()
        return [uid for uid in uids if uid in view.kept]

    async def run(self, host: ExpertHost) -> None:
        """Hold, keep and adopt until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.vault.run)
            await nursery.start(self.checkpoints.run)
            await nursery.start(self.adoption.run)

    async def leave(self, host: ExpertHost) -> None:
        """Save what is not saved yet: the host is about to go."""
        await self.checkpoints.leave()

    def status(self) -> dict[str, object]:
        """Plain data for users."""
        return {**self.checkpoints.status(), **self.adoption.status(), "held": len(self.vault.held)}
