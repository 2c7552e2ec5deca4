"""Orphans come back on one other host, from their newest checkpoint that is whole; rivals settle who owns an expert."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.experts.grid import Uid
from peerd.core.messages.experts import HolderOffer, Name, Pointer
from peerd.machine.experts.custody import in_turn
from peerd.service.experts.vault_disk import digests_of
from tests.kit.amount import some
from tests.kit.expertpeers import (
    ANNOUNCE_S,
    MIB,
    ExpertPeer,
    ExpertSwarm,
    MadeUpExpert,
    MadeUpHost,
    expert_run,
    expert_swarm,
    pointer_to,
)

pytestmark = pytest.mark.slow  # many periods of several peers

A = Uid(0, (1, 2))
RUN = expert_run(checkpoint_updates=10, checkpoint_s=5)


def owners(hosts: Iterable[MadeUpHost], uid: Uid = A) -> list[str]:
    return [host.peer.name for host in hosts if uid in host.experts and host.peer.name in host.swarm.peers]


def lose(swarm: ExpertSwarm, name: str) -> float:
    """A power cut: the peer is gone, and nobody is told."""
    swarm.net.partition([name])
    swarm.peers.pop(name).stop()
    return trio.current_time()


def first_of(uid: Uid, hosts: Iterable[MadeUpHost]) -> list[MadeUpHost]:
    """Hosts in the order in which they come for an expert."""
    by_id = {host.peer.id: host for host in hosts}
    return [by_id[peer] for peer in in_turn(uid, by_id)]


async def started(swarm: ExpertSwarm, *uids: Uid, adopters: int = 3, holders: int = 2) -> tuple[Any, list[MadeUpHost]]:
    """Backbones that hold, a host with experts that made updates and were saved, and hosts with room."""
    await swarm.start(*(f"backbone{i}" for i in range(holders)))
    host = await swarm.host("mortal", *uids)
    others = [await swarm.host(f"host{i}") for i in range(adopters)]
    for uid in uids:
        host.experts[uid].model.version = 40
    await trio.sleep(2.5 * ANNOUNCE_S)
    return host, others


async def test_an_orphan_is_adopted_within_two_periods_by_exactly_one_host_with_its_last_checkpoint(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        mortal, others = await started(swarm, A)
        saved = mortal.peer.vault.own(A)
        mortal.experts[A].model.version = 47  # announced, and not in a checkpoint yet
        await mortal.announce(A)
        at = lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        (name,) = owners(others)
        adopter = next(host for host in others if host.peer.name == name)
        assert adopter is first_of(A, others)[0]
        assert adopter.adopted_at[A] - at <= 2 * ANNOUNCE_S
        assert (adopter.experts[A].generation, adopter.experts[A].model.version) == (1, 40)
        assert adopter.experts[A].model.seed == "mortal"
        (event,) = adopter.events("expert.adopted")
        assert event["updates_lost"] == 7
        assert event["digest"] == saved.digest.hex()
        pointer = adopter.peer.vault.own(A)  # a checkpoint of the new generation, at once
        assert pointer is not None
        assert (pointer.generation, pointer.version, pointer.began) == (1, 40, 40)


async def test_a_host_that_announced_more_updates_than_it_can_have_made_does_not_inflate_what_counts_as_lost(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        liar, (adopter,) = await started(swarm, A, adopters=1)
        liar.experts[A].model.version = 1 << 40
        await liar.announce(A)
        lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        assert adopter.experts[A].model.version == 40
        assert adopter.adoption.updates_lost == 2 * RUN.experts.checkpoint_updates


@pytest.mark.parametrize("later_s", some([2.59, 0.0, 1.48, 4.07], 1))  # of the others' looks
async def test_many_orphans_spread_over_several_hosts_and_none_is_adopted_twice(
    later_s: float, autojump_clock: MockClock, tmp_path: Path
) -> None:
    uids = [Uid(0, (i, j)) for i in range(3) for j in range(4)]
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, *uids)
        await trio.sleep(later_s)
        at = lose(swarm, "mortal")
        await trio.sleep(6 * ANNOUNCE_S)
        assert [len(owners(others, uid)) for uid in uids] == [1] * len(uids)
        assert sum(len(host.events("expert.adopted")) for host in others) == len(uids)  # none twice
        assert [host.adoption.yielded for host in others] == [0] * len(others)
        assert all(host.experts for host in others)
        assert max(t for host in others for t in host.adopted_at.values()) - at <= 2 * ANNOUNCE_S


async def test_an_adopter_without_room_leaves_orphans_to_the_next(autojump_clock: MockClock, tmp_path: Path) -> None:
    uids = [Uid(0, (i, j)) for i in range(2) for j in range(3)]
    async with expert_swarm(tmp_path, RUN) as swarm:
        await swarm.start("backbone0", "backbone1")
        mortal = await swarm.host("mortal", *uids)
        small = await swarm.host("small", places=1)
        large = await swarm.host("large")
        for uid in uids:
            mortal.experts[uid].model.version = 40
        await trio.sleep(2.5 * ANNOUNCE_S)
        lose(swarm, "mortal")
        await trio.sleep(6 * ANNOUNCE_S)
        assert (len(small.experts), len(large.experts)) == (1, 5)


async def test_when_the_first_adopter_is_gone_too_the_next_one_comes(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A)
        order = first_of(A, others)
        swarm.net.partition(["mortal", order[0].peer.name])
        for gone in ("mortal", order[0].peer.name):
            swarm.peers.pop(gone).stop()
        at = trio.current_time()
        await trio.sleep(5 * ANNOUNCE_S)
        assert owners(order[1:]) == [order[1].peer.name]
        assert order[1].adopted_at[A] - at <= 2 * ANNOUNCE_S


async def test_backbones_alone_keep_what_an_expert_learned(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        await started(swarm, A, adopters=0)
        lose(swarm, "mortal")
        await trio.sleep(10 * ANNOUNCE_S)
        late = await swarm.host("late")
        await trio.sleep(5 * ANNOUNCE_S)
        assert late.experts[A].model.version == 40
        assert late.adoption.began_anew == 0


def rot(peer: ExpertPeer, pointer: Pointer) -> None:
    """Damage a checkpoint on a holder's disk."""
    path = peer.vault._disk._path(pointer)
    rotten = bytearray(path.read_bytes())
    rotten[-1] ^= 1
    path.write_bytes(rotten)


