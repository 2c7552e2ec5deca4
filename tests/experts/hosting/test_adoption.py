"""Orphans come back on one other host, from their newest checkpoint that is whole; rivals settle who owns an expert.

A scene in which several experts are lost runs once; each of its tests checks one property of what it left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.experts.calls.kept_directory import CustodyView
from peerd.experts.calls.vault_disk import digests_of
from peerd.experts.owners.owner_tree import KeptCopy
from peerd.experts.rules.orphan_watch import SeenClaim, in_turn
from peerd.messages.experts import CheckpointRef, HolderOffer, Name
from peerd.run.grid import Uid
from tests.kit.amount import some
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import FakeExpert
from tests.worlds.roles.expertpeers import (
    ANNOUNCE_S,
    MIB,
    STATE_BYTES,
    ExpertPeer,
    ExpertSwarm,
    MadeUpHost,
    expert_swarm,
    in_expert_swarm,
    pointer_to,
)

pytestmark = pytest.mark.slow  # many periods of several peers

RUN = expert_run(2, 6, checkpoint_updates=10, checkpoint_s=5)
UIDS = [Uid(0, (row, column)) for row in range(2) for column in range(6)]
A, B, C = Uid(0, (0, 2)), Uid(0, (0, 4)), Uid(0, (0, 5))  # below one prefix, for scenes with few experts
ONE_PREFIX = expert_run(1, 6, checkpoint_updates=10, checkpoint_s=5)


@dataclass(frozen=True)
class Fate:
    """Owners of one expert at the end; the other fields are those of the first owner."""

    owners: tuple[str, ...]
    adopted: tuple[Mapping[str, Any], ...] = ()  # events of its adoption, on all hosts
    unusable: tuple[Mapping[str, Any], ...] = ()  # events of checkpoints that could not be used
    after_s: float = 0.0
    generation: int = 0
    version: int = 0
    seed: str = ""
    pointer: CheckpointRef | None = None  # of the newest checkpoint that the owner made


def fate_of(uid: Uid, hosts: Iterable[MadeUpHost], lost_at: float = 0.0) -> Fate:
    hosts = list(hosts)
    owners = [host for host in hosts if uid in host.experts]

    def events(name: str) -> tuple[Mapping[str, Any], ...]:
        return tuple(event for host in hosts for event in host.events(name) if event["expert"] == str(uid))

    names = tuple(host.peer.name for host in owners)
    adopted, unusable = events("expert.adopted"), events("expert.checkpoint_unusable")
    if not owners:
        return Fate(names, adopted, unusable)
    host, hosted = owners[0], owners[0].experts[uid]
    after_s = host.adopted_at.get(uid, lost_at) - lost_at
    model, pointer = hosted.model, host.peer.vault.own(uid)
    return Fate(names, adopted, unusable, after_s, hosted.generation, model.version, model.seed, pointer)


def owners(hosts: Iterable[MadeUpHost], uid: Uid = A) -> list[str]:
    return [host.peer.name for host in hosts if uid in host.experts and host.peer.name in host.swarm.peers]


def lose(swarm: ExpertSwarm, *names: str) -> float:
    """A power cut: the peers are gone, and nobody is told."""
    swarm.net.partition(names)
    for name in names:
        swarm.peers.pop(name).stop()
    return trio.current_time()


def first_of(uid: Uid, hosts: Iterable[MadeUpHost]) -> list[MadeUpHost]:
    """Hosts in the order in which they come for an expert."""
    by_id = {host.peer.id: host for host in hosts}
    return [by_id[peer] for peer in in_turn(uid, by_id)]


async def started(swarm: ExpertSwarm, *uids: Uid, adopters: int = 1) -> tuple[MadeUpHost, list[MadeUpHost]]:
    """Two backbones that hold, a host with experts that made updates and were saved, and hosts with room."""
    await swarm.start("backbone0", "backbone1")
    host = await swarm.host("mortal", *uids)
    others = [await swarm.host(f"host{i}") for i in range(adopters)]
    for uid in uids:
        host.experts[uid].model.version = 40
    await trio.sleep(2.5 * ANNOUNCE_S)
    return host, others


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a scene in a swarm of its own and gives what it returns."""

    def run(scene: Callable[[ExpertSwarm], Awaitable[Any]], settings: Any = RUN) -> Any:
        return in_expert_swarm(scene, tmp_path_factory.mktemp("swarm"), settings)

    return run


