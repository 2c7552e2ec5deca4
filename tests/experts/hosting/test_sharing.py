"""A host with more than its part hands experts to one with less: whole, without a lost update, and to nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused
from peerd.experts.hosting.sharing import TAKE
from peerd.experts.rules.host_share import HostShare
from peerd.messages.experts import TransferAnswer, TransferRequest
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.grid import Uid
from tests.kit.declared import declared
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import FakeExpert, FakeHosted
from tests.worlds.roles.expertpeers import ANNOUNCE_S, ExpertSwarm, MadeUpHost, expert_swarm, pointer_to, state

pytestmark = pytest.mark.slow  # many periods of several peers

RUN = expert_run(3, 4, checkpoint_updates=10, checkpoint_s=5)
UIDS = [Uid(0, (i, j)) for i in range(2) for j in range(4)]
A, OTHER = UIDS[0], Uid(0, (2, 3))


async def full_host(swarm: ExpertSwarm, name: str = "full") -> MadeUpHost:
    """A host of eight experts that made updates, and has no room."""
    host = await swarm.host(name, *UIDS, shares=True)
    host.sample_s = 0.01
    for number, uid in enumerate(UIDS):
        host.experts[uid].model.version = 40 + number
    return host


async def test_a_newcomer_gets_its_part_by_its_speed_and_no_update_is_lost(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm)
        newcomer = await swarm.host("newcomer", shares=True)
        await trio.sleep(3 * ANNOUNCE_S)
        assert len(newcomer.experts) == 1  # nobody knows how fast it is
        newcomer.sample_s = 0.01
        await trio.sleep(6 * ANNOUNCE_S)
        assert (len(full.experts), len(newcomer.experts)) == (4, 4)
        assert sorted([*full.experts, *newcomer.experts]) == UIDS
        for uid, hosted in newcomer.experts.items():
            assert (hosted.generation, hosted.model.version, hosted.model.seed) == (1, 40 + UIDS.index(uid), "full")
            assert full.dropped[uid] == f"peer {newcomer.peer.id.short} owns it in generation 1"
        assert (full.sharing.status(), newcomer.sharing.status()) == (
            {"given": 4, "received": 0},
            {"given": 0, "received": 4},
        )
        assert full.held == set()
        assert [event["to"] for event in full.events("expert.given")] == [newcomer.peer.id.text] * 4
        assert [host.adoption.yielded + host.adoption.adopted for host in (full, newcomer)] == [0, 0]
        await trio.sleep(10 * ANNOUNCE_S)
        assert (len(full.experts), len(newcomer.experts)) == (4, 4)
        newest = newcomer.peer.vault.own(next(iter(newcomer.experts)))
        assert newest is not None  # it is safe there, too
        assert newest.generation == 1


async def test_an_expert_answers_no_update_while_it_moves_and_does_again_when_it_stays(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm)
        held = list[set[Uid]]()

        async def refuse(call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
            held.append(set(full.held))
            raise Refused("I have changed my mind")

        await offering(swarm, refuse)
        await trio.sleep(4 * ANNOUNCE_S)
        assert [len(uids) for uids in held] == [1]  # asked once, and then left alone for a while
        assert sorted(full.experts) == UIDS
        assert full.held == full.peer.vault.giving == set()
        assert full.events("expert.kept_here") == []  # for the debug log
        await trio.sleep(8 * ANNOUNCE_S)
        assert len(held) == 2


FAR = (1 << 53) - 1


@pytest.mark.parametrize(("claimed", "why"), [(None, "does not announce it"), (FAR, "not in the next one")])
async def test_an_expert_stays_with_a_host_whose_taker_does_not_announce_it_in_the_next_generation(
    claimed: int | None, why: str, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm)

        async def promise(call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
            uid = call.body.pointer.expert.uid
            if claimed is not None:
                hosted = FakeHosted(FakeExpert(uid, 40, "other"), claimed)
                await swarm.claim(swarm.peers["other"], uid, hosted={uid: hosted})
            await trio.lowlevel.checkpoint()
            return Answer(TransferAnswer(claimed or call.body.pointer.generation + 1))

        await offering(swarm, promise)
        await trio.sleep(5 * ANNOUNCE_S)
        assert sorted(full.experts) == UIDS
        assert why in full.events("expert.kept_here")[0]["reason"]


async def test_a_taker_that_never_answers_holds_an_expert_up_no_longer_than_its_deadline(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm)
        since = list[float]()

        async def wait(call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
            since.append(trio.current_time())
            await trio.sleep_forever()
            raise AssertionError

        await offering(swarm, wait)
        await trio.sleep(1.5 * ANNOUNCE_S)
        assert full.held == {uid for uid in UIDS if uid in full.peer.vault.giving} != set()
        await trio.sleep_until(since[0] + 20)
        assert full.held == full.peer.vault.giving == set()
        assert len(full.events("expert.kept_here")) == 1


async def offering(swarm: ExpertSwarm, take: Any) -> Any:
    """A peer that says it has room for experts, and answers as `take` does."""
    (other,) = await swarm.start("other")
    other.stack.rpc.serve(TAKE, TransferRequest, take, declared=declared())
    other.vault.adopts, other.vault.share = lambda: True, lambda: HostShare(0, 8, 0.01)
    assert await other.vault.announce()
    return other


async def asked_to_take(swarm: ExpertSwarm, caller: Any, host: MadeUpHost, body: TransferRequest) -> str:
    """Why a host refuses to take an expert."""
    with pytest.raises(Refused) as refused:
        await caller.stack.rpc.call(host.peer.id, TAKE, body, TransferAnswer, timeout_s=60.0)
    return str(refused.value)


async def test_a_host_takes_only_what_its_owner_hands_over(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm, "full")
        host = await swarm.host("host", OTHER, places=2, shares=True)
        host.sample_s = 0.01
        (thief,) = await swarm.start("thief")
        await trio.sleep(0.5)
        forged = pointer_to(state(1, 1000), "full", RUN, A)
        said = [await asked_to_take(swarm, thief, host, TransferRequest(forged, 900, 0.01))]
        mine = pointer_to(state(1, 1000), "thief", RUN, A, generation=3)
        said.append(await asked_to_take(swarm, thief, host, TransferRequest(mine, 900, 0.01)))
        there = pointer_to(state(1, 1000), "thief", RUN, OTHER)
        said.append(await asked_to_take(swarm, thief, host, TransferRequest(there, 900, 0.01)))
        said.append(await asked_to_take(swarm, thief, host, TransferRequest(mine, 2, 0.01)))
        huge = pointer_to(state(1, 1000), "thief", RUN, A, size_bytes=1 << 32)
        said.append(await asked_to_take(swarm, thief, host, TransferRequest(huge, 900, 0.01)))
        for why, told in zip(
            [
                "another peer's checkpoint",
                "does not say that you own",
                "is here already",
                "are this host's full share already",
                "a state takes",
            ],
            said,
            strict=True,
        ):
            assert why in told, told
        assert list(host.experts) == [OTHER]
        assert sorted(full.experts) == UIDS


async def test_a_host_that_leaves_hands_all_its_experts_over_and_no_update_is_lost(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        others = [await swarm.host(name, places=5, shares=True) for name in ("one", "two")]
        leaving = await full_host(swarm, "leaving")
        await trio.sleep(0.5)
        began = trio.current_time()
        await leaving.sharing.leave()
        assert trio.current_time() - began < 3.5
        assert leaving.experts == {}
        found = {uid: hosted for other in others for uid, hosted in other.experts.items()}
        assert sorted(found) == UIDS
        assert [found[uid].model.version for uid in UIDS] == list(range(40, 48))
        assert {len(other.experts) for other in others} == {4}


async def test_a_host_that_leaves_does_not_wait_for_long(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:

        async def wait(call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
            await trio.sleep_forever()
            raise AssertionError

        await offering(swarm, wait)
        leaving = await full_host(swarm, "leaving")
        await trio.sleep(0.5)
        began = trio.current_time()
        await leaving.sharing.leave()
        assert trio.current_time() - began == pytest.approx(3.5)
        assert sorted(leaving.experts) == UIDS
        assert leaving.held == leaving.peer.vault.giving == set()


@pytest.mark.parametrize("seed", ["NaN", "another"])
async def test_a_state_that_does_not_load_is_named_and_its_owner_goes_on(
    seed: str, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full = await full_host(swarm)
        for hosted in full.experts.values():
            hosted.model.seed = seed
            if seed == "another":
                hosted.model.uid = OTHER
        newcomer = await swarm.host("newcomer", shares=True)
        await trio.sleep(3 * ANNOUNCE_S)
        assert newcomer.experts == {}
        assert sorted(full.experts) == UIDS
        (event,) = newcomer.events("expert.not_taken")
        assert event["peer"] == full.peer.id.text
        assert ("NaN" if seed == "NaN" else "a state of 0.2.3") in event["reason"]


async def test_an_expert_whose_taker_claims_it_has_moved_though_the_answer_is_lost(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, RUN) as swarm:
        full, moved = await full_host(swarm), list[Uid]()

        async def take(call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
            taker, uid = swarm.peers["other"], call.body.pointer.expert.uid
            await swarm.claim(taker, uid, hosted={uid: FakeHosted(FakeExpert(uid, 40, "other"), 1)})
            moved.append(uid)
            await trio.sleep_forever()
            raise AssertionError

        await offering(swarm, take)
        await trio.sleep(ANNOUNCE_S + 25)
        assert moved[0] not in full.experts
        assert "owns it in generation 1" in full.dropped[moved[0]]
