"""SimNet by itself: what passes, how long it takes, and what both ends see when it breaks."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr
from peerd.core.errors import ConfigError, LocalError, Unreachable
from tests.worlds.network.virtual import addr_of, connected, read_exactly, running_net, transport
from tests.worlds.simulation.memory import MemoryLink
from tests.worlds.simulation.simnet import NetConfig, SimLine, SimNet, SimPath

pytestmark = pytest.mark.usefixtures("autojump_clock")
MB = 1_000_000


async def _send_all_of(link: MemoryLink, size: int) -> None:
    await link.send_all(bytes(size))


async def test_latencies_of_both_lines_and_the_path_add_up() -> None:
    async with running_net() as net:
        net.set_path("a", "b", SimPath(latency_s=0.1))
        a, b = await connected(net, "a", "b", latency_s=0.02)
        assert trio.current_time() == pytest.approx(3 * 0.14)  # the dialler's round trip and the third packet
        started = trio.current_time()
        await a.send_all(b"there")
        assert await b.receive_some(100) == b"there"
        assert trio.current_time() - started == pytest.approx(0.14)
        await b.send_all(b"and back")
        assert await a.receive_some(100) == b"and back"
        assert trio.current_time() - started == pytest.approx(0.28)


@pytest.mark.parametrize(
    ("up", "down", "takes_s"), [(8, math.inf, 1.0), (math.inf, 8, 1.0), (8, 8, 1.0), (80, 8, 1.0), (8, 80, 1.0)]
)
async def test_a_megabyte_takes_a_second_at_eight_megabits(up: float, down: float, takes_s: float) -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        a, b = await connected(net, "a", "b", up_mbit_s=up, down_mbit_s=down)
        nursery.start_soon(_send_all_of, a, MB)
        assert len(await read_exactly(b, MB)) == MB
        assert trio.current_time() == pytest.approx(takes_s, rel=1e-6)


async def test_two_links_of_one_node_share_its_uplink_evenly() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        hub = transport(net, "hub", up_mbit_s=8)
        done: dict[str, float] = {}

        async def leaf(name: str, size: int) -> None:
            listener = await transport(net, name).listen(addr_of(net, name))
            nursery.start_soon(_send_all_of, await hub.dial(addr_of(net, name)), size)
            await read_exactly(await listener.accept(), size)
            done[name] = trio.current_time()

        async with trio.open_nursery() as leaves:
            leaves.start_soon(leaf, "long", MB)
            leaves.start_soon(leaf, "short", MB // 4)
        assert done["short"] == pytest.approx(0.5, rel=0.1)  # half of the rate while both send
        assert done["long"] == pytest.approx(1.25, rel=0.01)  # and the line is never idle


async def test_slow_senders_share_a_fast_downlink_without_hindering_each_other() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        listener = await transport(net, "server", down_mbit_s=80).listen(addr_of(net, "server"))
        for number in range(8):
            home = transport(net, f"home{number}", up_mbit_s=8, latency_s=0.01)
            link = await home.dial(addr_of(net, "server"))
            nursery.start_soon(_send_all_of, link, MB)
        started = trio.current_time()
        async with trio.open_nursery() as readers:
            for _ in range(8):
                readers.start_soon(read_exactly, await listener.accept(), MB)
        assert trio.current_time() - started == pytest.approx(1.0, rel=0.03)


async def test_a_full_window_makes_the_writer_wait_for_the_reader() -> None:
    async with running_net(NetConfig(window_bytes=100_000)) as net, trio.open_nursery() as nursery:
        a, b = await connected(net, "a", "b")
        nursery.start_soon(_send_all_of, a, MB)
        await trio.testing.wait_all_tasks_blocked()
        assert net.nodes["b"].received_bytes == 100_000
        await read_exactly(b, 30_000)
        await trio.testing.wait_all_tasks_blocked()
        assert net.nodes["b"].received_bytes == 130_000
        assert len(await read_exactly(b, MB - 30_000)) == MB - 30_000


async def test_bytes_arrive_in_order_and_unchanged_over_a_bad_line() -> None:
    data = bytes(range(256)) * 2000
    async with running_net() as net, trio.open_nursery() as nursery:
        a, b = await connected(net, "a", "b", latency_s=0.05, jitter_s=0.2, loss=0.01, up_mbit_s=20, down_mbit_s=20)
        started = trio.current_time()
        nursery.start_soon(a.send_all, data)
        assert await read_exactly(b, len(data)) == data
        clean_s = len(data) * 8 / 20e6 + 0.1
        assert trio.current_time() - started > clean_s + 0.2  # some packet was lost and came again


async def test_a_partition_holds_bytes_and_healing_lets_them_pass() -> None:
    async with running_net() as net:
        a, b = await connected(net, "a", "b", latency_s=0.05)
        net.partition(["a"])
        await a.send_all(b"patience")
        with trio.move_on_after(60) as wait:
            await b.receive_some(100)
        assert wait.cancelled_caught
        healed = trio.current_time()
        net.heal()
        assert await b.receive_some(100) == b"patience"
        assert trio.current_time() - healed < 120  # the next repeat of a TCP that backed off


async def test_a_link_gives_up_when_nothing_passes_for_too_long() -> None:
    async with running_net(NetConfig(give_up_s=100)) as net:
        a, b = await connected(net, "a", "b", latency_s=0.05)
        net.block("a", "b", both=False)
        await a.send_all(b"anyone?")
        started = trio.current_time()
        with pytest.raises(trio.BrokenResourceError, match="timed out"):
            await a.receive_some(1)
        assert trio.current_time() - started == pytest.approx(100, abs=1)
        with pytest.raises(trio.BrokenResourceError):
            await a.send_all(b"no")
        with trio.move_on_after(1000) as wait:
            await b.receive_some(1)
        assert wait.cancelled_caught  # the other side never heard


async def test_a_killed_process_resets_its_links() -> None:
    async with running_net() as net:
        a, b = await connected(net, "a", "b", latency_s=0.05)
        await b.send_all(b"last words")
        await trio.sleep(1)
        killed = trio.current_time()
        net.kill("b")
        assert await a.receive_some(100) == b"last words"
        with pytest.raises(trio.BrokenResourceError, match="reset"):
            await a.receive_some(100)
        assert trio.current_time() - killed == pytest.approx(0.1)
        with pytest.raises(trio.ClosedResourceError):
            await b.send_all(b"from beyond")
        started = trio.current_time()
        with pytest.raises(Unreachable, match="refused"):
            await transport(net, "c").dial(addr_of(net, "b"))
        assert trio.current_time() - started < 1


async def test_a_machine_that_loses_power_is_silent() -> None:
    async with running_net(NetConfig(give_up_s=900)) as net:
        a, _ = await connected(net, "a", "b", latency_s=0.05)
        net.kill("b", silent=True)
        with trio.move_on_after(10_000) as wait:
            await a.receive_some(1)
        assert wait.cancelled_caught
        started = trio.current_time()
        with pytest.raises(Unreachable, match="timed out"):
            await transport(net, "c").dial(addr_of(net, "b"))
        assert trio.current_time() - started == pytest.approx(31)


async def test_a_revived_machine_resets_links_that_it_forgot() -> None:
    async with running_net() as net:
        a, _ = await connected(net, "a", "b", latency_s=0.05)
        net.kill("b", silent=True)
        await a.send_all(b"hello?")
        await trio.sleep(5)
        net.revive("b")
        with pytest.raises(trio.BrokenResourceError, match="reset"):
            await a.receive_some(1)


async def test_what_a_dead_machine_had_queued_never_arrives_after_its_return() -> None:
    async with running_net() as net:
        a, b = await connected(net, "a", "b", up_mbit_s=0.1)
        await a.send_all(bytes(100_000))
        await trio.sleep(1)
        net.kill("a", silent=True)
        net.revive("a")
        await trio.sleep(100)
        with trio.move_on_after(0.1):
            assert len(await b.receive_some(MB)) < 20_000
            await b.receive_some(1)


async def test_a_stalled_node_goes_on_where_it_was() -> None:
    async with running_net() as net:
        a, b = await connected(net, "a", "b", latency_s=0.05)
        net.stall("b")
        await a.send_all(b"wake up")
        with trio.move_on_after(2000):
            await b.receive_some(1)
        resumed = trio.current_time()
        net.resume("b")
        assert await b.receive_some(100) == b"wake up"
        assert trio.current_time() == resumed


async def test_a_dial_survives_a_short_partition() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        here, there = transport(net, "a", latency_s=0.05), transport(net, "b", latency_s=0.05)
        listener = await there.listen(addr_of(net, "b"))
        net.partition(["a"])

        async def heal_soon() -> None:
            await trio.sleep(2)
            net.heal()

        nursery.start_soon(heal_soon)
        link = await here.dial(addr_of(net, "b"))
        assert trio.current_time() == pytest.approx(3.2)  # the third try, after 3 s, and a round trip
        await link.aclose()
        await listener.aclose()


async def test_links_live_for_the_mean_time_asked_for() -> None:
    async with running_net(NetConfig(link_life_s=100)) as net:
        there = await transport(net, "b").listen(addr_of(net, "b"))
        here, lives = transport(net, "a"), []
        for _ in range(200):
            started = trio.current_time()
            link = await here.dial(addr_of(net, "b"))
            await there.accept()
            with pytest.raises(trio.BrokenResourceError, match="lost"):
                await link.receive_some(1)
            lives.append(trio.current_time() - started)
        assert 80 < sum(lives) / 200 < 125


async def test_dials_fail_as_often_as_asked_for() -> None:
    async with running_net(NetConfig(dial_failure=0.3, accept_backlog=1000)) as net:
        await transport(net, "b").listen(addr_of(net, "b"))
        here, failed = transport(net, "a"), 0
        for _ in range(300):
            try:
                await here.dial(addr_of(net, "b"))
            except Unreachable:
                failed += 1
        assert 60 < failed < 120


async def test_addresses_are_checked_as_a_real_system_would() -> None:
    async with running_net() as net:
        here = transport(net, "a")
        first = await here.listen(parse_addr("/ip4/0.0.0.0/tcp/0"))
        second = await here.listen(parse_addr("/ip4/0.0.0.0/tcp/0"))
        assert first.addrs != second.addrs
        assert str(first.addrs[0]).startswith(f"/ip4/{net.nodes['a'].ip}/tcp/")
        with pytest.raises(ConfigError, match="in use"):
            await here.listen(first.addrs[0])
        await first.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await first.accept()
        await here.listen(first.addrs[0])
        with pytest.raises(ConfigError, match="only"):
            await here.listen(parse_addr("/ip4/192.0.2.1/tcp/1"))
        with pytest.raises(Unreachable, match="no route"):
            await here.dial(parse_addr("/ip4/10.200.0.1/tcp/1"))
        with pytest.raises(Unreachable, match="refused"):
            await here.dial(addr_of(net, "a", 9))
        assert not here.can_dial(parse_addr("/ip4/10.0.0.1/udp/1/quic-v1"))
        with pytest.raises(LocalError):
            net.add_node("a")


async def test_memory_addresses_reach_a_listener_wherever_it_is() -> None:
    async with running_net() as net:
        here, there = transport(net, "a"), transport(net, "b")
        listener = await there.listen(parse_addr("/memory/0"))
        (addr,) = listener.addrs
        assert here.can_dial(addr)
        link = await here.dial(addr)
        other = await listener.accept()
        await link.send_all(b"x")
        assert await other.receive_some(9) == b"x"
        net.kill("b")
        with pytest.raises(Unreachable):
            await here.dial(addr)


async def test_a_faulty_line_changes_bytes_and_never_their_number() -> None:
    async with running_net() as net:
        a, b = await connected(net, "a", "b")
        net.nodes["a"].corrupt = 1.0
        await a.send_all(bytes(1000))
        got = await read_exactly(b, 1000)
        assert len(got) == 1000
        assert sum(byte.bit_count() for byte in got) == 1


async def test_a_changed_line_counts_from_the_next_segment() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        a, b = await connected(net, "a", "b", up_mbit_s=8)
        nursery.start_soon(_send_all_of, a, 2 * MB)
        await read_exactly(b, MB)
        assert trio.current_time() == pytest.approx(1, rel=0.02)
        net.set_line("a", SimLine(up_mbit_s=80))
        await read_exactly(b, MB)
        assert trio.current_time() == pytest.approx(1.1, abs=0.03)


async def test_a_quiet_net_needs_no_task_until_something_takes_time() -> None:
    net = SimNet()
    a, b = await connected(net, "a", "b")
    await a.send_all(b"at once")
    assert await b.receive_some(100) == b"at once"
    net.set_line("a", SimLine(latency_s=0.1))
    with pytest.raises(LocalError, match="does not run"):
        await a.send_all(b"later")