# --- a host is lost with many experts ------------------------------------------------------------------------------

SAVED, ROTTEN, NAN, LARGE, BOASTED, UNSAVED = UIDS[3], UIDS[1], UIDS[2], UIDS[6], UIDS[7], UIDS[8]


@dataclass(frozen=True)
class Lost:
    """Results for the experts of a lost host, and the counters of all adopters."""

    mortal: str  # its peer id
    saved: CheckpointRef  # of SAVED, as the host made it
    turns: Mapping[Uid, Sequence[str]]  # adopters in the order in which they come
    fates: Mapping[Uid, Fate]
    yielded: int
    began_anew: int
    updates_lost: int


async def lose_a_host(swarm: ExpertSwarm, later_s: float) -> Lost:
    """A host of twelve experts is lost; of two other hosts with room and one with room for one, some hold copies."""
    await swarm.start("backbone0", "backbone1")
    mortal = await swarm.host("mortal", *UIDS)
    others = [await swarm.host(name, places=places) for name, places in (("small", 1), ("one", 8), ("two", 8))]
    models = {uid: hosted.model for uid, hosted in mortal.experts.items()}
    models[SAVED].size = MIB + 9  # two pieces
    for uid in UIDS:
        models[uid].version = 0 if uid == UNSAVED else 40
    await trio.sleep(2.5 * ANNOUNCE_S)
    saved = mortal.peer.vault.own(SAVED)
    models[ROTTEN].version = models[NAN].version = 60
    models[NAN].seed = "NaN"
    data = bytes(STATE_BYTES + MIB)
    large = pointer_to(data, "mortal", RUN, LARGE, version=70)
    await mortal.peer.vault.put(large, digests_of(data), data)
    await mortal.peer.vault.hand(large, swarm.peers["backbone0"].id)
    await trio.sleep(ANNOUNCE_S)
    newest = mortal.peer.vault.own(ROTTEN)
    assert saved is not None
    assert newest is not None
    assert newest.version == 60
    for peer in swarm.peers.values():
        if newest in peer.vault.held:
            rot(peer, newest)
    await trio.sleep(later_s)
    models[SAVED].version, models[BOASTED].version, models[UNSAVED].version = 47, 1 << 40, 5
    for row in range(2):
        await mortal.announce(Uid(0, (row, 0)))
    at = lose(swarm, "mortal")
    await trio.sleep(5 * ANNOUNCE_S)
    adoptions = [host.adoption for host in others]
    return Lost(
        mortal.peer.id.text,
        saved,
        {uid: [host.peer.name for host in first_of(uid, others)] for uid in UIDS},
        {uid: fate_of(uid, others, at) for uid in UIDS},
        sum(one.yielded for one in adoptions),
        sum(one.began_anew for one in adoptions),
        sum(one.updates_lost for one in adoptions),
    )


def rot(peer: ExpertPeer, pointer: CheckpointRef) -> None:
    """Damage a checkpoint on a holder's disk."""
    path = peer.vault._disk._path(pointer)
    rotten = bytearray(path.read_bytes())
    rotten[-1] ^= 1
    path.write_bytes(rotten)


@pytest.fixture(scope="module", params=some([2.59, 0.0, 1.48, 4.07], 1))  # of the others' looks
def lost(request: pytest.FixtureRequest, scene: Callable[..., Any]) -> Lost:
    return scene(partial(lose_a_host, later_s=request.param))


