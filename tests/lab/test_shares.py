"""A round of averaging behind unequal lines, in shares by what the lines carry: near to the bound, ahead of equal ones.

A small version of the table that `scripts/bench.py averaging` prints: every peer is a process on a host of its own.
"""

from __future__ import annotations

import os
import statistics
import time

import pytest

from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import WorkSplitter
from peerd.messages.swarm import LineInfo
from scripts.benchmarks import _table1
from scripts.benchmarks._group import ask, round_s

RATES = (40.0, 40.0, 40.0, 160.0)  # Mb/s: the fast one sums everything, each slow one moves one vector
VALUES = 1_000_000
BUSY = 0.25  # of the processor, by others: then it is not the lines that are waited for

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shares_by_bandwidth_beat_equal_ones_and_come_near_to_the_bound() -> None:
    found = _table1.row(RATES, {"allreduce": 1, "ps": 1, "ours": 2}, VALUES)
    equal, ours = found["allreduce"], found["ours"]
    assert equal.bound_s == pytest.approx(1.5 * ours.bound_s), "the model of this test is wrong"
    assert ours.bound_s == pytest.approx(VALUES * 32 / 40e6, rel=0.01)
    for cell in found.values():
        assert cell.seconds > 0.95 * cell.bound_s, f"faster than its lines: {found}"
    over, gain = ours.seconds / ours.bound_s, equal.seconds / ours.seconds
    if (over >= 1.5 or gain <= 1.25) and max(equal.others_share, ours.others_share) > BUSY:
        pytest.skip(f"this machine is busy with other things, seconds mean nothing: {found}")
    assert over < 1.5, found
    assert gain > 1.25, found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lines_that_nobody_states_are_measured_and_shares_become_right_by_themselves() -> None:
    grouping = GroupTopology(lines := WorkSplitter(), 0)
    seconds, fast = list[float](), list[float]()
    with _table1.in_lab(RATES) as (peers, ids):
        ask(peers, do="make", count=2 * VALUES)
        before, began = _table1.Spent.now(peers), time.monotonic()
        for _ in range(14):
            for peer, found in zip(ids, ask(peers, do="line"), strict=True):
                line = LineInfo("node", found["up"], found["down"], 2 * VALUES, "float32", 0, True, True)
                lines.tell(peer, 0, line)
            split = grouping.order(0, tuple(sorted(ids))).groups[0].split
            shares = dict.fromkeys(ids, 0.25)
            if split is not None:
                shares = dict.fromkeys(ids, 0.0) | {party.peer: party.share for party in split.parties}
            fast.append(shares[ids[3]])
            seconds.append(round_s(peers, "none", 0.2, shares=shares, part_bytes=_table1.PART_BYTES))
        told = ask(peers, do="line")
        others_s = _table1.Spent.now(peers).others_s - before.others_s
        busy = others_s / (time.monotonic() - began) / (os.cpu_count() or 1)
    story = f"{list(zip(fast, seconds, strict=True))}, {told}"
    assert fast[0] == 0.25, story
    assert seconds[0] > 0.95 * 1.5 * 2 * VALUES * 32 / 40e6, story
    slow = [direction * 8e-6 for line in told[:3] for direction in line.values()]
    assert all(0.7 * RATES[0] < mbit < 1.05 * RATES[0] for mbit in slow), story
    assert min(fast[-4:]) > 0.6, story
    assert max(fast[-4:]) - min(fast[-4:]) < 0.2, f"shares do not stand still: {story}"
    gain = seconds[0] / statistics.median(seconds[-4:])
    if gain <= 1.25 and busy > BUSY:
        pytest.skip(f"this machine is busy with other things, seconds mean nothing: {story}")
    assert gain > 1.25, story


def test_where_there_can_be_no_lab_the_table_is_null_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table1, "why_not", lambda: "a network lab needs root")
    sections, keys, note = _table1.table1({"allreduce": 1, "ps": 1, "ours": 1})
    assert (sections, keys["table1"], keys["table1_why"]) == ([], None, "a network lab needs root")
    assert "needs root" in note
