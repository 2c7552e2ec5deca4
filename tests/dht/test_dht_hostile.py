"""Strangers who speak the DHT's protocol and lie: each is refused, named, and changes nothing for others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import ProtocolViolation, Refused, RemoteError
from peerd.core.ids import Key
from peerd.core.keys import Keypair
from peerd.core.limits import (
    DHT_BYTES_PER_KEY,
    DHT_RECORDS_PER_PUBLISHER,
    DHT_SUFFIXES_PER_KEY,
    HEARSAY_TARGET_PER_MINUTE,
    RECORD_TTL_S,
)
from peerd.core.record import Record
from peerd.dht import codec as wire
from peerd.dht.node.store import Verdict
from peerd.rpc.rpc_types import Answer, Incoming
from tests.kit.declared import ANY
from tests.kit.virtual_time import virtual, within
from tests.worlds.simulation.programs import stack_on, swarm
from tests.worlds.simulation.world import Node, World

KEY = Key.of("run/stage/0")


async def stranger(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    """A host with calls and no DHT: the test decides what it says."""
    await stack_on(node).run([node.addr], task_status=task_status)


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[Node, Node, Node]]:
    """Two honest peers, and a stranger that knows the first one's address."""
    async with World(1, swarm()).running() as world:
        a = await world.start()
        world.bootstrap.append(a.full_addr)
        b = await world.start()
        await b.dht.get(KEY)
        mallory = await world.start(program=stranger)
        await mallory.host.connect_addr(a.full_addr)
        yield a, b, mallory


against = within(attacked, gives=3)


def record(by: Keypair, wall: float, version: int = 1, suffix: bytes = b"", value: bytes = b"v") -> Record:
    return Record(KEY, by.peer_id, suffix, value, version, round((wall + 60) * 1000)).signed(by)


async def offer(mallory: Node, to: Node, *records: Record) -> list[Verdict]:
    body = wire.StoreMessage([record.encode() for record in records], None)
    answer = await mallory.rpc.call(to.id, "dht/4/store", body, wire.StoredMessage, timeout_s=5)
    return [Verdict(said.verdict) for said in answer.body.verdicts]


async def values(node: Node) -> list[bytes]:
    return [record.value for record in await node.dht.get(KEY)]


@against
async def test_another_peers_sub_key_cannot_be_written_by_forgery_replay_or_delay(
    a: Node, b: Node, mallory: Node
) -> None:
    await b.dht.put(KEY, b"old", ttl_s=600)
    (old,) = await b.dht.get(KEY)
    await b.dht.put(KEY, b"new", ttl_s=600)
    (new,) = await b.dht.get(KEY)
    assert await offer(mallory, a, old) == [Verdict.STALE]
    assert await offer(mallory, a, replace(new, key=Key.of("elsewhere"))) == [Verdict.FORGED]
    assert await values(a) == [b"new"]
    assert await offer(mallory, a, new) == [Verdict.FORGED]  # not even this from one who has lied


