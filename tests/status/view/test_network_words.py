"""The network in `peerd status --swarm`: a matrix of a small swarm, the worst lines of a large one, or why not."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import msgspec
import pytest
from rich.console import Console, Group

from peerd.core.keys import Keypair
from peerd.messages.network import MappedPair
from peerd.status.network_view import PAIRS_TOLD, network_status
from peerd.status.swarm_status import NetworkStatus, SwarmStatus, TrainerStatus
from peerd.status.view.network_words import COLUMNS, network_parts
from peerd.status.view.status_view import render_swarm
from peerd.swarm.conductor.link_watch import NamedPair, ReadMap

IDS = [Keypair.from_seed(bytes([n]) * 32).peer_id.text for n in range(40)]


def a_map(count: int, **changes: Any) -> ReadMap:
    """Peers of which the first has a slow line and the last is far away."""
    pairs = []
    for i, j in combinations(range(count), 2):
        rate = 250_000.0 if i == 0 else 12.5e6
        rtt_s = 0.18 if j == count - 1 else 0.0123
        estimated = i == 1 and j == 2
        figures = MappedPair(0, 1, rtt_s, rate, 2 * rate, 5.0, estimated, estimated, estimated)
        pairs.append(NamedPair(IDS[i], IDS[j], figures))
    return ReadMap(count, pairs, **changes)


def text_of(told: NetworkStatus, names: dict[str, str] | None = None) -> list[str]:
    console = Console(width=COLUMNS, no_color=True)
    with console.capture() as capture:
        console.print(Group(*network_parts(told, names or {})))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_small_swarm_is_a_matrix_with_estimates_marked() -> None:
    lines = text_of(network_status(a_map(4)), {IDS[0]: "ann", IDS[1]: "[bold]ben"})
    assert " ".join(lines[:2]).startswith("network: 4 peers, 12 to 180 ms (median 180), 2.0 to 200 Mb/s (median 4.0)")
    row = next(line.split() for line in lines if line.startswith("1 ann"))
    assert row == ["1", "ann", "12/2.0", "12/2.0", "180/2.0"]
    row = next(line.split() for line in lines if line.startswith("2 [bold]ben"))
    assert row == ["2", "[bold]ben", "12/4.0", "~12/~100", "180/100"]
    assert "~ estimated from other pairs" in lines[-1]
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("count", [6, 7, 12, 40])
def test_a_large_swarm_is_a_summary_that_fits_the_screen(count: int) -> None:
    told = network_status(a_map(count, more=True))
    lines = text_of(told)
    assert max(map(len, lines)) <= COLUMNS
    assert "not all pairs were read" in " ".join(lines)
    json.dumps(msgspec.to_builtins(told), allow_nan=False)
    if count >= 12:
        slow = next(line.split() for line in lines if line.startswith("slowest"))
        assert slow[1] == f"…{IDS[0][-8:]}"
        assert slow[-2:] == ["2.0", "12"]
        far = next(line.split() for line in lines if line.startswith("farthest"))
        assert far[-1] == "180"
    assert bool(told.pairs) == (count * (count - 1) // 2 <= PAIRS_TOLD)


def test_why_there_is_no_map_is_told_and_nothing_before_the_first_look() -> None:
    assert text_of(NetworkStatus(why="the run has no conductor")) == ["network: the run has no conductor"]
    assert network_parts(None, {}) == []


def test_nothing_measured_is_said_so() -> None:
    unknown = ReadMap(2, [NamedPair("a", "b", MappedPair(0, 1, 0.0, 0.0, 0.0, 0.0, True, True, True))])
    lines = text_of(network_status(unknown))
    assert "no round trip measured yet, no rate measured yet" in " ".join(lines)
    assert lines[-2].split() == ["1", "a", "-/-"]
    assert text_of(network_status(ReadMap(1))) == ["network: 1 peer, no round trip measured yet, no rate measured yet"]


def test_the_swarm_view_has_the_network() -> None:
    trainers = [TrainerStatus(peer=IDS[peer], step=1) for peer in (2, 0)]
    told = SwarmStatus(run="r", trainers=trainers, network=network_status(a_map(3)))
    console = Console(width=COLUMNS)
    with console.capture() as capture:
        console.print(render_swarm(told))
    assert "network: 3 peers" in capture.get()
    places = [capture.get().index(f"{number} …{IDS[peer][-8:]}") for number, peer in ((1, 2), (2, 0), (3, 1))]
    assert places == sorted(places), "in the order in which the peers are listed above"
