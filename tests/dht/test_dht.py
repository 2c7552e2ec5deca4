"""The DHT over real hosts in a simulated network: put here, get there, and what happens when peers come and go."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import LocalError
from peerd.core.ids import Key
from peerd.core.limits import RECORD_VALUE_BYTES
from tests.kit.virtual_time import within
from tests.worlds.simulation.programs import stack_on, swarm
from tests.worlds.simulation.world import Node, World

KEY, OTHER = Key.of("run/stage/0"), Key.of("run/stage/1")


async def client(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    await stack_on(node).run([], list(node.world.bootstrap), task_status=task_status)


@asynccontextmanager
async def world_of(count: int) -> AsyncIterator[World]:
    """A world of `count` nodes that have joined; the first one is everybody's bootstrap."""
    async with World(1, swarm()).running() as world:
        world.bootstrap.append((await world.start()).full_addr)
        await grown(world, count)
        yield world


def in_world(count: int = 1) -> Any:
    """Decorates a test that takes a world of `count` nodes."""
    return within(functools.partial(world_of, count))


async def grown(world: World, count: int) -> list[Node]:
    """`count` nodes that have all joined."""
    while len(world.living()) < count:
        node = await world.start()
        await node.dht.get(KEY)  # waits until it has joined
    return world.living()


async def values(node: Node, key: Key = KEY) -> list[bytes]:
    return [record.value for record in await node.dht.get(key)]


def peers(node: Node) -> int:
    return int(node.dht.status()["peers"])


@in_world(count=3)
async def test_three_peers_see_what_each_of_them_put(world: World) -> None:
    nodes = world.living()
    for index, node in enumerate(nodes):
        assert await node.dht.put(KEY, b"from %d" % index, ttl_s=60) == 3
    for node in nodes:
        found = await node.dht.get(KEY)
        assert sorted(record.value for record in found) == [b"from 0", b"from 1", b"from 2"]
        assert [record.sub_key for record in found] == sorted(record.sub_key for record in found)


@in_world()
async def test_alone_it_serves_itself_and_tells_newcomers(world: World) -> None:
    alone = world.living()[0]
    assert await alone.dht.put(KEY, b"first", ttl_s=60) == 1
    assert await values(alone) == [b"first"]
    newcomer = await world.start()
    assert await values(newcomer) == [b"first"]
    assert alone.dht.status()["waits_for"] is None


@in_world(count=3)
async def test_the_latest_value_of_a_publisher_replaces_its_older_ones(world: World) -> None:
    a, b, _ = world.living()
    for value in (b"1", b"2", b"3"):
        await a.dht.put(KEY, value, ttl_s=60)
        assert await values(a) == [value]
        assert await values(b) == [value]
    await a.dht.put(KEY, b"x", ttl_s=60, suffix=b"another")
    assert sorted(await values(b)) == [b"3", b"x"]


@pytest.mark.slow
@in_world(count=3)
async def test_many_keys_are_asked_in_few_messages(world: World) -> None:
    a, b, _ = world.living()
    keys = [Key.of(str(number)) for number in range(40)]
    for key in keys[::2]:
        await a.dht.put(key, key.raw, ttl_s=60)
    before = b.dht.status()["messages"]["sent"]
    found = await b.dht.get_many([*keys, keys[0]])
    assert list(found) == keys
    assert [[r.value for r in found[key]] for key in keys] == [
        [k.raw] if n % 2 == 0 else [] for n, k in enumerate(keys)
    ]
    assert b.dht.status()["messages"]["sent"] - before <= 4  # two peers, 32 keys in a message
    assert await b.dht.get_many([]) == {}


@in_world(count=2)
async def test_many_records_travel_in_few_messages(world: World) -> None:
    a, b = world.living()
    for number in range(40):
        await a.dht.put(KEY, b"%d" % number, ttl_s=60, suffix=bytes([number]))
    assert len(await b.dht.get(KEY)) == 40
    before = a.dht.status()["messages"]["sent"]
    await a.dht.withdraw_all()
    assert a.dht.status()["messages"]["sent"] - before <= 2
    assert await b.dht.get(KEY) == []


@pytest.mark.slow
@in_world(count=3)
async def test_a_withdrawal_is_seen_by_everybody_at_once(world: World) -> None:
    a, b, c = world.living()
    await a.dht.put(KEY, b"1", ttl_s=60)
    await a.dht.put(OTHER, b"2", ttl_s=60)
    await a.dht.withdraw(KEY)
    assert await values(b) == await values(c) == await values(a) == []
    assert await values(b, OTHER) == [b"2"]
    await a.dht.withdraw_all()
    assert await values(b, OTHER) == []
    await a.dht.put(KEY, b"again", ttl_s=60)
    assert await values(c) == [b"again"]
    await a.dht.withdraw(Key.of("never published"))


