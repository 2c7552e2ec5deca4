"""A backbone of a run with experts holds their checkpoints, without torch, and has them still when it comes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import VaultDisk, digests_of
from peerd.role.role import RoleContext
from peerd.run.grid import Uid
from roles.backbone import BackboneRole
from tests.worlds.roles.expertpeers import expert_run, pointer_to, state
from tests.worlds.roles.training import swarm

pytestmark = pytest.mark.usefixtures("autojump_clock")

RUN = expert_run(announce_s=0.5)
UID = Uid(0, (1, 2))


class VaultRole:
    """A peer with a vault and nothing else."""

    name: ClassVar[str] = "vault"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        self.vault = Vault(RUN, ctx, VaultDisk(ctx.data_dir / "experts"), ctx.worker("files"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.vault.open()
        await self.vault.run(task_status=task_status)

    async def leave(self) -> None: ...

    def status(self) -> dict[str, object]:
        return {"waits_for": None}


async def offered(vault: Vault, peer: Any) -> None:
    """Wait until a peer is known to have room."""
    with trio.fail_after(30):
        while peer not in await vault.directory.offers():  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_a_backbone_holds_what_hosts_hand_to_it_and_gives_it_after_it_came_again(tmp_path: Path) -> None:
    data = state(1)
    async with swarm(tmp_path) as s:
        boot = await s.start("boot", BackboneRole, None)
        backbone = await s.start("backbone", BackboneRole, RUN)
        host = await s.start("host", VaultRole, RUN)
        await host.ready.wait()
        await offered(host.role.vault, backbone.host.id)
        pointer = pointer_to(data, "host", RUN, UID)
        await host.role.vault.put(pointer, digests_of(data), data)
        await host.role.vault.hand(pointer, backbone.host.id)
        assert backbone.role.status()["kept_experts"] == 1
        for peer in (host, backbone):
            peer.kill()
            await peer.gone.wait()
        assert boot.role.status().get("kept_experts") is None
        backbone = await s.start("backbone", BackboneRole, RUN)
        adopter = await s.start("adopter", VaultRole, RUN)
        await adopter.ready.wait()
        await offered(adopter.role.vault, backbone.host.id)
        assert await adopter.role.vault.fetch(pointer, [host.host.id, backbone.host.id]) == data


async def test_a_folder_that_cannot_be_used_is_said_and_the_backbone_goes_on(tmp_path: Path) -> None:
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "experts").write_text("no folder")
    async with swarm(tmp_path) as s:
        backbone = await s.start("backbone", BackboneRole, RUN)
        await backbone.ready.wait()
        with trio.fail_after(30):
            while backbone.role.status().get("no_experts_kept") is None:  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert backbone.role.status()["kept_experts"] == 0
        assert not backbone.finished.is_set()
