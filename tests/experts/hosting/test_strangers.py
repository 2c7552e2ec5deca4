"""Strangers among hosts of experts, in an open run: what they claim, sign and announce outside the chain of owners
moves nobody, neither hosts and holders nor callers, and what they say that they adopt delays an adoption by one turn at
most. After a partition one of two owners gives way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused
from peerd.core.ids import PeerId
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.experts.calls.kept_directory import KeptDirectory
from peerd.experts.calls.vault_disk import digests_of
from peerd.experts.hosting.host import OwnExpert
from peerd.experts.hosting.vault_keeper import VaultKeeper
from peerd.messages.experts import CheckpointRef
from peerd.run.grid import Uid
from tests.experts.hosting.test_adoption import first_of, lose, owners, started
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import FakeExpert, FakeHosted
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.roles.expertpeers import ANNOUNCE_S, ExpertPeer, ExpertSwarm, MadeUpHost, expert_swarm, pointer_to

pytestmark = pytest.mark.slow  # many periods of several peers

RUN = expert_run(1, 6, checkpoint_updates=10, checkpoint_s=5)
A, B = Uid(0, (0, 2)), Uid(0, (0, 4))
FAR, MANY = 1001, 1_000_000  # generation and version, as one stranger had them


class Stranger:
    """A peer outside the chain of owners, with a checkpoint of its own, which it announces for ever."""

    def __init__(self, swarm: ExpertSwarm, peer: ExpertPeer, uid: Uid) -> None:
        self.swarm, self.peer, self.uid, self.data = swarm, peer, uid, b""
        self.pointer: CheckpointRef | None = None

    async def publish(self, generation: int = FAR, version: int = MANY, **facts: Any) -> None:
        """Put a checkpoint of its own making into its vault, which announces it."""
        self.data = FakeExpert(self.uid, version, "stranger").snapshot()
        facts |= {"generation": generation, "version": version}
        self.pointer = pointer_to(self.data, self.peer.name, self.swarm.run, self.uid, **facts)
        await self.peer.vault.put(self.pointer, digests_of(self.data), self.data)

    async def claim(self, generation: int = FAR) -> None:
        """Announce the expert in every period, as its host does."""
        hosted = {self.uid: FakeHosted(FakeExpert(self.uid, MANY, "stranger"), generation)}
        self.swarm.nursery.start_soon(self._claim, hosted)

    async def _claim(self, hosted: dict[Uid, FakeHosted]) -> None:
        while True:
            await self.swarm.claim(self.peer, self.uid, hosted=hosted)
            await trio.sleep(ANNOUNCE_S / 2)


async def stranger(swarm: ExpertSwarm, uid: Uid = A, name: str = "stranger", at: str = "") -> Stranger:
    return Stranger(swarm, await swarm.begin(swarm.make(name, at=at)), uid)


async def false_owner(swarm: ExpertSwarm) -> Stranger:
    """A stranger that signed a later checkpoint of the expert, and claims it."""
    liar = await stranger(swarm)
    await liar.publish()
    await liar.claim()
    await trio.sleep(ANNOUNCE_S)
    return liar


def state_of(hosts: Iterable[MadeUpHost], uid: Uid = A) -> tuple[list[str], str, int]:
    """The owners of an expert, and what the first one has: whose state, and in which generation."""
    found = [host for host in hosts if uid in host.experts]
    if not found:
        return [], "", -1
    hosted = found[0].experts[uid]
    return [host.peer.name for host in found], hosted.model.seed, hosted.generation


def owner_pointer(host: MadeUpHost, uid: Uid = A) -> CheckpointRef:
    pointer = host.peer.vault.own(uid)
    assert pointer is not None
    return pointer


# --- what strangers sign ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claims", [False, True], ids=["signs", "signs and claims"])
async def test_the_heir_of_a_lost_host_adopts_its_state_and_no_strangers(
    autojump_clock: MockClock, tmp_path: Path, claims: bool
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A, adopters=2)
        liar = await stranger(swarm)
        await liar.publish()
        if claims:
            await liar.claim()
        await trio.sleep(2 * ANNOUNCE_S)
        at = lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        names, seed, generation = state_of(others)
        assert (len(names), seed, generation) == (1, "mortal", 1)
        (heir,) = [host for host in others if A in host.experts]
        assert heir.adopted_at[A] - at <= 2 * ANNOUNCE_S
        assert heir.experts[A].model.version == 40


@pytest.mark.parametrize("linked", [False, True], ids=["far", "next"])
async def test_a_living_host_keeps_its_experts_whatever_a_stranger_claims(
    autojump_clock: MockClock, tmp_path: Path, linked: bool
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A, adopters=2)
        liar = await stranger(swarm)
        if linked:  # it goes on from what the host signed, and the host still lives
            before = owner_pointer(host)
            await liar.publish(1, 41, former=before.as_former(), began=before.version)
        else:
            await liar.publish()
        await liar.claim(1 if linked else FAR)
        await trio.sleep(4 * ANNOUNCE_S)
        assert state_of([host, *others]) == (["mortal"], "mortal", 0)
        assert host.events("expert.yielded") == []
        lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        assert state_of(others)[1:] == ("mortal", 1)


async def test_holders_keep_no_checkpoint_of_a_stranger_beside_the_owners(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, _ = await started(swarm, A)
        liar = await stranger(swarm)
        before = owner_pointer(host)
        for facts in ({"generation": 1, "version": 41, "former": before.as_former(), "began": before.version}, {}):
            await liar.publish(**facts)
            assert liar.pointer is not None
            for name in ("backbone0", "backbone1", "host0"):
                with pytest.raises(Refused, match="do not own"):
                    await liar.peer.vault.hand(liar.pointer, swarm.peers[name].id)
        assert f"peer {liar.peer.id} asks to keep" in caplog.text


async def test_a_host_that_comes_again_goes_on_with_its_experts_though_a_stranger_signed_later_ones(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, _ = await started(swarm, A, adopters=0)
        liar = await stranger(swarm)
        await liar.publish()
        await trio.sleep(ANNOUNCE_S)
        await host.peer.vault.open()  # as after a start: what it knew is on its disk
        view = await host.peer.vault.directory.look([A.prefix])
        assert {copy.pointer.peer for copy in view.kept[A]} == {host.peer.id}


async def test_a_host_that_starts_again_takes_back_its_experts_though_a_stranger_claims_them_in_a_later_generation(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, _ = await started(swarm, A, adopters=0)
        await false_owner(swarm)
        keeper = VaultKeeper(host.ctx, cast(Any, host))
        keeper.vault = host.peer.vault
        assert await keeper.recall() == {A: OwnExpert(0)}


async def test_a_host_that_starts_again_names_the_experts_that_it_leaves_to_later_owners(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, _ = await started(swarm, A, adopters=0)
        before, other = owner_pointer(host), await stranger(swarm)
        await host.drop(A, "given")
        host.peer.vault.directory.lineages.gave(trio.current_time(), A, 1, other.peer.id)
        await other.publish(1, 41, former=before.as_former(), began=before.version)
        await other.claim(1)
        await trio.sleep(2 * ANNOUNCE_S)
        keeper = VaultKeeper(host.ctx, cast(Any, host))
        keeper.vault = host.peer.vault
        assert await keeper.recall() == {}
        (event,) = host.events("expert.not_resumed")
        assert (event["expert"], event["generation"], event["newer"]) == (str(A), 0, 1)


# --- callers ---------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """A peer that hosts nothing, and reads who hosts the expert, as trainers do."""

    directory: ExpertDirectory

    async def owner(self) -> str:
        """The peer that it would call now."""
        await self.directory.read([A.prefix])
        claim = self.directory.owner(A)
        return claim.host.text if claim is not None else ""


async def caller(swarm: ExpertSwarm, name: str) -> Caller:
    stack = (await swarm.start(name))[0].stack
    directory = ExpertDirectory(swarm.run, stack.rpc, stack.host, stack.dht, stack.clock)
    directory.contested.source = KeptDirectory(swarm.run, stack, InlineWorker())
    return Caller(directory)


async def test_callers_follow_the_owner_and_its_heir_whatever_generation_strangers_claim(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A, adopters=2)
        old = await caller(swarm, "old")
        assert await old.owner() == host.peer.id.text
        for i in range(5):  # more than the claims of one expert that a caller keeps
            liar = await stranger(swarm, name=f"stranger{i}", at="stranger0" if i else "")
            await liar.publish(FAR + i)
            await liar.claim(FAR + i)
        await trio.sleep(ANNOUNCE_S)
        new = await caller(swarm, "new")
        assert [await old.owner(), await new.owner()] == [host.peer.id.text] * 2
        lose(swarm, "mortal")
        for _ in range(5):
            await trio.sleep(ANNOUNCE_S)
            await old.owner()
        (heir,) = [each for each in others if A in each.experts]
        assert [await old.owner(), await new.owner()] == [heir.peer.id.text] * 2


# --- partitions ------------------------------------------------------------------------------------------------------


async def test_after_a_partition_one_owner_gives_way_though_relays_hide_the_networks_of_each_from_the_other(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A, adopters=2)
        await swarm.start("backbone2")
        sides = [["mortal", "backbone0"], ["host0", "host1", "backbone1", "backbone2"]]
        swarm.net.partition(sides[0])
        host.experts[A].model.version = 55
        await trio.sleep(4 * ANNOUNCE_S)
        for mine, theirs in (sides, sides[::-1]):
            hidden = {swarm.peers[name].id for name in theirs}
            for name in mine:
                hide(swarm.peers[name].vault.directory, hidden)
        assert len(owners([host, *others])) == 2
        swarm.net.heal()
        await trio.sleep(10 * ANNOUNCE_S)
        assert len(owners([host, *others])) == 1
        (event,) = [event for each in (host, *others) for event in each.events("expert.yielded")]
        assert event["expert"] == str(A)


def hide(directory: KeptDirectory, hidden: set[PeerId]) -> None:
    """Have a peer see these over a relay, as behind home routers."""
    sees = directory.lineages._seat
    directory.lineages._seat = lambda peer: sees(peer) and ("over the relay" if peer in hidden else sees(peer))


# --- deaths ----------------------------------------------------------------------------------------------------------


async def test_when_owner_and_heir_die_the_next_one_goes_on_from_the_heirs_state(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A, adopters=3)
        await false_owner(swarm)
        lose(swarm, "mortal")
        await trio.sleep(3 * ANNOUNCE_S)
        (name,) = owners(others)
        heir = next(host for host in others if host.peer.name == name)
        heir.experts[A].model.version = 47
        await trio.sleep(2 * ANNOUNCE_S)
        at = lose(swarm, name)
        await trio.sleep(4 * ANNOUNCE_S)
        living = [host for host in others if host is not heir]
        assert state_of(living)[1:] == ("mortal", 2)
        (last,) = [host for host in living if A in host.experts]
        assert last.experts[A].model.version == 47
        assert last.adopted_at[A] - at <= 2 * ANNOUNCE_S


async def test_when_owner_and_heir_die_at_once_the_next_one_goes_on_from_the_owners_state(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A, adopters=3)
        first = first_of(A, others)[0]
        lose(swarm, "mortal")
        with trio.fail_after(3 * ANNOUNCE_S):
            while A not in first.experts:  # noqa: ASYNC110
                await trio.sleep(0.05)
        lose(swarm, first.peer.name)  # before anybody holds its first checkpoint
        await trio.sleep(8 * ANNOUNCE_S)
        names, seed, _ = state_of([host for host in others if host is not first])
        assert (len(names), seed) == (1, "mortal")


async def test_when_all_hosts_are_gone_a_newcomer_goes_on_from_what_holders_keep(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        await started(swarm, A, adopters=0)
        liar = await stranger(swarm)
        await liar.publish()
        others = [await stranger(swarm, name=f"stranger{i}", at="stranger") for i in range(4)]
        for other in others:  # holders of it, and all at one place
            assert liar.pointer is not None
            await other.peer.vault.put(liar.pointer, digests_of(liar.data), liar.data)
        lose(swarm, "mortal")
        await trio.sleep(10 * ANNOUNCE_S)
        late = await swarm.host("late")
        await trio.sleep(5 * ANNOUNCE_S)
        assert state_of([late]) == (["late"], "mortal", 1)
        assert late.experts[A].model.version == 40


# --- what strangers say that they adopt ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 6])
async def test_strangers_of_one_place_that_say_for_ever_that_they_adopt_delay_an_adoption_by_one_turn(
    autojump_clock: MockClock, tmp_path: Path, count: int
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A, B, adopters=2)
        liars = [await stranger(swarm)]
        liars += [await stranger(swarm, name=f"stranger{i}", at="stranger") for i in range(1, count)]
        at, turn_s = lose(swarm, "mortal"), others[0].peer.vault.directory.lineages.turns.longest_s(0)

        async def renew() -> None:
            """One identity after the other says so, the next one just before the one before has had its time."""
            for liar in liars:
                liar.peer.vault.taking.append(A)
                await liar.peer.vault.announce()
                await trio.sleep(turn_s - ANNOUNCE_S)

        swarm.nursery.start_soon(renew)
        await trio.sleep(3 * ANNOUNCE_S)
        assert state_of(others, B)[1:] == ("mortal", 1)
        await trio.sleep(turn_s + 3 * ANNOUNCE_S)
        names, seed, generation = state_of(others)
        assert (len(names), seed, generation) == (1, "mortal", 1)
        assert max(h.adopted_at[A] for h in others if A in h.experts) - at <= turn_s + 3 * ANNOUNCE_S


async def test_a_stranger_that_claims_an_orphan_and_shows_no_checkpoint_loses_its_turn(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A, adopters=2)
        liar = await stranger(swarm)
        lose(swarm, "mortal")
        turn_s = others[0].peer.vault.directory.lineages.turns.longest_s(0)
        await trio.sleep(ANNOUNCE_S)  # it is an orphan soon
        await liar.claim(1)
        await trio.sleep(turn_s + 5 * ANNOUNCE_S)
        names, seed, _ = state_of(others)
        assert (len(names), seed) == (1, "mortal")