def test_an_orphan_is_adopted_by_the_first_host_in_turn_that_has_room_with_its_last_checkpoint(lost: Lost) -> None:
    fate = lost.fates[SAVED]
    assert fate.owners == (next(name for name in lost.turns[SAVED] if name != "small"),)
    assert (fate.generation, fate.version, fate.seed) == (1, 40, "mortal")
    (event,) = fate.adopted
    assert event["updates_lost"] == 7  # announced, and not in a checkpoint yet
    assert event["digest"] == lost.saved.digest.hex()


def test_an_adopter_writes_a_checkpoint_of_the_new_generation_at_once(lost: Lost) -> None:
    pointer = lost.fates[SAVED].pointer
    assert pointer is not None
    assert (pointer.generation, pointer.version, pointer.began) == (1, 40, 40)


def test_many_orphans_are_adopted_within_two_periods_and_none_twice(lost: Lost) -> None:
    assert [len(fate.owners) for fate in lost.fates.values()] == [1] * len(UIDS)
    assert [len(fate.adopted) for fate in lost.fates.values()] == [1] * len(UIDS)
    assert lost.yielded == 0
    # Those who hold the newest checkpoint of ROTTEN are all asked for it first, the lost host among them.
    assert max(fate.after_s for uid, fate in lost.fates.items() if uid != ROTTEN) <= 2 * ANNOUNCE_S


def test_many_orphans_spread_over_several_hosts_and_one_without_room_leaves_them_to_the_next(lost: Lost) -> None:
    by = {uid: fate.owners[0] for uid, fate in lost.fates.items()}
    assert list(by.values()).count("small") == 1
    assert set(by.values()) == {"small", "one", "two"}
    assert sum(turn[0] == "small" for turn in lost.turns.values()) > 1  # as many came to it first
    for uid, turn in lost.turns.items():
        assert by[uid] in ("small", next(name for name in turn if name != "small"))


def test_a_host_that_announced_more_updates_than_it_can_have_made_does_not_inflate_what_counts_as_lost(
    lost: Lost,
) -> None:
    fate = lost.fates[BOASTED]
    assert fate.version == 40
    assert fate.adopted[0]["updates_lost"] == 2 * RUN.experts.checkpoint_updates
    assert lost.updates_lost == sum(each.adopted[0]["updates_lost"] for each in lost.fates.values())


def test_where_the_newest_digest_lies_an_older_checkpoint_is_taken(lost: Lost) -> None:
    fate = lost.fates[ROTTEN]
    assert fate.version == 40
    assert fate.adopted[0]["updates_lost"] == 20
    (event,) = fate.unusable
    assert event["version"] == 60
    assert event["made_by"] == lost.mortal


def test_of_a_checkpoint_with_nan_the_one_before_is_taken(lost: Lost) -> None:
    fate = lost.fates[NAN]
    assert (fate.version, fate.seed) == (40, "mortal")
    (event,) = fate.unusable
    assert "NaN" in event["reason"]


def test_a_checkpoint_larger_than_a_state_is_not_fetched(lost: Lost) -> None:
    fate = lost.fates[LARGE]
    assert fate.version == 40
    (event,) = fate.unusable
    assert f"a state takes {STATE_BYTES} at most" in event["reason"]


def test_an_expert_that_was_never_saved_begins_anew(lost: Lost) -> None:
    fate = lost.fates[UNSAVED]
    assert (fate.generation, fate.version, fate.seed) == (1, 0, "anew")
    assert fate.adopted[0]["updates_lost"] == 5
    assert lost.began_anew == 1


# --- peers go in several ways at once ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gone:
    """Results for experts whose hosts left, and the order in which others try to adopt the first one."""

    turn: Sequence[str]
    fates: Mapping[Uid, Fate]


