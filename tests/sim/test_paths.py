"""Paths of SimNet with a delay and a rate of their own, by ordered pair of nodes: exact times, and who shares what."""

from __future__ import annotations

import math

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.core.errors import LocalError
from tests.worlds.network.virtual import addr_of, read_exactly, running_net
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.memory import MemoryLink, MemoryTransport
from tests.worlds.simulation.simnet import NetConfig, SimLine, SimNet, SimPath

BYTES_PER_MBIT = 125_000
WIDE = NetConfig(window_bytes=1 << 30)  # no writer waits for a reader


class Site:
    """Nodes that appear at first use, and links between them."""

    def __init__(self, net: SimNet) -> None:
        self.net = net
        self.transports: dict[str, MemoryTransport] = {}

    def add(self, name: str, **line: float) -> MemoryTransport:
        self.transports[name] = MemoryTransport(self.net, self.net.add_node(name, SimLine(**line)))
        return self.transports[name]

    async def linked(self, a: str, b: str, port: int = 4001) -> tuple[MemoryLink, MemoryLink]:
        """A connection from `a` to `b`, once the third packet of its hand-shake has crossed: the two ends."""
        for name in (a, b):
            if name not in self.transports:
                self.add(name)
        listener = await self.transports[b].listen(addr_of(self.net, b, port))
        link = await self.transports[a].dial(addr_of(self.net, b, port))
        other = await listener.accept()
        await listener.aclose()
        return link, other


async def seconds(link: MemoryLink, other: MemoryLink, size: int) -> float:
    """Time until `size` bytes of `link` have arrived at `other`."""
    started_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.send_all, bytes(size))
        assert len(await read_exactly(other, size)) == size
    return trio.current_time() - started_s


async def at_once(*ways: tuple[MemoryLink, MemoryLink, int]) -> list[float]:
    """Times of transfers that begin together."""
    took_s = [math.nan] * len(ways)

    async def one(number: int) -> None:
        took_s[number] = await seconds(*ways[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(ways)):
            nursery.start_soon(one, number)
    return took_s


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 500_000),
    delay_s=st.floats(0, 0.5),
    mbit_s=st.floats(0.05, 500),
    up=st.one_of(st.just(math.inf), st.floats(0.05, 500)),
    down=st.one_of(st.just(math.inf), st.floats(0.05, 500)),
)
def test_a_transfer_takes_the_delay_and_its_bytes_at_the_slowest_rate(
    size: int, delay_s: float, mbit_s: float, up: float, down: float
) -> None:
    async def main() -> float:
        async with running_net(WIDE) as net:
            site = Site(net)
            site.add("a", up_mbit_s=up)
            site.add("b", down_mbit_s=down)
            net.set_path("a", "b", SimPath(latency_s=delay_s, mbit_s=mbit_s))
            return await seconds(*await site.linked("a", "b"), size)

    wanted_s = delay_s + size / (min(mbit_s, up, down) * BYTES_PER_MBIT)
    found_s = run_virtual(main, seed=1)
    assert found_s == pytest.approx(wanted_s, rel=1e-6, abs=1e-9)


async def test_two_transfers_at_once_share_the_rate_of_their_pair(autojump_clock: object) -> None:
    async with running_net(WIDE) as net:
        site = Site(net)
        net.set_path("a", "b", SimPath(latency_s=0.1, mbit_s=8))
        first, second = await site.linked("a", "b"), await site.linked("a", "b", 4002)
        long_s, short_s = await at_once((*first, 1_000_000), (*second, 250_000))
        assert long_s == pytest.approx(0.1 + 1.25, rel=1e-6)  # the pair's line is never idle
        assert short_s == pytest.approx(0.1 + 0.5, rel=0.03)  # half of the rate while both send


async def test_the_two_directions_of_a_pair_have_delays_and_rates_of_their_own(autojump_clock: object) -> None:
    async with running_net(WIDE) as net:
        site = Site(net)
        net.set_path("a", "b", SimPath(latency_s=0.3, mbit_s=8), both=False)
        net.set_path("b", "a", SimPath(latency_s=0.05, mbit_s=80), both=False)
        a, b = await site.linked("a", "b")
        there_s, back_s = await at_once((a, b, 1_000_000), (b, a, 1_000_000))
        assert there_s == pytest.approx(0.3 + 1.0, rel=1e-6)
        assert back_s == pytest.approx(0.05 + 0.1, rel=1e-6)


async def test_other_pairs_are_not_slowed_by_a_slow_one(autojump_clock: object) -> None:
    async with running_net(WIDE) as net:
        site = Site(net)
        net.set_path("a", "b", SimPath(mbit_s=8))
        net.set_path("a", "c", SimPath(mbit_s=16))
        to_b, to_c, none = await site.linked("a", "b"), await site.linked("a", "c"), await site.linked("a", "d")
        found_s = await at_once((*to_b, 1_000_000), (*to_c, 1_000_000), (*none, 1_000_000))
        assert found_s == pytest.approx([1.0, 0.5, 0.0], rel=1e-6)


async def test_pairs_of_one_host_share_its_own_line_as_well(autojump_clock: object) -> None:
    async with running_net(WIDE) as net:
        site = Site(net)
        site.add("a", up_mbit_s=8)
        net.set_path("a", "b", SimPath(mbit_s=8))
        net.set_path("a", "c", SimPath(mbit_s=8))
        to_b, to_c = await site.linked("a", "b"), await site.linked("a", "c")
        assert await at_once((*to_b, 500_000), (*to_c, 500_000)) == pytest.approx([1.0, 1.0], rel=0.03)


async def test_a_changed_rate_counts_from_the_next_segment(autojump_clock: object) -> None:
    async with running_net() as net:
        site = Site(net)
        net.set_path("a", "b", SimPath(mbit_s=8))
        link, other = await site.linked("a", "b")
        assert await seconds(link, other, 1_000_000) == pytest.approx(1.0, rel=1e-6)
        net.set_path("a", "b", SimPath(mbit_s=80))
        assert await seconds(link, other, 1_000_000) == pytest.approx(0.1, rel=1e-6)
        net.set_path("a", "b", SimPath())
        assert await seconds(link, other, 1_000_000) == 0.0


@pytest.mark.parametrize("mbit_s", [0.0, -1.0, math.nan])
def test_a_path_without_a_rate_is_refused(mbit_s: float) -> None:
    with pytest.raises(LocalError, match=r"from a to b .* more than 0"):
        SimNet().set_path("a", "b", SimPath(mbit_s=mbit_s))
