"""A host's keeper: its vault, its checkpoints, adoption of orphans and sharing with other hosts, for `ExpertHost`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Final

import trio

from peerd.core.errors import ConfigError, RemoteError
from peerd.core.experts.grid import Uid
from peerd.core.limits import EXPERT_STATE_BYTES
from peerd.machine.experts.claims import ExpertClaim, last_prefixes
from peerd.role import RoleContext
from peerd.service.experts.kept_directory import CustodyView
from peerd.service.experts.vault import Vault
from peerd.service.experts.vault_disk import VaultDisk
from peerd.training.expert.adoption import Adoption
from peerd.training.expert.checkpoints import ExpertCheckpoints
from peerd.training.expert.host import ExpertHost
from peerd.training.expert.sharing import ExpertSharing

_PREFIXES_AT_ONCE: Final = 256  # of one look into the directory


class VaultKeeper:
    """See the module's header. `state_bytes`: the most that a state of this run takes."""

    def __init__(self, ctx: RoleContext, host: ExpertHost, state_bytes: int = EXPERT_STATE_BYTES) -> None:
        assert ctx.run is not None
        self._ctx = ctx
        self._folder = ctx.data_dir / "vault"
        self.vault = Vault(ctx.run, ctx, VaultDisk(self._folder), ctx.worker("files"))
        self.checkpoints = ExpertCheckpoints(ctx, self.vault, host)
        self.adoption = Adoption(ctx, self.vault, host, self.checkpoints, state_bytes)
        self.sharing = ExpertSharing(ctx, self.vault, host, self.checkpoints, state_bytes)

    async def recall(self) -> Mapping[Uid, int]:
        """Our own experts, but for those of which somebody holds a newer checkpoint: these are adopted in turn."""
        try:
            await self.vault.open()
        except OSError as error:
            raise ConfigError(f"{self._folder} can't be used for checkpoints: {error.strerror or error}") from error
        mine = dict[Uid, int]()
        for uid in sorted({pointer.expert.uid for pointer in self.vault.held}):
            own = self.vault.own(uid)
            if own is not None:
                mine[uid] = own.generation
        kept = await self._kept(mine)
        for uid in [uid for uid in mine if kept.get(uid, -1) > mine[uid]]:
            self._ctx.log.event("expert.not_resumed", expert=str(uid), generation=mine.pop(uid), newer=kept[uid])
        return mine

    async def others(self, mine: Mapping[Uid, int]) -> Mapping[Uid, ExpertClaim]:
        """Claims of other hosts that own these by now, as far as the directory can be read."""
        me, found = self._ctx.host.id, dict[Uid, ExpertClaim]()
        async for view in self._views(mine):
            for uid, claim in view.claims.items():
                if uid in mine and claim.peer != me:
                    found[uid] = ExpertClaim(claim.generation, claim.peer.text)
        return found

    async def state(self, uid: Uid) -> bytes:
        """The newest checkpoint of our own."""
        pointer = self.vault.own(uid)
        if pointer is None:
            raise ValueError(f"no checkpoint of expert {uid} is here")
        return await self.vault.read(pointer)

    async def orphans(self, uids: Collection[Uid]) -> Collection[Uid]:
        """Those that have a checkpoint somewhere."""
        return (await self._kept(uids)).keys() & set(uids)

    def taking(self) -> Collection[Uid]:
        """Experts that are about to be adopted here."""
        return self.vault.taking

    async def run(self, host: ExpertHost) -> None:
        """Hold, save and adopt until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.vault.run)
            nursery.start_soon(self.checkpoints.run)
            nursery.start_soon(self.adoption.run)
            nursery.start_soon(self.sharing.run)

    async def hand_over(self, host: ExpertHost) -> None:
        """Hand experts to hosts that have places."""
        await self.sharing.leave()

    async def leave(self, host: ExpertHost) -> None:
        """Write what has no checkpoint yet."""
        await self.checkpoints.leave()

    def status(self) -> dict[str, object]:
        """Plain data for users."""
        parts = (self.checkpoints.status(), self.adoption.status(), self.sharing.status())
        return {key: value for part in parts for key, value in part.items()} | {"held": len(self.vault.held)}

    async def _kept(self, uids: Collection[Uid]) -> dict[Uid, int]:
        """The newest generation of which somebody holds a checkpoint, as far as the directory can be read."""
        found = dict[Uid, int]()
        async for view in self._views(uids):
            found |= {uid: copies[0].pointer.generation for uid, copies in view.kept.items() if copies}
        return found

    async def _views(self, uids: Collection[Uid]) -> AsyncIterator[CustodyView]:
        """What the directory shows of these, as far as it can be read."""
        prefixes = last_prefixes(uids)
        for at in range(0, len(prefixes), _PREFIXES_AT_ONCE):
            try:
                view = await self.vault.directory.look(prefixes[at : at + _PREFIXES_AT_ONCE])
            except RemoteError as error:
                self._ctx.log.event("dht.read_failed", level="debug", reason=str(error))
                return
            yield view
