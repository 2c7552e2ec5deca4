"""Vaults: checkpoints of experts are held whole or not at all, given in checked pieces, and announced."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import ProtocolViolation, Refused, RemoteError, Unreachable
from peerd.experts.calls import vault_disk, vault_fetch
from peerd.experts.calls.vault import KEEP
from peerd.experts.calls.vault_disk import digests_of
from peerd.messages.encoding import Empty
from peerd.messages.experts import CheckpointRef, HolderOffer, Keep, PieceWanted
from peerd.role.peer_stack import peer_stack
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.grid import Uid
from tests.kit.declared import ANY
from tests.kit.expert_runs import expert_run
from tests.worlds.network.hosts import keypair
from tests.worlds.roles.expertpeers import MIB, ExpertPeer, expert_swarm, pointer_to, state
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport

RUN = expert_run()
UID = Uid(0, (1, 2))


async def own(peer: ExpertPeer, data: bytes, **facts: Any) -> CheckpointRef:
    """A checkpoint of `peer` on its own disk."""
    pointer = pointer_to(data, peer.name, RUN, facts.pop("uid", UID), **facts)
    await peer.vault.put(pointer, digests_of(data), data)
    return pointer


def gives(peer: ExpertPeer, handler: Callable[[Incoming[PieceWanted]], Awaitable[Answer[Empty]]]) -> None:
    """Let `handler` answer in place of the peer's vault."""
    peer.stack.rpc.unserve("vault/2")
    peer.stack.rpc.serve(vault_fetch.GET, PieceWanted, handler, declared=ANY)


async def test_a_holder_fetches_a_checkpoint_and_says_that_it_holds_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder, other = await swarm.start("host", "holder", "other")
        data = state(1)
        pointer = await own(host, data)
        await host.vault.hand(pointer, holder.id)
        assert holder.vault.held == [pointer]
        await trio.sleep(3)
        view = await other.vault.directory.look([UID.prefix])
        (copy,) = view.kept[UID]
        assert copy.pointer == pointer
        assert set(copy.holders) == {host.id, holder.id}
        assert set(view.offers) == {host.id, holder.id, other.id}
        host.stop()
        assert await other.vault.fetch(pointer, copy.holders) == data


