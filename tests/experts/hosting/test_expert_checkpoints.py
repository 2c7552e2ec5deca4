"""Checkpoints of hosted experts: due by updates and by time, on our own disk and with holders on other hosts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from peerd.experts.calls import vault_disk
from peerd.run.grid import Uid
from tests.kit.expert_runs import expert_run
from tests.worlds.roles.expertpeers import MIB, MadeUpHost, expert_swarm, until

pytestmark = pytest.mark.slow  # many periods of several peers

A, B = Uid(0, (0, 1)), Uid(0, (1, 0))


def holders_of(host: MadeUpHost, uid: Uid) -> set[str]:
    pointer = host.peer.vault.own(uid)
    peers = host.swarm.peers.values()
    return {p.name for p in peers if any(held == pointer for held in p.vault.held)}


async def test_a_checkpoint_is_written_after_so_many_updates_and_two_other_hosts_hold_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10, checkpoint_s=1000)) as swarm:
        await swarm.start("backbone", "second", "third")
        host = await swarm.host("host", A)
        model = host.experts[A].model
        await trio.sleep(30)
        assert host.peer.vault.held == []  # it follows from the seed
        model.version = 9
        await trio.sleep(30)
        assert host.peer.vault.held == []
        model.version = 10
        await trio.sleep(5)
        (pointer,) = host.peer.vault.held
        assert (pointer.version, pointer.generation) == (10, 0)
        assert len(holders_of(host, A)) == 3
        assert "host" in holders_of(host, A)
        assert host.checkpoints.status() == {
            "checkpoints": 1,
            "copies_least": 2,
            "updates_unsaved": 0,
            "problem": None,
        }


async def test_no_update_stays_longer_without_a_checkpoint_than_said(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=1000, checkpoint_s=20, copies=1)) as swarm:
        await swarm.start("backbone")
        host = await swarm.host("host", A, B)
        host.experts[A].model.version = 1
        await trio.sleep(19)
        assert host.peer.vault.held == []
        await trio.sleep(4)
        assert [p.expert.uid for p in host.peer.vault.held] == [A]
        assert holders_of(host, A) == {"host", "backbone"}


async def test_a_newer_checkpoint_goes_where_the_one_before_lies(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10)) as swarm:
        await swarm.start("b0", "b1", "b2", "b3", "b4")
        host = await swarm.host("host", A)
        held = []
        for version in (10, 20, 30):
            host.experts[A].model.version = version
            await trio.sleep(10)
            held.append(holders_of(host, A))
        assert held[0] == held[1] == held[2]
        assert len(held[0]) == 3


async def test_a_holder_that_is_lost_is_replaced(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10)) as swarm:
        await swarm.start("b0", "b1", "b2")
        host = await swarm.host("host", A)
        host.experts[A].model.version = 10
        await trio.sleep(10)
        before = holders_of(host, A) - {"host"}
        lost = sorted(before - {"b0"})[0]  # others joined through the first
        swarm.peers.pop(lost).stop()
        await until(lambda: len(holders_of(host, A) - {"host"}) == 2, within_s=120)  # without the lost peer


async def test_too_few_holders_are_said_once_and_found_later(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10)) as swarm:
        await swarm.start("backbone")
        host = await swarm.host("host", A)
        host.experts[A].model.version = 10
        await trio.sleep(60)
        assert "1 of 2 peers hold the checkpoint of expert 0.0.1" in str(host.checkpoints.problem)
        assert len([e for e in host.events("expert.copies_missing") if e["level"] == "warn"]) == 1
        await swarm.start("late")
        await until(lambda: len(holders_of(host, A)) == 3 and host.checkpoints.problem is None, within_s=120)


async def test_with_a_full_disk_of_its_own_others_hold_it_still(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10, copies=1)) as swarm:
        (backbone,) = await swarm.start("backbone")
        host = await swarm.host("host", A)
        allocate = os.posix_fallocate

        def full(handle: int, begin: int, size: int) -> None:
            if "host" in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            allocate(handle, begin, size)

        monkeypatch.setattr(vault_disk.os, "posix_fallocate", full)
        host.experts[A].model.version = 10
        await trio.sleep(10)
        assert host.peer.vault.held == []
        (pointer,) = backbone.vault.held
        assert pointer.version == 10
        assert "No space" in str(host.checkpoints.status()["problem"])


async def test_on_leaving_the_last_updates_are_saved(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=1000, checkpoint_s=1000, copies=1)) as swarm:
        (backbone,) = await swarm.start("backbone")
        host = await swarm.host("host", A)
        await trio.sleep(5)
        host.experts[A].model.version, host.experts[A].model.size = 3, MIB + 9
        await host.checkpoints.leave()
        assert [p.version for p in backbone.vault.held] == [3]
        assert (await backbone.vault.read(backbone.vault.held[0])).startswith(b"0.0.1|host|3|")
        assert backbone.vault.held[0].size_bytes == MIB + 9


async def test_what_came_from_our_own_disk_is_not_written_again_but_copied(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, expert_run(2, 2, checkpoint_updates=10, copies=1)) as swarm:
        (backbone,) = await swarm.start("backbone")
        host = await swarm.host("host", A)
        host.experts[A].model.version = 10
        await trio.sleep(5)
        again = MadeUpHost(swarm, host.peer, 8)  # as after a restart
        again.begin(A, "host").version = 10
        async with trio.open_nursery() as nursery:
            await nursery.start(again.checkpoints.run)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert again.checkpoints.written == 0
        assert again.checkpoints.status()["copies_least"] == 1
        assert len(backbone.vault.held) == 1