async def test_where_the_newest_digest_lies_an_older_checkpoint_is_taken(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        mortal, others = await started(swarm, A, adopters=1)
        mortal.experts[A].model.version = 60
        await trio.sleep(ANNOUNCE_S)
        newest = mortal.peer.vault.own(A)
        assert newest.version == 60
        for peer in swarm.peers.values():
            if newest in peer.vault.held:
                rot(peer, newest)
        lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        (adopter,) = others
        assert adopter.experts[A].model.version == 40
        assert adopter.adoption.updates_lost == 20
        (event,) = adopter.events("expert.checkpoint_unusable")
        assert event["version"] == 60
        assert event["made_by"] == mortal.peer.id.text


async def test_of_a_checkpoint_with_nan_the_one_before_is_taken(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        mortal, (adopter,) = await started(swarm, A, adopters=1)
        mortal.experts[A].model.version, mortal.experts[A].model.seed = 60, "NaN"
        await trio.sleep(ANNOUNCE_S)
        lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        assert (adopter.experts[A].model.version, adopter.experts[A].model.seed) == (40, "mortal")
        (event,) = adopter.events("expert.checkpoint_unusable")
        assert "NaN" in event["reason"]


async def test_when_all_holders_are_gone_an_expert_begins_anew_and_the_log_says_so(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        await swarm.start("first", most_bytes=MIB)  # without room: it holds nothing
        await swarm.start("backbone0", "backbone1")
        mortal = await swarm.host("mortal", A)
        adopter = MadeUpHost(swarm, swarm.make("adopter", most_bytes=MIB), 8)
        await swarm.begin(adopter.peer)
        mortal.experts[A].model.version = 40
        await trio.sleep(2.5 * ANNOUNCE_S)
        assert [len(p.vault.held) for p in swarm.peers.values()] == [0, 1, 1, 1, 0]
        swarm.net.partition(["backbone0", "backbone1", "mortal"])
        for gone in ("backbone0", "backbone1", "mortal"):
            swarm.peers.pop(gone).stop()
        await trio.sleep(20 * ANNOUNCE_S)
        hosted = adopter.experts[A]
        assert (hosted.generation, hosted.model.version, hosted.model.seed) == (1, 0, "anew")
        (event,) = adopter.events("expert.began_anew")
        assert event["level"] == "warn"
        assert adopter.adoption.updates_lost == 40


async def test_an_expert_that_was_never_saved_begins_anew(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, expert_run(checkpoint_updates=10, copies=0)) as swarm:
        _, (adopter,) = await started(swarm, A, adopters=1)
        lose(swarm, "mortal")
        await trio.sleep(8 * ANNOUNCE_S)
        assert adopter.experts[A].generation == 1
        assert adopter.adoption.began_anew == 1


async def test_a_checkpoint_larger_than_a_state_is_not_fetched(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        mortal, (adopter,) = await started(swarm, A, adopters=1)
        data = bytes(5 * MIB)
        large = pointer_to(data, "mortal", RUN, A, version=70)
        await mortal.peer.vault.put(large, digests_of(data), data)
        await mortal.peer.vault.hand(large, swarm.peers["backbone0"].id)
        await trio.sleep(ANNOUNCE_S)
        lose(swarm, "mortal")
        await trio.sleep(5 * ANNOUNCE_S)
        assert adopter.experts[A].model.version == 40


async def test_a_host_that_answers_is_left_its_experts_though_it_announces_late(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        late, others = await started(swarm, A)

        async def hang(uid: Uid) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(late, "announce", hang)
        await trio.sleep(4 * ANNOUNCE_S)
        assert owners([late, *others]) == ["mortal"]


async def test_a_host_that_announces_is_left_its_experts_though_one_peer_cannot_reach_it(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A)
        for other in others:

            async def never(peer: Any, timeout_s: float) -> bool:
                await trio.sleep(timeout_s)
                return False

            monkeypatch.setattr(other.peer.vault, "answers", never)
        await trio.sleep(10 * ANNOUNCE_S)
        assert owners([host, *others]) == ["mortal"]


async def test_experts_of_a_host_that_left_politely_are_adopted_with_their_last_updates(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A)
        host.experts[A].model.version = 43
        await host.checkpoints.leave()
        await host.drop(A, "leaves")
        swarm.peers.pop("mortal").stop()
        at = trio.current_time()
        await trio.sleep(3 * ANNOUNCE_S)
        (name,) = owners(others)
        adopter = next(h for h in others if h.peer.name == name)
        assert adopter.experts[A].model.version == 43
        assert adopter.adoption.updates_lost == 0
        assert adopter.adopted_at[A] - at <= 2 * ANNOUNCE_S


async def test_a_peer_that_says_that_it_will_adopt_and_is_gone_holds_nobody_up(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        _, others = await started(swarm, A)
        liar = swarm.make("liar")
        await swarm.begin(liar)
        await liar.vault.directory.announce([], HolderOffer(0, True, [], taking=[Name.of(A)]))
        swarm.net.partition(["liar", "mortal"])
        for gone in ("mortal", "liar"):
            swarm.peers.pop(gone).stop()
        await trio.sleep(5 * ANNOUNCE_S)
        assert len(owners(others)) == 1


async def test_after_a_partition_the_highest_generation_wins_everywhere_and_the_loser_tells_what_it_dropped(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        host, others = await started(swarm, A, adopters=2)
        swarm.net.partition(["mortal", "backbone1"])
        host.experts[A].model.version = 55
        await trio.sleep(8 * ANNOUNCE_S)
        assert host.experts[A].model.version == 55
        (name,) = owners(others)
        winner = next(h for h in others if h.peer.name == name)
        winner.experts[A].model.version += 3
        assert winner.experts[A].generation == 1
        assert A in host.experts  # two owners, as long as it lasts
        swarm.net.heal()
        await trio.sleep(4 * ANNOUNCE_S)
        assert owners([host, *others]) == [name]
        assert winner.experts[A].model.version == 43
        (event,) = host.events("expert.yielded")
        assert event["to"] == winner.peer.id.text
        assert event["updates_dropped"] == 15  # though its own side had saved them
        assert "15 updates are dropped" in host.dropped[A]
        assert host.adoption.updates_dropped == 15


async def test_of_two_owners_in_one_generation_the_higher_peer_id_stays(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        await swarm.start("first")
        one, other = await swarm.host("one", A), await swarm.host("other", A)
        await trio.sleep(3 * ANNOUNCE_S)
        low, high = sorted([one, other], key=lambda h: h.peer.id)
        assert owners([one, other]) == [high.peer.name]
        assert len(low.events("expert.yielded")) == 1
        assert max(low.peer.id.text, high.peer.id.text) == high.peer.id.text  # ids and their texts have one order


def test_made_up_states_come_back() -> None:
    model, again = MadeUpExpert(A, "seed"), MadeUpExpert(A)
    model.version = 5
    again.load(model.snapshot())
    assert (again.seed, again.version) == ("seed", 5)