@pytest.mark.parametrize("end", ["replaced", "replaced for a shorter time", "withdrawn"])
@against
async def test_an_older_version_never_comes_back_and_its_bearer_is_named(
    a: Node, b: Node, mallory: Node, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    await b.dht.put(KEY, b"old", ttl_s=600)
    (old,) = await a.dht.get(KEY)
    if end == "withdrawn":
        await b.dht.withdraw(KEY)
    else:
        await b.dht.put(KEY, b"new", ttl_s=600 if end == "replaced" else 60)
    with caplog.at_level(logging.DEBUG, "peerd.dht"):
        assert await offer(mallory, a, old) == await offer(mallory, a, old) == [Verdict.STALE]
    (said,) = [line for line in caplog.messages if mallory.id.text in line]  # once a minute is enough
    assert "outdated" in said
    assert b.id.text in said
    assert await values(a) == await values(b) == ([] if end == "withdrawn" else [b"new"])
    await trio.sleep(120)
    assert await offer(mallory, a, old) == [Verdict.STALE]
    assert await values(a) == ([b"new"] if end == "replaced" else [])
    await trio.sleep(540)
    assert await offer(mallory, a, old) == [Verdict.UNTIMELY]
    assert await values(a) == []


@pytest.mark.parametrize("change", ["publisher", "version", "expires_ms", "key"])
@against
async def test_a_genuine_record_that_was_changed_is_forged_and_its_bearer_named(
    a: Node, b: Node, mallory: Node, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    await b.dht.put(KEY, b"mine", ttl_s=600)
    (genuine,) = await a.dht.get(KEY)
    other = {"publisher": mallory.id, "key": Key.of("another run")}
    changed = replace(genuine, **{change: other.get(change) or getattr(genuine, change) + 1000})
    with caplog.at_level(logging.WARNING, "peerd.dht"):
        assert await offer(mallory, a, changed) == [Verdict.FORGED]
    assert mallory.id.text in caplog.text
    assert await a.dht.get(Key.of("another run")) == []
    assert await values(a) == [b"mine"]


@against
async def test_records_of_ones_own_are_kept_within_quota_time_and_lease(a: Node, b: Node, mallory: Node) -> None:
    wall, keys = mallory.clock.wall(), mallory.keypair
    verdicts: list[Verdict] = []
    for start in range(0, 2 * DHT_SUFFIXES_PER_KEY, 64):
        suffixes = [number.to_bytes(2, "big") for number in range(start, start + 64)]
        verdicts += await offer(mallory, a, *(record(keys, wall, suffix=suffix) for suffix in suffixes))
    assert verdicts.count(Verdict.STORED) == DHT_SUFFIXES_PER_KEY
    assert set(verdicts) == {Verdict.STORED, Verdict.OVER_QUOTA}
    late = replace(record(keys, wall), expires_ms=round((wall - 60) * 1000)).signed(keys)
    long = replace(record(keys, wall), expires_ms=round((wall + 2 * RECORD_TTL_S) * 1000)).signed(keys)
    assert await offer(mallory, a, late, long) == [Verdict.UNTIMELY] * 2
    assert len(a.dht._kad.node.store) <= DHT_RECORDS_PER_PUBLISHER
    await b.dht.put(KEY, b"mine", ttl_s=60)
    assert b"mine" in await values(a)


@pytest.mark.parametrize(
    "method_and_body",
    [
        ("dht/4/store", wire.StoreMessage([b"no record"], None)),
        ("dht/4/store", wire.StoreMessage([bytes(20_000)], None)),
        ("dht/4/find", wire.FindMessage([], None)),
        ("dht/4/get", wire.FindMessage([bytes(32)] * 40, None)),
        ("dht/4/ping", wire.PingMessage(wire.HelloMessage([], float("nan")))),
        ("dht/4/ping", wire.PingMessage(wire.HelloMessage([bytes(600)] * 40, 0.0))),
        ("dht/4/steal", wire.PingMessage(None)),
    ],
)
@against
async def test_senseless_requests_are_refused_and_the_peer_goes_on(
    a: Node, b: Node, mallory: Node, method_and_body: tuple[str, Any]
) -> None:
    method, body = method_and_body
    with pytest.raises(RemoteError):
        await mallory.rpc.call(a.id, method, body, wire.PongMessage, timeout_s=5)
    await b.dht.put(KEY, b"v", ttl_s=60)
    assert await values(a) == [b"v"]


def _forged(mallory: Node, victim: Node) -> wire.RecordsMessage:
    forged = replace(record(mallory.keypair, mallory.clock.wall()), publisher=victim.id)
    return wire.RecordsMessage([[forged.encode()]], [], None)


def _of_another_key(mallory: Node, victim: Node) -> wire.RecordsMessage:
    wrong = replace(record(mallory.keypair, mallory.clock.wall()), key=Key.of("other")).signed(mallory.keypair)
    return wire.RecordsMessage([[wrong.encode()]], [], None)


def _no_record(mallory: Node, victim: Node) -> wire.RecordsMessage:
    return wire.RecordsMessage([[b"garbage"]], [], None)


def _too_much(mallory: Node, victim: Node) -> wire.RecordsMessage:
    return wire.RecordsMessage([[], [], []], [], None)


async def answering(mallory: Node, to: Node, answer: Callable[[], wire.RecordsMessage]) -> list[float]:
    """Join `to`'s directory and give this answer whenever records are asked for; returns the times, a growing list."""
    asked: list[float] = []

    async def records(incoming: Incoming[wire.FindMessage]) -> Answer[wire.RecordsMessage]:
        asked.append(trio.current_time())
        return Answer(answer())

    async def pong(incoming: Incoming[wire.PingMessage]) -> Answer[wire.PongMessage]:
        return Answer(wire.PongMessage(None))

    mallory.rpc.serve("dht/4/get", wire.FindMessage, records, declared=ANY)
    mallory.rpc.serve("dht/4/ping", wire.PingMessage, pong, declared=ANY)
    hello = wire.HelloMessage([mallory.addr.to_bytes()], mallory.clock.wall())
    await mallory.rpc.call(to.id, "dht/4/ping", wire.PingMessage(hello), wire.PongMessage, timeout_s=5)
    return asked


@against
async def test_an_old_record_in_an_answer_deceives_nobody_and_is_no_lie(
    a: Node, b: Node, mallory: Node, caplog: pytest.LogCaptureFixture
) -> None:
    await b.dht.put(KEY, b"old", ttl_s=600)
    (old,) = await a.dht.get(KEY)
    await b.dht.put(KEY, b"new", ttl_s=600)
    asked = await answering(mallory, a, lambda: wire.RecordsMessage([[old.encode()]], [], None))
    with caplog.at_level(logging.WARNING, "peerd.dht"):
        assert await values(a) == [b"new"]
    assert asked
    assert mallory.id.text not in caplog.text


@pytest.mark.parametrize("lie", [_forged, _of_another_key, _no_record, _too_much])
@against
async def test_a_peer_that_gives_false_answers_is_found_out_and_dropped(
    a: Node, b: Node, mallory: Node, lie: Callable[[Node, Node], wire.RecordsMessage], caplog: pytest.LogCaptureFixture
) -> None:
    asked = await answering(mallory, a, lambda: lie(mallory, b))
    assert a.dht.status()["peers"] == 2
    await b.dht.put(KEY, b"true", ttl_s=600)
    with caplog.at_level(logging.WARNING, "peerd.dht"):
        assert await values(a) == [b"true"]
    assert len(asked) == 1
    assert await values(a) == [b"true"]
    assert len(asked) == 1  # not asked again
    assert a.dht.status()["peers"] == 1
    assert a.dht.status()["lies"] == 1
    assert mallory.id.text in caplog.text


@against
async def test_a_peer_that_never_answers_delays_but_does_not_stop_anyone(a: Node, b: Node, mallory: Node) -> None:
    async def never(incoming: Incoming[Any]) -> Answer[wire.PongMessage]:
        await trio.sleep_forever()
        raise AssertionError

    for method, kind in (("get", wire.FindMessage), ("find", wire.FindMessage), ("store", wire.StoreMessage)):
        mallory.rpc.serve(f"dht/4/{method}", kind, never, declared=ANY)
    hello = wire.HelloMessage([mallory.addr.to_bytes()], mallory.clock.wall())
    await mallory.rpc.call(a.id, "dht/4/ping", wire.PingMessage(hello), wire.PongMessage, timeout_s=5)
    started = trio.current_time()
    assert await a.dht.put(KEY, b"v", ttl_s=600) == 2
    assert await values(a) == [b"v"]
    assert trio.current_time() - started < 3
    await trio.sleep(30)
    assert a.dht.status()["peers"] == 1


@against
async def test_a_store_call_with_a_broken_record_names_its_sender(a: Node, b: Node, mallory: Node) -> None:
    good = record(mallory.keypair, mallory.clock.wall())
    body = wire.StoreMessage([good.encode(), good.encode()[:-1]], None)
    with pytest.raises((ProtocolViolation, Refused, RemoteError)) as caught:
        await mallory.rpc.call(a.id, "dht/4/store", body, wire.StoredMessage, timeout_s=5)
    assert caught.value.peer == a.id
    assert await values(a) == []  # all of a message or nothing


async def fast_clocks(world: World, count: int, fast_s: float, network: str) -> list[Node]:
    """Identities at addresses of one network whose clocks are ahead."""
    liars = []
    for number in range(count):
        machine = f"{network}.{number + 1}"
        liars.append(await world.start(machine, program=swarm(), skew_s=fast_s, ip=machine))
    return liars


@pytest.mark.slow
@pytest.mark.parametrize("fast_s", [3600.0, 1e12], ids=["an hour", "thirty thousand years"])
@virtual
async def test_identities_of_one_network_do_not_set_a_newcomers_clock(fast_s: float) -> None:
    async with World(1, swarm()).running() as world:
        first = await world.start("81.1.0.1", ip="81.1.0.1")
        world.bootstrap.append(first.full_addr)
        await world.start("81.2.0.1", ip="81.2.0.1")
        await fast_clocks(world, 6, fast_s, "81.3.0")
        late = await world.start("81.4.0.1", ip="81.4.0.1")
        await trio.sleep(30)
        status = late.dht.status()
        assert status["clock_votes"] >= 7
        assert abs(status["clock_offset_s"]) < 1
        assert await late.dht.put(KEY, b"v", ttl_s=60) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fast_s", [1e12, -3e9, 1e300])
@virtual
async def test_clocks_that_nothing_explains_keep_nobody_from_publishing(fast_s: float) -> None:
    async with World(1, swarm()).running() as world:
        first = await world.start("81.1.0.1", ip="81.1.0.1", skew_s=fast_s)
        world.bootstrap.append(first.full_addr)
        for number in range(2, 6):
            await world.start(f"81.{number}.0.1", ip=f"81.{number}.0.1", skew_s=fast_s)
        late = await world.start("81.9.0.1", ip="81.9.0.1")
        await trio.sleep(30)
        assert late.dht.status()["clock_offset_s"] == 0.0
        assert "set it" in late.dht.status()["clock_warning"]
        await late.dht.put(KEY, b"v", ttl_s=60)  # others may refuse it; it stays published here
        await first.dht.put(KEY, b"v", ttl_s=60)
        assert late.dht.status()["records_published"] == 1


@pytest.mark.slow
@virtual
async def test_identities_of_one_address_fill_no_key_for_those_of_others() -> None:
    async with World(1, swarm()).running() as world:
        a = await world.start("81.1.0.1", ip="81.1.0.1")
        world.bootstrap.append(a.full_addr)
        mallory = await world.start("81.3.0.1", ip="81.3.0.1", program=stranger)
        await mallory.host.connect_addr(a.full_addr)
        wall = mallory.clock.wall()
        for number in range(20):
            own = Keypair.from_seed(number.to_bytes(32, "big"))
            for suffix in (b"1", b"2", b"3"):
                await offer(mallory, a, record(own, wall, suffix=suffix, value=bytes(15 << 10)))
        assert a.dht.status()["bytes_held"] > DHT_BYTES_PER_KEY - (16 << 10)
        for number in range(2, 6):
            b = await world.start(f"82.{number}.0.1", ip=f"82.{number}.0.1")
            assert await b.dht.put(KEY, b"honest", ttl_s=600) > 0
        assert (await values(a)).count(b"honest") == 4


@pytest.mark.slow
@virtual
async def test_contacts_that_a_stranger_makes_up_lead_to_no_private_place_and_flood_nobody() -> None:
    async with World(1, swarm()).running() as world:
        a = await world.start("81.1.0.1", ip="81.1.0.1")
        mallory = await world.start("82.1.0.1", ip="82.1.0.1", program=stranger)
        own = [f"/ip4/127.0.0.1/tcp/{port}" for port in (22, 6379)] + [
            "/ip4/10.9.9.9/tcp/80",
            "/dns4/x.example/tcp/1",
        ]
        addrs = [parse_addr(text).to_bytes() for text in [*own, "/ip4/83.0.0.1/tcp/80"]]
        hello = wire.HelloMessage([mallory.addr.to_bytes(), *addrs[:2]], mallory.clock.wall())
        made_up = (Keypair.from_seed(number.to_bytes(32, "big")).peer_id.raw for number in range(10_000))

        async def answer(call: Incoming[Any]) -> Answer[wire.NearMessage]:
            return Answer(wire.NearMessage([wire.ContactMessage(next(made_up), addrs) for _ in range(20)], hello))

        async def pong(call: Incoming[Any]) -> Answer[wire.PongMessage]:
            return Answer(wire.PongMessage(hello))

        mallory.rpc.serve("dht/4/find", wire.FindMessage, answer, declared=ANY)
        mallory.rpc.serve("dht/4/ping", wire.PingMessage, pong, declared=ANY)
        await mallory.host.connect_addr(a.full_addr)
        await mallory.rpc.call(a.id, "dht/4/ping", wire.PingMessage(hello), wire.PongMessage, timeout_s=5)
        begin = trio.current_time()
        for _ in range(10):
            with trio.move_on_after(5):
                await a.dht.get(KEY)
                await a.dht.put(KEY, b"v", ttl_s=60)
        events = [event for event in world.trace.newest() if event.node == a.name and event.kind == "dial"]
        assert {event.detail for event in events} == {"/ip4/83.0.0.1/tcp/80"}
        minutes = 1 + int(trio.current_time() - begin) // 60
        assert len(events) <= minutes * HEARSAY_TARGET_PER_MINUTE