@pytest.mark.slow
@in_world(count=3)
async def test_records_end_with_their_time_and_live_on_while_wanted(world: World) -> None:
    a, b, _ = world.living()
    await a.dht.put(KEY, b"short", ttl_s=10)
    await a.dht.put(OTHER, b"long", ttl_s=4500)  # longer than any lease
    await trio.sleep(9)
    assert await values(b) == [b"short"]
    await trio.sleep(2)
    assert await values(b) == []
    await trio.sleep(4400)
    assert await values(b, OTHER) == [b"long"]
    await trio.sleep(100)
    assert await values(b, OTHER) == []


@in_world(count=3)
async def test_a_killed_publishers_records_remain_until_they_expire(world: World) -> None:
    a, b, c = world.living()
    await c.dht.put(KEY, b"last words", ttl_s=30)
    await world.kill(c)
    assert await values(a) == await values(b) == [b"last words"]
    await trio.sleep(31)
    assert await values(a) == []


@pytest.mark.slow
@in_world(count=4)
async def test_a_peer_that_leaves_politely_is_out_of_consideration_at_once(world: World) -> None:
    a, b, c, d = world.living()
    await a.dht.put(KEY, b"v", ttl_s=600)
    await world.stop(d)
    await trio.sleep(0.5)
    started = trio.current_time()
    assert await values(b) == [b"v"]
    assert await c.dht.put(OTHER, b"w", ttl_s=60) == 3
    assert trio.current_time() - started < 0.5
    await trio.sleep(30)
    assert [peers(node) for node in (a, b, c)] == [2, 2, 2]


@pytest.mark.slow
@in_world(count=4)
async def test_a_peer_that_falls_silent_costs_little_time(world: World) -> None:
    a, b, c, d = world.living()
    await a.dht.put(KEY, b"v", ttl_s=600)
    await world.kill(d, silent=True)
    for node in (a, b, c):
        started = trio.current_time()
        assert await values(node) == [b"v"]
        assert trio.current_time() - started < 1.5


@in_world(count=3)
async def test_a_restarted_peer_replaces_what_it_published_in_its_former_life(world: World) -> None:
    _, b, c = world.living()
    await c.dht.put(KEY, b"former life", ttl_s=600)
    await world.kill(c)
    c.skew_s = -100.0  # and its clock was set back: its versions start lower
    await world.restart(c)
    await c.dht.put(KEY, b"new life", ttl_s=600)
    assert await values(b) == [b"new life"]


@pytest.mark.slow
@in_world(count=3)
async def test_a_client_uses_the_swarm_but_is_in_nobodys_table(world: World) -> None:
    a, b, _ = world.living()
    guest = await world.start(program=client)
    assert await guest.dht.put(KEY, b"from a client", ttl_s=60) == 3
    assert await values(a) == await values(b) == [b"from a client"]
    assert await values(guest) == [b"from a client"]
    assert guest.dht.status()["client_only"]
    assert [peers(node) for node in (a, b)] == [2, 2]
    assert await a.dht.put(OTHER, b"v", ttl_s=60) == 3
    assert await values(guest, OTHER) == [b"v"]


@in_world()
async def test_a_bootstrap_that_is_down_is_named_with_its_reason_and_tried_until_it_answers(world: World) -> None:
    (first,) = world.living()
    await world.stop(first)
    late = await world.start()
    started = trio.current_time()
    assert await values(late) == []
    assert trio.current_time() - started < 10.1
    waits_for = late.dht.status()["waits_for"]
    assert waits_for.startswith(f"bootstrap {first.full_addr}: ")
    assert late.dht.status()["bootstrap"][0]["problem"] is not None
    assert await late.dht.put(KEY, b"early", ttl_s=600) == 1
    await world.restart(first)
    await trio.sleep(40)
    assert late.dht.status()["waits_for"] is None
    assert late.dht.status()["bootstrap"][0]["connected"]
    assert await values(first) == [b"early"]


@in_world()
async def test_leaving_does_not_wait_for_a_way_in(world: World) -> None:
    (first,) = world.living()
    await world.kill(first, silent=True)
    late = await world.start()
    began = trio.current_time()
    await late.dht.withdraw_all()
    await late.dht.withdraw(KEY)
    assert trio.current_time() - began < 0.1


@pytest.mark.slow
@in_world(count=4)
async def test_halves_that_lost_sight_of_each_other_meet_again_at_the_bootstrap(world: World) -> None:
    first, *others = world.living()
    await world.kill(first)
    for node in others:
        await world.kill(node)
    for node in others:
        await world.restart(node)
    await trio.sleep(10)
    assert [peers(node) for node in others] == [0, 0, 0]
    await world.restart(first)
    await trio.sleep(60)
    await others[0].dht.put(KEY, b"together", ttl_s=60)
    assert [await values(node) for node in others] == [[b"together"]] * 3
    assert [peers(node) for node in others] == [3, 3, 3]


