"""World, faults and trace with a small program of its own: an echo over bare links."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.core.errors import LocalError, Unreachable
from peerd.core.keys import Keypair
from tests.worlds.simulation import faults
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.memory import MemoryLink
from tests.worlds.simulation.simnet import NetConfig, SimLine
from tests.worlds.simulation.world import Churn, Node, World, WorldConfig

LINE = SimLine(latency_s=0.02, jitter_s=0.01, up_mbit_s=50, down_mbit_s=50)
CONFIG = WorldConfig(net=NetConfig(give_up_s=60), line=lambda _: LINE)


async def echo_program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    listener = await node.transport.listen(node.addr)
    task_status.started()
    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(_echo, await listener.accept())


async def _echo(link: MemoryLink) -> None:
    try:
        while data := await link.receive_some(1 << 16):
            await link.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    await link.aclose()


async def ask(source: Node, target: Node, within_s: float = 5.0) -> bool:
    """True when `target` answers."""
    with trio.move_on_after(within_s):
        try:
            link = await source.transport.dial(target.addr)
            await link.send_all(b"ping")
            answered = await link.receive_some(100) == b"ping"
            await link.aclose()
        except (Unreachable, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return answered
    return False


async def _eventful_minute(seed: int) -> str:
    async with World(seed, echo_program, CONFIG).running() as world:
        nodes = await world.start_many(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.churn, Churn(share=0.5, within_s=60, spare=frozenset({"n00"})))
            for _ in range(30):
                await trio.sleep(2)
                await ask(nodes[0], world.rng(str(trio.current_time())).choice(world.living()), 1.0)
        assert len(world.living()) == 10
    return world.trace.hash()


def test_the_same_seed_gives_the_same_trace_and_another_seed_another_one() -> None:
    first = run_virtual(_eventful_minute, 1, seed=1)
    assert run_virtual(_eventful_minute, 1, seed=1) == first
    assert run_virtual(_eventful_minute, 2, seed=2) != first


async def test_a_node_comes_back_with_its_identity_and_address(autojump_clock: trio.testing.MockClock) -> None:
    async with World(1, echo_program, CONFIG).running() as world:
        a, b = await world.start_many(2)
        identity, addr, secret = b.id, b.addr, b.clock.secure_bytes(8)
        assert isinstance(b.keypair, Keypair)
        await world.kill(b, silent=True)
        assert not b.up
        assert not await ask(a, b)
        await world.restart(b)
        assert (b.id, b.addr) == (identity, addr)
        assert b.clock.secure_bytes(8) != secret
        assert await ask(a, b)
        with pytest.raises(LocalError, match="still running"):
            await world.restart(b)


async def test_a_killed_node_can_say_no_good_bye_and_a_stopped_one_can(autojump_clock: trio.testing.MockClock) -> None:
    heard: list[bytes] = []

    async def polite(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        link = await node.transport.dial(world.nodes["ear"].addr)
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                try:
                    await link.send_all(b"bye")
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    node.note("mute")
                await link.aclose()

    async def ear(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        listener = await node.transport.listen(node.addr)
        task_status.started()
        while True:
            try:
                heard.append(await (await listener.accept()).receive_some(10))
            except trio.BrokenResourceError:
                heard.append(b"reset")

    async with World(1, polite, CONFIG).running() as world:
        await world.start("ear", program=ear)
        killed, stopped = await world.start("killed"), await world.start("stopped")
        await world.kill(killed)
        await world.stop(stopped)
        await trio.sleep(1)
        assert heard == [b"reset", b"bye"]


async def test_an_error_in_a_program_ends_the_world(autojump_clock: trio.testing.MockClock) -> None:
    async def broken(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        raise ZeroDivisionError

    async def live() -> None:
        async with World(1, broken, CONFIG).running() as world:
            await world.start()
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await live()
    assert caught.group_contains(ZeroDivisionError)


async def test_planned_faults_happen_when_planned_and_pass(autojump_clock: trio.testing.MockClock) -> None:
    async with World(1, echo_program, CONFIG).running() as world, trio.open_nursery() as nursery:
        a, b, c = await world.start_many(3)
        plan = [
            faults.fail("n01", 10, back_after_s=10),
            faults.stall("n02", 10, 10),
            faults.split([["n00"]], 40, 10),
            faults.slow("n01", 60, SimLine(latency_s=2.0), for_s=10),
            faults.corrupt("n02", 80, 1.0, for_s=10),
        ]
        nursery.start_soon(faults.inject, world, plan)
        fine: dict[float, tuple[bool, bool]] = {}
        for at_s in (5, 15, 30, 45, 55, 65, 75, 85, 95):
            await trio.sleep_until(at_s)
            fine[at_s] = await ask(a, b, 2.0), await ask(a, c, 2.0)
        working = (True, True)
        assert fine == {
            5: working,
            15: (False, False),
            30: working,
            45: (False, False),
            55: working,
            65: (False, True),
            75: working,
            85: (True, False),
            95: working,
        }


async def test_nodes_that_leave_for_a_while_return(autojump_clock: trio.testing.MockClock) -> None:
    async with World(3, echo_program, CONFIG).running() as world:
        await world.start_many(10)
        await world.churn(Churn(share=1.0, within_s=100, absent_s=5))
        assert len(world.living()) == len(world.nodes) == 10
        assert world.trace.counts["kill"] == 10
        assert [event.kind for event in world.trace.newest(2)] == ["listen", "up"]


async def test_waiting_for_a_condition_ends_with_it_or_with_the_time(autojump_clock: trio.testing.MockClock) -> None:
    async with World(1, echo_program, CONFIG).running() as world:
        assert await world.until(lambda: trio.current_time() > 3, within_s=10)
        assert trio.current_time() < 4
        assert not await world.until(lambda: False, within_s=10)