async def test_what_is_held_outlives_the_process(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        pointer = await own(host, state(1))
        await host.vault.hand(pointer, holder.id)
        (holder.folder / "half.expert.new").write_bytes(b"half")
        again = swarm.make("again")
        again.vault._disk.folder = holder.folder
        await swarm.begin(again)
        assert again.vault.held == [pointer]
        assert await again.vault.read(pointer) == state(1)
        assert not list(holder.folder.glob("*.new"))


@pytest.mark.slow
async def test_a_piece_that_lies_names_the_holder_and_comes_from_another(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, liar, honest, asker = await swarm.start("host", "liar", "honest", "asker")
        data = state(1, 3 * MIB + 1)
        pointer = await own(host, data)
        for holder in (liar, honest):
            await host.vault.hand(pointer, holder.id)

        async def lie(call: Incoming[PieceWanted]) -> Answer[Empty]:
            answer = await liar.vault._give(call)
            if call.body.piece < 0:
                return answer
            spoilt = bytearray(answer.frames[0].payload)
            spoilt[0] ^= 1
            return Answer(Empty(), (TensorFrame("uint8", (len(spoilt),), spoilt),))

        gives(liar, lie)
        assert await asker.vault.fetch(pointer, [liar.id, honest.id]) == data
        assert f"peer {liar.id}" in caplog.text
        with pytest.raises(Unreachable):  # it is asked for nothing more
            await asker.vault.fetch(pointer, [liar.id])


@pytest.mark.parametrize("wrong", ["digests", "shape", "silence"])
async def test_a_holder_that_gives_no_right_piece_costs_an_error_and_no_more(
    autojump_clock: MockClock, tmp_path: Path, wrong: str
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        liar, asker = await swarm.start("liar", "asker")
        pointer = pointer_to(state(1), "liar", RUN, UID)

        async def lie(call: Incoming[PieceWanted]) -> Answer[Empty]:
            if wrong == "silence":
                await trio.sleep_forever()
            size = 96 if wrong == "digests" else 95
            return Answer(Empty(), (TensorFrame("uint8", (size,), bytes(size)),))

        gives(liar, lie)
        with pytest.raises(RemoteError) as failure:
            await asker.vault.fetch(pointer, [liar.id])
        assert isinstance(failure.value, ProtocolViolation) == (wrong != "silence")
        assert failure.value.peer == liar.id


async def test_when_all_holders_are_gone_the_fetch_says_so(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder, asker = await swarm.start("host", "holder", "asker")
        pointer = await own(host, state(1))
        await host.vault.hand(pointer, holder.id)
        host.stop()
        holder.stop()
        with pytest.raises(RemoteError):
            await asker.vault.fetch(pointer, [host.id, holder.id])


@pytest.mark.parametrize(
    ("owner", "facts", "why"),
    [
        ("other", {}, "another peer's"),
        ("host", {"signature": bytes(64)}, "did not sign"),
        ("host", {"run": bytes(16)}, "another run"),
        ("host", {"uid": Uid(0, (1, 4))}, "no such expert"),
    ],
)
async def test_a_checkpoint_that_is_not_its_owners_is_refused_by_name(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, owner: str, facts: Any, why: str
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        pointer = pointer_to(state(1), owner, RUN, facts.pop("uid", UID))
        pointer = msgspec.structs.replace(pointer, **facts)
        with pytest.raises(Refused, match=why):
            await host.vault.hand(pointer, holder.id)
        assert holder.vault.held == []
        assert f"peer {host.id}" in caplog.text


async def test_bytes_that_are_not_those_of_the_digest_are_not_kept(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        true, lies = state(1), state(2)
        pointer = pointer_to(true, "host", RUN, UID)
        with host.vault.lent(pointer, digests_of(true), lies), pytest.raises(Refused, match="wrong digest"):
            await host.vault.hand(pointer, holder.id)
        assert holder.vault.held == []
        assert list(holder.folder.iterdir()) == []
        assert f"peer {host.id}" in caplog.text


@pytest.mark.slow
async def test_a_host_that_drips_is_cut_off(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        data = state(1)
        pointer = await own(host, data)

        async def drip(call: Incoming[PieceWanted]) -> Answer[Empty]:
            if call.body.piece >= 0:
                await trio.sleep_forever()
            return await host.vault._give(call)

        gives(host, drip)
        with pytest.raises(RemoteError):
            await host.vault.hand(pointer, holder.id)
        await trio.sleep(300)
        assert holder.vault.held == []
        assert list(holder.folder.iterdir()) == []
        assert holder.vault.room_bytes == 32 * MIB


async def test_a_full_disk_refuses_says_so_and_leaves_nothing_half(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        first = await own(host, state(1))
        await host.vault.hand(first, holder.id)

        def full(handle: int, begin: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        second = await own(host, state(2), version=2)
        monkeypatch.setattr(vault_disk.os, "posix_fallocate", full)
        with pytest.raises(Refused, match="disk"):
            await host.vault.hand(second, holder.id)
        assert "No space" in str(holder.vault.problem)
        assert holder.vault.held == [first]
        assert len(list(holder.folder.iterdir())) == 1
        with pytest.raises(OSError, match="No space"):
            await own(host, state(3), version=3)
        monkeypatch.undo()
        await host.vault.hand(second, holder.id)
        assert holder.vault.problem is None
        assert holder.vault.held == [second, first]


@pytest.mark.slow
async def test_a_vault_never_holds_more_than_its_bound(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path) as swarm:
        hosts = await swarm.start("a", "b", "c")
        (holder,) = await swarm.start("holder", most_bytes=8 * MIB)
        refused = 0
        for number in range(4):
            for host in hosts:
                pointer = await own(host, state(number), uid=Uid(0, (number, 0)))
                try:
                    await host.vault.hand(pointer, holder.id)
                except RemoteError:
                    refused += 1
        assert refused
        assert len(holder.vault.held) == 3
        on_disk = sum(file.stat().st_size for file in holder.folder.iterdir())
        assert on_disk <= 8 * MIB + 3 * 1024
        holder.vault._shelf.check()


async def test_a_newer_checkpoint_takes_the_place_of_the_one_before_the_last(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        pointers = []
        for version in range(1, 5):
            pointers.append(await own(host, state(version), version=version))
            await host.vault.hand(pointers[-1], holder.id)
        assert holder.vault.held == host.vault.held == [pointers[3], pointers[2]]
        assert len(list(holder.folder.iterdir())) == 2
        with pytest.raises(Refused, match="as new"):
            await host.vault.hand(pointers[0], holder.id)


async def test_a_file_that_rots_is_held_no_more(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with expert_swarm(tmp_path) as swarm:
        host, other = await swarm.start("host", "other")
        pointer = await own(host, state(1))
        (file,) = host.folder.iterdir()
        rotten = bytearray(file.read_bytes())
        rotten[-1] ^= 1
        file.write_bytes(rotten)
        with pytest.raises(ValueError, match="damaged"):
            await host.vault.read(pointer)
        assert host.vault.held == []
        assert "is dropped" in caplog.text
        with pytest.raises(Refused):
            await other.vault.fetch(pointer, [host.id])


async def test_a_pointer_that_its_owner_did_not_sign_does_not_count_whoever_shows_it(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        liar, other = await swarm.start("liar", "other")
        good = pointer_to(state(1), "liar", RUN, UID)
        forged = msgspec.structs.replace(good, generation=99)
        await liar.vault.directory.announce([forged, good], HolderOffer(0, False, []))
        view = await other.vault.directory.look([UID.prefix])
        assert [copy.pointer for copy in view.kept[UID]] == [good]
        assert f"published by peer {liar.id}" in caplog.text


async def test_a_peer_that_is_there_answers_and_one_that_is_not_does_not(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path) as swarm:
        one, other = await swarm.start("one", "other")
        assert await one.vault.answers(other.id, 5.0)
        other.stop()
        assert not await one.vault.answers(other.id, 5.0)


async def test_strangers_of_one_address_that_never_answer_stop_no_copies(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async def silence(call: Incoming[PieceWanted]) -> Answer[Empty]:
        await trio.sleep_forever()
        raise AssertionError

    async with expert_swarm(tmp_path) as swarm:
        host, holder = await swarm.start("host", "holder")
        machine = MemoryTransport(swarm.net, swarm.net.add_node("attacker", ip="203.0.113.5"))
        for number in range(5):
            name = f"attacker {number}"
            stack = peer_stack(keypair(name), SimClock(1, name), [machine])
            await swarm.nursery.start(stack.run)
            stack.host.learn(holder.id, holder.stack.host.addrs())
            stack.rpc.serve(vault_fetch.GET, PieceWanted, silence, declared=ANY)
            for version in (1, 2):
                pointer = pointer_to(state(version, 100), name, RUN, Uid(0, (1, number)), version=version)
                stack.rpc.tell(holder.id, KEEP, Keep(pointer), timeout_s=3600)
        await trio.sleep(5)
        pointer = await own(host, state(1))
        await host.vault.hand(pointer, holder.id)
        assert holder.vault.held == [pointer]
