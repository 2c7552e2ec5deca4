"""Peers behind routers of every kind know how they are reached, and reach each other on the best way there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import _matrix
from scripts.benchmarks._matrix import KINDS, Swarm, best, matrix
from scripts.lab import Kind, WideLab
from scripts.waiting import eventually

SCRIPTS = Path(__file__).parents[2] / "scripts"
VERDICTS = {
    "public": "reachable",
    "full-cone": "reachable",
    "port-restricted": "port-restricted",
    "symmetric": "symmetric",
    "firewall": "firewall",
}
VERDICT_S = 5.0
PUNCHED_S = 3.0
PATIENCE_S = 10.0

pytestmark = [
    *(pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("_needs_a_wide_lab"),
]


@pytest.fixture(scope="module", params=["drop", "reset"])
def of_all_kinds(request: pytest.FixtureRequest, _needs_a_wide_lab: None) -> Iterator[Swarm]:
    """Two peers of each kind, behind routers that drop or refuse what they did not expect; none has met another."""
    with _matrix.of_all_kinds(request.param) as swarm:
        swarm.settled()
        yield swarm


def judged(swarm: Swarm) -> dict[str, dict[str, Any]]:
    """Each peer's status of its reachability, once all know theirs or PATIENCE_S have passed."""
    told: dict[str, dict[str, Any]] = {}

    def all_know() -> bool:
        told.update({name: member.where()["status"] for name, member in swarm.members.items()})
        return all(status["found_after_s"] is not None for status in told.values())

    eventually(all_know, PATIENCE_S)
    return told


@pytest.mark.parametrize("kind", ["full-cone", "port-restricted", "symmetric"])
def test_neighbours_behind_one_router_meet_on_their_lan(kind: Kind) -> None:
    with WideLab() as wide:
        swarm = Swarm(wide)
        home = wide.router("home", kind)
        swarm.add({name: wide.host(name, home) for name in ("one", "other")})
        swarm.settled()
        (met,) = swarm.meet([("one", "other", "direct")])
        remote = swarm.members["one"].where()["remotes"][swarm.members["other"].peer]
    assert met.way == "direct", met.text
    assert remote.startswith(f"/ip4/{swarm.members['other'].host.ip}/")


def test_the_verdict_is_right_within_five_seconds_whatever_the_router(of_all_kinds: Swarm) -> None:
    told = judged(of_all_kinds)
    relays = [relay.where()["status"]["verdict"] for relay in of_all_kinds.relays]
    assert {name: status["verdict"] for name, status in told.items()} == {
        f"{kind}{number}": VERDICTS[kind] for kind in KINDS for number in (1, 2)
    }
    late = {name: status["found_after_s"] for name, status in told.items() if status["found_after_s"] > VERDICT_S}
    assert late == {}
    assert relays == ["reachable"] * len(of_all_kinds.relays)
    closed = {name: len(status["relays"]) for name, status in told.items() if status["verdict"] != "reachable"}
    assert set(closed.values()) == {2}
    print({name: (status["verdict"], round(status["found_after_s"], 2)) for name, status in told.items()})


def test_each_pair_of_kinds_ends_on_the_best_way_there_is(of_all_kinds: Swarm) -> None:
    found = matrix(of_all_kinds)
    wanted = {f"{one}/{other}": best(one, other) for one in KINDS for other in KINDS}
    said = {pair: met.text for pair, met in found.items() if met.way != wanted[pair]}
    assert {pair: met.way for pair, met in found.items()} == wanted, said
    punched = {pair: met.best_s for pair, met in found.items() if met.way == "punched"}
    assert len(punched) == 4
    assert all(at is not None and at <= PUNCHED_S for at in punched.values()), punched


@pytest.mark.parametrize(
    ("one", "other", "way"),
    [
        ("public", "symmetric", "direct"),
        ("symmetric", "full-cone", "direct"),
        ("port-restricted", "port-restricted", "punched"),
        ("firewall", "port-restricted", "punched"),
        ("symmetric", "port-restricted", "relayed"),
        ("firewall", "symmetric", "relayed"),
        ("symmetric", "symmetric", "relayed"),
    ],
)
def test_the_best_way_depends_on_whether_somebody_is_open_and_both_ports_are_known(
    one: str, other: str, way: str
) -> None:
    assert best(one, other) == best(other, one) == way


def test_the_table_for_people_has_the_best_way_of_each_pair() -> None:
    lines = (SCRIPTS / "README.md").read_text("utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| caller \\ called |"))
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin : begin + 7])
    found = {
        (row[0], called): cell.split()[0] for row in rows[1:] for called, cell in zip(head[1:], row[1:], strict=True)
    }
    assert found == {(caller, called): best(caller, called) for caller in KINDS for called in KINDS}
