"""The heap simulator repeats exactly, and small swarms on it behave as users expect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.core.ids import Key
from peerd.dht.node import messages as q
from peerd.dht.node.node_state import KademliaConfig
from tests.kit.amount import examples
from tests.worlds.simulation.heapsim import HeapNode, HeapSim, HeapSimConfig, OperationOutcome

KEY = Key.of("key")


def grown(count: int, seed: int = 1, **config: float) -> HeapSim:
    sim = HeapSim(seed, HeapSimConfig(**config))  # type: ignore[arg-type]
    sim.grow(count, every_s=0.5)
    sim.run(sim.now + 5)
    return sim


def put(sim: HeapSim, node: HeapNode, value: bytes = b"value", suffix: bytes = b"", ttl_s: float = 60.0) -> int:
    outcome = sim.finish(sim.start(node, lambda op: q.Put(op, KEY, suffix, value, ttl_s)))
    assert isinstance(outcome.done, q.PutDone)
    return outcome.done.peers


def got(sim: HeapSim, node: HeapNode) -> tuple[list[bytes], OperationOutcome]:
    outcome = sim.finish(sim.start(node, lambda op: q.Get(op, (KEY,))))
    assert isinstance(outcome.done, q.GetDone)
    return [record.value for record in outcome.done.records[KEY]], outcome


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    traces = []
    for seed in (1, 1, 2):
        sim = grown(12, seed)
        put(sim, sim.nodes[3])
        got(sim, sim.nodes[7])
        sim.kill(sim.nodes[0])
        sim.run(sim.now + 30)
        traces.append(sim.trace_hash())
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 15])
def test_in_a_small_swarm_everybody_knows_everybody_and_a_get_takes_one_round(count: int) -> None:
    sim = grown(count, round_trip_spread_s=0.0)
    assert all(len(node.kad.node.neighbours.table) == count - 1 for node in sim.nodes)
    assert put(sim, sim.nodes[0]) == min(count, 8)
    for node in sim.nodes:
        values, outcome = got(sim, node)
        assert values == [b"value"]
        assert outcome.seconds <= 0.0921


def test_a_withdrawn_value_is_gone_for_everybody_also_where_the_withdrawal_was_missed() -> None:
    sim = grown(6)
    put(sim, sim.nodes[0])
    sim.nodes[5].alive = False  # cut off for a moment
    outcome = sim.finish(sim.start(sim.nodes[0], lambda op: q.Withdraw(op, KEY)))
    assert isinstance(outcome.done, q.PutDone)
    sim.nodes[5].alive = True
    for node in sim.nodes:
        assert got(sim, node)[0] == []


def test_newcomers_hold_copies_soon_so_that_all_first_holders_may_die() -> None:
    sim = grown(4)
    put(sim, sim.nodes[1], ttl_s=3000.0)
    sim.grow(6, every_s=0.5)
    sim.run(sim.now + 10)
    for node in sim.nodes[:4]:
        sim.kill(node)
    sim.run(sim.now + 10)
    for node in sim.living():
        assert got(sim, node)[0] == [b"value"]


def test_a_swarm_whose_lines_were_all_down_finds_itself_again() -> None:
    """Nobody answers anybody for a while: every table empties, and fills again from those who were known."""
    sim = grown(6)
    for node in sim.nodes:
        node.alive = False
        node.refuses = True
    peers = {node.number: node for node in sim.nodes}
    for node in peers.values():  # each one is up, but sees all others down
        for other in peers.values():
            if other is not node:
                for now in (sim.now, sim.now + 6):
                    node.kad.node.neighbours.silent(now, other.kad.node.id)
    assert all(len(node.kad.node.neighbours.table) == 0 for node in sim.nodes)
    sim.run(sim.now + 1)
    for node in sim.nodes:
        node.alive = True
        node.wakes_at = float("inf")
        sim.start(node, lambda op: q.Get(op, (KEY,)))
    sim.run(sim.now + 60)
    assert all(len(node.kad.node.neighbours.table) == 5 for node in sim.nodes)


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_under_any_schedule_of_life_and_death_the_survivors_agree(seed: int, data: st.DataObject) -> None:
    """At least one holder survives each blow, and time to recover follows: then everybody sees the latest values."""
    sim = HeapSim(seed, HeapSimConfig(node=KademliaConfig(repeat_s=30.0)))
    sim.grow(4, every_s=0.5)
    sim.run(sim.now + 5)
    writer = sim.nodes[0]
    latest = b""
    for step in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["put", "join", "kill", "withdraw"]))
        if action == "put":
            latest = b"value %d" % step
            put(sim, writer, latest, ttl_s=3000.0)
        elif action == "withdraw":
            latest = b""
            sim.finish(sim.start(writer, lambda op: q.Withdraw(op, KEY)))
        elif action == "join":
            sim.add(writer)
        elif len(sim.living()) > 3:
            sim.kill(data.draw(st.sampled_from(sim.living()[1:])))
        sim.run(sim.now + data.draw(st.sampled_from([0.0, 1.0, 15.0])))
    sim.run(sim.now + 60)
    for node in sim.living():
        assert got(sim, node)[0] == ([latest] if latest else [])
        node.kad.node.neighbours.table.check()
        node.kad.node.store.check()
