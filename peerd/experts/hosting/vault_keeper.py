"""A host's keeper: combines vault, checkpoints, adoption of orphans and sharing with other hosts, for `ExpertHost`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final

import trio

from peerd.core.errors import ConfigError, RemoteError
from peerd.core.limits import EXPERT_STATE_BYTES
from peerd.experts.calls.kept_directory import CustodyView
from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import VaultDisk
from peerd.experts.hosting.adoption import Adoption
from peerd.experts.hosting.checkpoints import ExpertCheckpoints
from peerd.experts.hosting.host import ExpertHost, OwnExpert
from peerd.experts.hosting.sharing import ExpertStateSharing
from peerd.experts.rules.claims import last_prefixes
from peerd.role.role import RoleContext
from peerd.run.grid import Uid

_PREFIXES_AT_ONCE: Final = 256  # prefixes in one read of the directory


class VaultKeeper:
    """The keeper of one host. `state_bytes` is the maximum size of an expert's state in this run."""

    def __init__(self, ctx: RoleContext, host: ExpertHost, state_bytes: int = EXPERT_STATE_BYTES) -> None:
        assert ctx.run is not None
        self._ctx = ctx
        self._folder = ctx.data_dir / "vault"
        self.vault = Vault(ctx.run, ctx, VaultDisk(self._folder), ctx.worker("files"))
        self.checkpoints = ExpertCheckpoints(ctx, self.vault, host)
        self.adoption = Adoption(ctx, self.vault, host, self.checkpoints, state_bytes)
        self.sharing = ExpertStateSharing(ctx, self.vault, host, self.checkpoints, state_bytes)

    async def recall(self) -> Mapping[Uid, OwnExpert]:
        """This host's own experts, except those of which others hold a newer checkpoint, which any host may adopt.

        Considers only newer checkpoints that can be read from the directory.
        """
        try:
            await self.vault.open()
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be used for checkpoints: {error.strerror or error}") from error
        uids = sorted({pointer.expert.uid for pointer in self.vault.held})
        mine = {uid: OwnExpert(own.generation) for uid in uids if (own := self.vault.own(uid)) is not None}
        async for view in self._views(mine):
            for uid in sorted(mine.keys() & {*view.kept, *view.claims}):
                generation, newest = mine[uid].generation, _newest(view, uid)
                claim = view.claims.get(uid)
                if newest > generation:
                    self._ctx.log.event("expert.not_resumed", expert=str(uid), generation=generation, newer=newest)
                    del mine[uid]
                elif claim is not None and claim.peer != self._ctx.host.id:
                    mine[uid] = OwnExpert(generation, claim)
        return mine

    async def state(self, uid: Uid) -> bytes:
        """The newest checkpoint that this host made. Raises ValueError if there is none or it is damaged."""
        pointer = self.vault.own(uid)
        if pointer is None:
            raise ValueError(f"this host has no checkpoint of expert {uid}")
        return await self.vault.read(pointer)

    async def orphans(self, uids: Collection[Uid]) -> Collection[Uid]:
        """Those of `uids` that have a checkpoint somewhere."""
        found = set[Uid]()
        async for view in self._views(uids):
            found.update(uid for uid, copies in view.kept.items() if copies)
        return found & set(uids)

    def taking(self) -> Collection[Uid]:
        """Experts that are about to be adopted here."""
        return self.vault.taking

    async def run(self, host: ExpertHost) -> None:
        """Serve the vault, save, adopt and share until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.vault.run)
            nursery.start_soon(self.checkpoints.run)
            nursery.start_soon(self.adoption.run)
            nursery.start_soon(self.sharing.run)

    async def hand_over(self, host: ExpertHost) -> None:
        """Hand experts over to hosts that have places."""
        await self.sharing.leave()

    async def leave(self, host: ExpertHost) -> None:
        """Save experts that have no current checkpoint."""
        await self.checkpoints.leave()

    def status(self) -> dict[str, object]:
        """Status of checkpoints, adoption and sharing, for `peerd status`."""
        parts = (self.checkpoints.status(), self.adoption.status(), self.sharing.status())
        return {key: value for part in parts for key, value in part.items()} | {"held": len(self.vault.held)}

    async def _views(self, uids: Collection[Uid]) -> AsyncIterator[CustodyView]:
        """Yield views of the directory that together cover these experts. Stops if the directory cannot be read."""
        prefixes = last_prefixes(uids)
        for at in range(0, len(prefixes), _PREFIXES_AT_ONCE):
            try:
                view = await self.vault.directory.look(prefixes[at : at + _PREFIXES_AT_ONCE])
            except RemoteError as error:
                self._ctx.log.event("dht.read_failed", level="debug", reason=str(error))
                return
            yield view


def _newest(view: CustodyView, uid: Uid) -> int:
    """The newest generation of an expert with a checkpoint somewhere; -1 if there is none."""
    copies = view.kept.get(uid)
    return copies[0].pointer.generation if copies else -1