async def lose_several(swarm: ExpertSwarm) -> Gone:
    """One host leaves politely, with C. At once another is lost, with A and B, and so are the peer that comes first
    for A and one that says that it will adopt B.
    """
    _, others = await started(swarm, A, B, adopters=3)
    polite = await swarm.host("polite", C)
    liar = await swarm.begin(swarm.make("liar"))
    polite.experts[C].model.version = 40
    await trio.sleep(ANNOUNCE_S)
    polite.experts[C].model.version = 43
    await polite.checkpoints.leave()
    await polite.drop(C, "leaves")
    swarm.peers.pop("polite").stop()
    await liar.vault.directory.announce([], HolderOffer(0, True, [], taking=[Name.of(B)]))
    turn = first_of(A, others)
    at = lose(swarm, "mortal", "liar", turn[0].peer.name)
    await trio.sleep(5 * ANNOUNCE_S)
    living = [host for host in others if host.peer.name in swarm.peers]
    return Gone([host.peer.name for host in turn], {uid: fate_of(uid, living, at) for uid in (A, B, C)})


@pytest.fixture(scope="module")
def gone(scene: Callable[..., Any]) -> Gone:
    return scene(lose_several, ONE_PREFIX)


def test_when_the_first_adopter_is_gone_too_the_next_one_comes(gone: Gone) -> None:
    assert gone.fates[A].owners == (gone.turn[1],)
    assert gone.fates[A].after_s <= 2 * ANNOUNCE_S


def test_a_peer_that_says_that_it_will_adopt_and_is_gone_holds_nobody_up(gone: Gone) -> None:
    assert len(gone.fates[B].owners) == 1
    assert gone.fates[B].after_s <= 2 * ANNOUNCE_S


def test_experts_of_a_host_that_left_politely_are_adopted_with_their_last_updates(gone: Gone) -> None:
    fate = gone.fates[C]
    assert len(fate.owners) == 1
    assert fate.version == 43
    assert fate.adopted[0]["updates_lost"] == 0
    assert fate.after_s <= 2 * ANNOUNCE_S


# --- no host is lost -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Owners of the expert of a host that announces late, and of one that nobody can reach."""

    late: Sequence[str]
    silent: Sequence[str]


async def be_late_and_silent(swarm: ExpertSwarm) -> Kept:
    """The host of A answers and announces nothing any more; that of B announces, and others cannot reach it."""
    await swarm.start("backbone0", "backbone1")
    late, silent = await swarm.host("late", A), await swarm.host("silent", B)
    others = [await swarm.host(f"host{i}") for i in range(2)]
    hosts = [late, silent, *others]

    async def answers(ask: Any, peer: Any, timeout_s: float) -> bool:
        if peer != silent.peer.id:
            return bool(await ask(peer, timeout_s))
        await trio.sleep(timeout_s)
        return False

    async def hang(uid: Uid) -> None:
        await trio.sleep_forever()

    for host in hosts:
        host.peer.vault.answers = partial(answers, host.peer.vault.answers)  # type: ignore[method-assign]
    await trio.sleep(2.5 * ANNOUNCE_S)
    late.announce = hang  # type: ignore[method-assign]
    await trio.sleep(4 * ANNOUNCE_S)
    return Kept(owners(hosts, A), owners(hosts, B))


@pytest.fixture(scope="module")
def kept(scene: Callable[..., Any]) -> Kept:
    return scene(be_late_and_silent, ONE_PREFIX)


def test_a_host_that_answers_is_left_its_experts_though_it_announces_late(kept: Kept) -> None:
    assert kept.late == ["late"]


def test_a_host_that_announces_is_left_its_experts_though_one_peer_cannot_reach_it(kept: Kept) -> None:
    assert kept.silent == ["silent"]


# --- scenes with one property --------------------------------------------------------------------------------------