@in_world(count=3)
async def test_two_peers_survive_without_the_bootstrap(world: World) -> None:
    first, b, c = world.living()
    await world.kill(first)
    await trio.sleep(5)
    assert await b.dht.put(KEY, b"v", ttl_s=60) == 2
    assert await values(c) == [b"v"]


@in_world(count=3)
async def test_a_clock_that_is_off_is_corrected_by_its_peers_and_said_so(world: World) -> None:
    a, b, _ = world.living()
    late = await world.start(skew_s=-900.0)
    await trio.sleep(5)
    await late.dht.put(KEY, b"v", ttl_s=30)
    assert await values(a) == await values(b) == [b"v"]
    await a.dht.put(OTHER, b"w", ttl_s=30)
    assert await values(late, OTHER) == [b"w"]
    status = late.dht.status()
    assert abs(status["clock_offset_s"] - 900.0) < 0.5
    assert "behind the clocks of 3 peers" in status["clock_warning"]
    assert a.dht.status()["clock_warning"] is None


@pytest.mark.slow
@in_world(count=6)
async def test_one_round_suffices_in_a_small_swarm(world: World) -> None:
    nodes = world.living()
    await nodes[0].dht.put(KEY, b"v", ttl_s=600)
    await trio.sleep(1)
    for node in nodes:
        round_trip = max([await node.host.ping(other.id) for other in nodes if other is not node])
        started = trio.current_time()
        assert await values(node) == [b"v"]
        assert trio.current_time() - started <= 1.2 * round_trip + 0.001


@in_world(count=2)
async def test_a_result_that_may_be_old_is_answered_from_memory(world: World) -> None:
    a, b = world.living()
    await a.dht.put(KEY, b"1", ttl_s=5)
    assert [r.value for r in await b.dht.get(KEY, max_age_s=60)] == [b"1"]
    before = b.dht.status()["messages"]["sent"]
    assert [r.value for r in await b.dht.get(KEY, max_age_s=60)] == [b"1"]
    assert b.dht.status()["messages"]["sent"] == before
    await trio.sleep(6)
    assert await b.dht.get(KEY, max_age_s=60) == []  # old, but never expired
    await b.dht.put(KEY, b"own", ttl_s=60)
    assert [r.value for r in await b.dht.get(KEY, max_age_s=60)] == [b"own"]


@in_world()
async def test_what_cannot_be_published_is_our_own_mistake(world: World) -> None:
    (a,) = world.living()
    for value, suffix, ttl_s in (
        (b"v" * (RECORD_VALUE_BYTES + 1), b"", 1.0),
        (b"", b"s" * 65, 1.0),
        (b"", b"", 0.0),
    ):
        with pytest.raises(LocalError):
            await a.dht.put(KEY, value, ttl_s=ttl_s, suffix=suffix)
    assert await a.dht.put(KEY, b"v" * RECORD_VALUE_BYTES, ttl_s=1.0) == 1
    assert a.dht.status()["records_published"] == 1


@in_world(count=3)
async def test_a_caller_that_gives_up_leaves_nothing_behind(world: World) -> None:
    a, b, c = world.living()
    await world.kill(b, silent=True)
    await world.kill(c, silent=True)
    with trio.move_on_after(0.1):
        await a.dht.get(KEY)
    assert await a.dht.get(KEY, timeout_s=0.2) == []
    assert not a.dht._operations
    await trio.sleep(20)
    assert len(a.dht._kad._work) == 0
    assert len(a.dht._kad._dispatch) == 0


async def test_before_it_runs_it_can_do_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async def nothing(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        stack_on(node)
        task_status.started()

    async with World(1, nothing).running() as world:
        node = await world.start()
        assert node.dht.status()["waits_for"] == "the DHT to start"
        with pytest.raises(LocalError):
            await node.dht.get(KEY)


@in_world()
async def test_bootstrap_addresses_that_are_our_own_mean_that_we_are_first(world: World) -> None:
    (first,) = world.living()
    await world.stop(first)
    await world.restart(first)  # the world's bootstrap is now this node itself
    started = trio.current_time()
    assert await values(first) == []
    assert trio.current_time() == started
    assert first.dht.status()["bootstrap"] == []


@in_world()
async def test_an_address_where_nobody_speaks_is_no_reason_to_stop(world: World) -> None:
    world.bootstrap.insert(0, parse_addr("/dns4/nowhere.invalid/tcp/1"))
    node = await world.start()
    await trio.sleep(5)
    assert node.dht.status()["waits_for"] is None
    assert [entry["connected"] for entry in node.dht.status()["bootstrap"]] == [False, True]
