"""Vaults in a run with tokens: records and checkpoints count from peers whose token allows expert or backbone alone."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import trio

from peerd.core.errors import Refused, Untrusted
from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import VaultDisk, digests_of
from peerd.messages.experts import CheckpointRef, Name, state_root
from peerd.run.grid import Uid
from peerd.run.runfile import ExpertsSection, fingerprint
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.network.members import Club, Member, in_club
from tests.worlds.network.members import run_file as run_with_tokens
from tests.worlds.roles.expertpeers import state

RUN = msgspec.structs.replace(run_with_tokens("tiny", 1), experts=ExpertsSection(layers=1, grid=[4, 4]))
UID = Uid(0, (1, 2))


async def vault_of(member: Member, folder: Path, nursery: trio.Nursery) -> Vault:
    """A vault that serves on this peer."""

    class Peer:
        host, rpc, dht, clock = member.host, member.rpc, member.dht, member.node.clock

    vault = Vault(RUN, Peer(), VaultDisk(folder / member.id.text), InlineWorker())
    await vault.open()
    await nursery.start(vault.run)
    return vault


def checkpoint(member: Member, data: bytes, version: int = 1) -> CheckpointRef:
    """A checkpoint that `member` signs."""
    owner, root = member.id.public_key, state_root(digests_of(data))
    return CheckpointRef(fingerprint(RUN), Name.of(UID), 0, version, root, len(data), owner).signed(member.node.keypair)


@pytest.mark.slow
@in_club
async def test_records_count_from_experts_and_backbones_alone(
    club: Club, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = await club.member("expert", number=1)
    backbone = await club.member("backbone", number=2)
    trainer = await club.member("trainer", number=3)
    async with trio.open_nursery() as nursery:
        vaults = {member: await vault_of(member, tmp_path, nursery) for member in (host, backbone, trainer)}
        data = state(1, 1000)
        for vault in vaults.values():  # all hold what the host made
            await vault.put(checkpoint(host, data), digests_of(data), data)
        for vault in vaults.values():
            assert await vault.announce()
        with caplog.at_level(logging.WARNING):
            view = await vaults[host].directory.look([UID.prefix])
        nursery.cancel_scope.cancel()
    assert set(view.offers) == {host.id, backbone.id}
    assert {holder for copy in view.kept[UID] for holder in copy.holders} == {host.id, backbone.id}
    assert f"peer {trainer.id}: its record is ignored" in caplog.text


@in_club
async def test_checkpoints_are_kept_for_experts_and_given_to_holders_alone(club: Club, tmp_path: Path) -> None:
    host = await club.member("expert", number=1)
    backbone = await club.member("backbone", number=2)
    trainer = await club.member("trainer", number=3)
    async with trio.open_nursery() as nursery:
        vaults = {member: await vault_of(member, tmp_path, nursery) for member in (host, backbone, trainer)}
        for one in vaults:
            for other in vaults:
                one.host.learn(other.id, [other.node.full_addr])
        data, refusal = state(7, 1000), "is for backbone, expert; the token shown allows"
        made = {member: checkpoint(member, data) for member in (host, trainer)}
        for member, pointer in made.items():
            await vaults[member].put(pointer, digests_of(data), data)
        await vaults[host].hand(made[host], backbone.id)
        assert vaults[backbone].held == [made[host]]
        assert await vaults[backbone].fetch(made[host], [host.id]) == data
        with pytest.raises(Refused, match=refusal):
            await vaults[trainer].fetch(made[host], [backbone.id])
        with pytest.raises(Refused, match=refusal):
            await vaults[trainer].hand(made[trainer], backbone.id)
        with pytest.raises(Untrusted, match="is served by backbone, expert; its token allows"):
            await vaults[host].fetch(made[trainer], [trainer.id])
        assert len(vaults[backbone].held) == 1
        nursery.cancel_scope.cancel()