async def test_backbones_alone_keep_what_an_expert_learned(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        await started(swarm, A, adopters=0)
        lose(swarm, "mortal")
        await trio.sleep(10 * ANNOUNCE_S)
        late = await swarm.host("late")
        await trio.sleep(5 * ANNOUNCE_S)
        assert late.experts[A].model.version == 40
        assert late.adoption.began_anew == 0


async def test_no_look_waits_for_a_host_that_is_lost_while_others_follow_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        _, others = await started(swarm, A, B, C, adopters=2)
        lost_at, directory, took_s = lose(swarm, "mortal"), swarm.peers["backbone0"].vault.directory, list[float]()
        both = list[int]()  # claims of A that the looks showed
        while trio.current_time() < lost_at + 3 * ANNOUNCE_S:
            began = trio.current_time()
            view = await directory.look([A.prefix])
            took_s.append(trio.current_time() - began)
            both.append(len(view.told.get(A, ())))
            await trio.sleep(ANNOUNCE_S / 40)
        assert max(both) == 2  # the lost host's stands there while the next one's does
        assert len(owners(others)) == 1
        assert max(took_s) < ANNOUNCE_S / 16


async def test_when_all_holders_are_gone_an_expert_begins_anew_and_the_log_says_so(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        await swarm.start("first", most_bytes=1)  # without room: it holds nothing
        await swarm.start("backbone0", "backbone1")
        mortal = await swarm.host("mortal", A)
        adopter = MadeUpHost(swarm, swarm.make("adopter", most_bytes=1), 8)
        await swarm.begin(adopter.peer)
        mortal.experts[A].model.version = 40
        await trio.sleep(2.5 * ANNOUNCE_S)
        assert [len(p.vault.held) for p in swarm.peers.values()] == [0, 1, 1, 1, 0]
        lose(swarm, "backbone0", "backbone1", "mortal")
        await trio.sleep(20 * ANNOUNCE_S)
        hosted = adopter.experts[A]
        assert (hosted.generation, hosted.model.version, hosted.model.seed) == (1, 0, "anew")
        (event,) = adopter.events("expert.reinitialized")
        assert event["level"] == "warn"
        assert adopter.adoption.updates_lost == 40


async def test_after_a_partition_the_highest_generation_wins_everywhere_and_the_loser_tells_what_it_dropped(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        host, others = await started(swarm, A, adopters=2)
        swarm.net.partition(["mortal", "backbone1"])
        host.experts[A].model.version = 55
        await trio.sleep(4 * ANNOUNCE_S)
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
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        await swarm.start("first")
        one, other = await swarm.host("one", A), await swarm.host("other", A)
        await trio.sleep(3 * ANNOUNCE_S)
        low, high = sorted([one, other], key=lambda h: h.peer.id)
        assert owners([one, other]) == [high.peer.name]
        assert len(low.events("expert.yielded")) == 1
        assert max(low.peer.id.text, high.peer.id.text) == high.peer.id.text  # ids and their texts have one order


def test_made_up_states_come_back() -> None:
    model, again = FakeExpert(A, 5, "seed"), FakeExpert(A)
    again.load(model.snapshot())
    assert (again.seed, again.version) == ("seed", 5)


@pytest.mark.parametrize(("began", "after_ours", "dropped"), [(1_000_000, False, 40), (30, True, 10), (0, False, 40)])
async def test_a_host_that_yields_counts_what_it_drops_by_what_it_signed_and_not_by_what_the_winner_says(
    autojump_clock: MockClock, tmp_path: Path, began: int, after_ours: bool, dropped: int
) -> None:
    async with expert_swarm(tmp_path, ONE_PREFIX) as swarm:
        host = await swarm.host("host", A)
        host.experts[A].model.version = 40
        before = pointer_to(b"ours", "host" if after_ours else "friend", swarm.run, A, version=began)
        made = pointer_to(b"theirs", "winner", swarm.run, A, generation=1, version=began, began=began)
        made = msgspec.structs.replace(made, former=before.as_former(), digest=before.digest)
        claim = SeenClaim(made.peer, 1, began, 0.0)
        await host.adoption._yield(CustodyView(kept={A: [KeptCopy(made)]}, claims={A: claim}))
        (event,) = host.events("expert.yielded")
        assert (event["updates_dropped"], event["level"]) == (dropped, "warn")
