"""Line information of a peer: limits before measured rates, and the mode of a peer that can only dial."""

from __future__ import annotations

import pytest

from peerd.averaging.line_speeds import LineSpeeds, line_speeds
from peerd.averaging.rounds.line_info import own_line
from peerd.core.keys import Keypair
from peerd.role.peer_stack import peer_stack
from peerd.run.runfile import LimitsSection, RunFile
from peerd.wire.clock import RealClock
from peerd.wire.rate.access_line import Count


async def carries(limits: LimitsSection, takes_inbound: bool = True, *, busy: bool = True) -> LineSpeeds:
    keypair, clock = Keypair.from_seed(bytes(32)), RealClock(1)
    stack = peer_stack(keypair, clock, [])
    stack.host.takes_inbound = takes_inbound
    for number in range(8):
        stack.host.line.note(number * 0.25, number * 0.25, Count(250_000, 500_000) if busy else Count(0, 0))
    return line_speeds(RunFile(run="x", limits=limits), stack.host)


async def test_what_was_measured_counts_where_nothing_is_stated() -> None:
    line = own_line(await carries(LimitsSection(upload_mbit=4)), "node", 10, "float32", 3)
    assert (line.mode, line.up_bytes_per_s, line.up_measured) == ("node", 500_000, False)
    assert (line.down_bytes_per_s, line.down_measured) == (pytest.approx(2e6), True)
    assert (line.elements, line.dtype, line.further) == (10, "float32", 3)


async def test_nothing_is_known_of_a_line_that_nothing_has_passed() -> None:
    line = own_line(await carries(LimitsSection(), busy=False), "node")
    assert (line.up_bytes_per_s, line.down_bytes_per_s) == (0, 0)


async def test_who_can_only_dial_sums_nothing_for_others() -> None:
    found = await carries(LimitsSection(upload_mbit=4), takes_inbound=False)
    assert own_line(found, "node", 10, "float32").mode == "client"
    helper = own_line(found, "aux")
    assert (helper.mode, helper.up_bytes_per_s) == ("aux", 1.0)
