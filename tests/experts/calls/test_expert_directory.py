"""The directory of experts: what hosts announce is found, what is no announcement is skipped and its sender named."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
import trio

from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.messages.encoding import encode
from peerd.messages.experts import Announced, Name
from peerd.run.grid import Uid, coordinates_in, prefix_key
from tests.kit.virtual_time import virtual
from tests.worlds.network.expertworld import (
    ExpertPeer,
    ExpertWorld,
    announcements,
    expert_world,
    experts_run,
    in_expert_world,
)
from tests.worlds.network.members import Club, Member, Papers, in_club
from tests.worlds.network.members import run_file as run_with_tokens

E = Uid(0, (1, 2))
P = E.prefix
WARNING = logging.WARNING


def alive(directory: ExpertDirectory, found: dict[Uid, Any]) -> dict[str, list[int]]:
    return {str(prefix): coordinates_in(bits) for prefix, bits in directory.live(found).items()}


@in_expert_world()
async def test_what_a_host_announces_others_find_with_its_address_and_nothing_else(scene: ExpertWorld) -> None:
    host, reader, _ = scene.peers
    await host.host(E, Uid(0, (1, 3)), Uid(0, (2, 0)), generation=5)
    found = await reader.directory.below([Uid(0, (n,)) for n in range(4)])
    assert alive(reader.directory, found) == {"0.0": [], "0.1": [2, 3], "0.2": [0], "0.3": []}
    owner = reader.directory.owner(E)
    assert owner is not None
    assert (owner.host, owner.generation) == (host.node.id, 5)
    assert reader.directory.owner(Uid(0, (3, 3))) is None
    assert host.node.addr in reader.node.host.known_addrs(host.node.id)
    assert host.directory.owner(E) is None
    assert alive(host.directory, await host.directory.below([P])) == {"0.1": [2, 3]}, "its own, too"


@in_expert_world(experts_run(announce_s=2.0), count=2)
async def test_announcements_of_a_host_that_is_late_with_them_stand_until_its_next_one(scene: ExpertWorld) -> None:
    """A busy machine comes to it later than it means to: its experts are there all the same."""
    host, reader = scene.peers
    for late_s in (0.0, 14.0, 14.0):
        await trio.sleep(late_s)
        await host.host(E)
    for waited_s, living in ((14.0, [2]), (20.0, [])):
        await trio.sleep(waited_s)
        reader.directory.forget(E)
        assert alive(reader.directory, await reader.directory.below([P])) == {"0.1": living}


@pytest.mark.parametrize("sides", [(8,), (3, 4, 5)])
@virtual
async def test_each_prefix_of_an_expert_leads_to_it(sides: tuple[int, ...]) -> None:
    async with expert_world(experts_run(*sides, layers=2), 2) as scene:
        host, reader = scene.peers
        uid = Uid(1, tuple(side - 1 for side in sides))
        await host.host(uid)
        for prefix in reader.directory.grid.prefixes(uid):
            found = await reader.directory.below([prefix])
            assert alive(reader.directory, found) == {str(prefix): [uid.at[len(prefix.at)]]}
        assert reader.directory.owner(uid) is not None


@in_expert_world()
async def test_withdrawn_records_are_gone_at_once_and_those_of_the_dead_after_two_periods(scene: ExpertWorld) -> None:
    leaver, dead, reader = scene.peers
    await leaver.host(E, Uid(0, (2, 2)))
    began = trio.current_time()
    await dead.host(Uid(0, (1, 3)))
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": [2, 3]}
    leaver.experts.remove(E)
    await leaver.host()
    assert alive(reader.directory, await reader.directory.read([P, Uid(0, (2,))])) == {"0.1": [3], "0.2": [2]}
    await leaver.directory.withdraw()
    assert alive(reader.directory, await reader.directory.read([Uid(0, (2,))])) == {"0.2": []}
    assert leaver.directory.status()["announced"] == 0
    await scene.world.kill(dead.node)
    await trio.sleep_until(began + 20)
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": [3]}
    await trio.sleep(3)
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": []}


@pytest.mark.parametrize("higher", [True, False])
@in_expert_world(count=4)
async def test_of_two_hosts_that_claim_one_expert_all_see_the_same_winner_and_the_other_is_named(
    scene: ExpertWorld, higher: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "peerd.experts.calls")
    one, two, *readers = scene.peers
    await one.host(E, generation=1 if higher else 0)
    await two.host(E, generation=0)
    winner = one if higher else max(one, two, key=lambda peer: peer.node.id.text)
    for reader in (*readers, one, two):
        await reader.directory.below([P])
        owner = reader.directory.owner(E)
        assert owner is not None
        assert owner.host == winner.node.id
        await reader.directory.read([P])
    loser = two if winner is one else one
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4, "each of them says it once"
    for line in lines:
        assert line.startswith(f"expert 0.1.2 is claimed by two hosts: {winner.node.id.short}")
        assert f"not {loser.node.id.short} (generation 0)" in line


def changed(**changes: Any) -> Callable[[], bytes]:
    """A record of expert E, apart from `changes`."""
    whole: dict[str, Any] = {"generations": [0], "versions": [0], "queue_s": 0.0, "addrs": [], **changes}
    return lambda: encode(Announced(whole.pop("prefix", Name.of(P)), whole.pop("below", b"\x04"), **whole))


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "another prefix's record": (changed(prefix=Name.of(Uid(0, (2,)))), "below 0.2 under the key of 0.1"),
    "another layer's record": (changed(prefix=Name.of(Uid(7, (1,)))), "below 7.1 under the key of 0.1"),
    "a uid out of the grid": (changed(below=b"\x10"), "bitmap that does not fit 4 places"),
    "a longer bitmap": (changed(below=b"\x04\x00"), "bitmap that does not fit 4 places"),
    "a shorter bitmap": (changed(below=b""), "bitmap that does not fit 4 places"),
    "claims without experts": (changed(below=b"\x00", generations=[], versions=[]), "bitmap that does not fit"),
    "a generation too few": (changed(generations=[]), "other than 1 generations"),
    "a version too many": (changed(versions=[0, 0]), "other than 1 generations"),
    "an address that is none": (changed(addrs=["/nowhere/1"]), "/nowhere"),
    "no message": (lambda: b"\xc1garbage", "not a valid Announced"),
    "a negative queue": (changed(queue_s=-1.0), "not a valid Announced"),
    "a huge generation": (lambda: msgspec.msgpack.encode([[0, [1]], b"\x04", [1 << 60], [0], 0.0, []]), "not a valid"),
}


@pytest.mark.parametrize("name", list(BAD))
@in_expert_world()
async def test_a_record_that_is_no_announcement_is_skipped_and_its_sender_named(
    scene: ExpertWorld, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value, why = BAD[name]
    liar, honest, reader = scene.peers
    await honest.host(Uid(0, (1, 3)))
    await liar.node.dht.put(prefix_key("moe", P), value(), ttl_s=60)
    with caplog.at_level(WARNING, "peerd.experts.calls"):
        for _ in range(3):
            found = await reader.directory.read([P])
            assert alive(reader.directory, found) == {"0.1": [3]}
    (line,) = [record.getMessage() for record in caplog.records]  # said once, counted each time
    assert why in line
    assert liar.node.id.short in line
    assert (reader.directory.status()["records_refused"], reader.directory.status()["records"]) == (3, 3)


@in_expert_world(experts_run(4, 4, 4))
async def test_a_prefix_announced_where_nothing_lives_is_left_out_and_its_sender_named(
    scene: ExpertWorld, caplog: pytest.LogCaptureFixture
) -> None:
    liar, honest, reader = scene.peers
    await honest.host(Uid(0, (1, 3, 0)))
    ghost = announcements(reader.directory.grid, [Uid(0, (1, 2, 0))])[0]
    await liar.directory.announce([ghost])
    top = Uid(0, (1,))
    assert alive(reader.directory, await reader.directory.below([top])) == {"0.1": [2, 3]}
    with caplog.at_level(WARNING, "peerd.experts.calls"):
        assert alive(reader.directory, await reader.directory.below([Uid(0, (1, 2))])) == {"0.1.2": []}
    assert f"announces experts below 0.1.2, where it has none (peer {liar.node.id.short})" in caplog.text
    assert alive(reader.directory, await reader.directory.read([top])) == {"0.1": [3]}


@in_club
async def test_in_a_run_with_tokens_only_experts_by_their_token_are_believed(
    club: Club, caplog: pytest.LogCaptureFixture
) -> None:
    run = msgspec.structs.replace(run_with_tokens("tiny", 1), experts=experts_run().experts)

    def directory_of(member: Member) -> ExpertDirectory:
        return ExpertDirectory(run, member.rpc, member.host, member.dht, member.node.clock)

    await club.start(lambda peer: Papers())
    reader = await club.member("trainer", number=1)
    host = await club.member("expert", number=2)
    stage = await club.member("stage", number=3)
    stranger = await club.start(lambda peer: Papers())
    await directory_of(host).announce(announcements(directory_of(host).grid, [E]))
    await directory_of(stage).announce(announcements(directory_of(host).grid, [Uid(0, (1, 0))], generation=9))
    assert host.access is not None
    (stolen,) = announcements(directory_of(host).grid, [Uid(0, (1, 1)), E], 9, token=host.access.token)
    await stranger.dht.put(prefix_key("tiny", P), encode(stolen), ttl_s=60)
    mine = directory_of(reader)
    with caplog.at_level(WARNING):
        found = await mine.read([P])
    assert alive(mine, found) == {"0.1": [2]}
    assert {claim.host for told in found[P].values() for claim in told} == {host.id}
    assert f"peer {stage.id}: its record is ignored: its token does not allow expert" in caplog.text
    assert f"peer {stranger.id}: its record is ignored" in caplog.text


@pytest.mark.slow
@in_expert_world(count=7)
async def test_a_flood_of_claims_below_one_prefix_hides_no_honest_host(scene: ExpertWorld) -> None:
    honest, reader, *liars = scene.peers
    await honest.host(E)
    for liar in liars:
        await liar.directory.announce(announcements(reader.directory.grid, [Uid(0, (1, n)) for n in range(4)], 3))
    await reader.directory.below([P])
    tried = list[Any]()
    while (owner := reader.directory.owner(E)) is not None and owner.host != honest.node.id:
        tried.append(owner.host)
        reader.directory.rests.failed(trio.current_time(), owner.host)
        if reader.directory.owner(E) is None:  # all that were kept rest: the others' turn
            await reader.directory.read([P])
    assert sorted(tried) == sorted(liar.node.id for liar in liars)
    assert owner is not None


@in_expert_world()
async def test_readers_of_one_prefix_share_a_look_up_and_what_is_in_use_is_read_ahead(scene: ExpertWorld) -> None:
    host, reader, _ = scene.peers
    await host.host(E)
    before = lookups(reader)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(reader.directory.below, [P])
    assert lookups(reader) == before + 1
    async with trio.open_nursery() as nursery:
        await nursery.start(reader.directory.run)
        nursery.start_soon(functools.partial(again_and_again, host))
        for _ in range(60):
            await trio.sleep(1)
            began, before = trio.current_time(), lookups(reader)
            assert alive(reader.directory, await reader.directory.below([P])) == {"0.1": [2]}
            assert (trio.current_time(), lookups(reader)) == (began, before), "nobody waits for a look-up"
        nursery.cancel_scope.cancel()


async def again_and_again(host: ExpertPeer) -> None:
    while True:
        await host.host()
        await trio.sleep(10)


def lookups(peer: ExpertPeer) -> int:
    return int(peer.node.dht.status()["lookups"])


@in_expert_world()
async def test_a_reader_that_is_cancelled_leaves_nobody_waiting(scene: ExpertWorld) -> None:
    host, reader, _ = scene.peers
    await host.host(E)
    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def one() -> None:
            with first:
                await reader.directory.below([P])

        async def two() -> None:
            assert alive(reader.directory, await reader.directory.below([P])) == {"0.1": [2]}

        nursery.start_soon(one)
        await trio.sleep(0.001)
        nursery.start_soon(two)
        await trio.sleep(0.001)
        first.cancel()


@in_expert_world()
async def test_a_look_up_that_runs_out_of_time_does_not_bury_those_who_live(scene: ExpertWorld) -> None:
    host, reader, _ = scene.peers
    await host.host(E)
    await reader.directory.below([P])

    class Slow:
        async def get_many(self, keys: Any, *, timeout_s: float) -> dict[Any, Any]:
            await trio.sleep(timeout_s)
            return {key: [] for key in keys}

    dht, reader.directory._dht = reader.directory._dht, cast(Any, Slow())
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": [2]}, "as it was read before"
    await trio.sleep(10.0)
    assert alive(reader.directory, await reader.directory.below([P])) == {"0.1": [2]}, "though it is old by now"
    await trio.sleep(20.0)
    assert alive(reader.directory, await reader.directory.below([P])) == {"0.1": []}, "no announcement lives longer"
    reader.directory._dht = dht
    await host.host(E)
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": [2]}


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
@in_expert_world(count=4)
async def test_a_host_whose_clock_is_off_by_a_minute_is_found_all_the_same(scene: ExpertWorld, skew_s: float) -> None:
    host = await scene.start(skew_s=skew_s)
    reader = scene.peers[0]
    await host.host(E)
    assert alive(reader.directory, await reader.directory.read([P])) == {"0.1": [2]}
    wrong = await scene.start(skew_s=skew_s)
    assert alive(wrong.directory, await wrong.directory.read([P])) == {"0.1": [2]}
