"""Peers behind every pair of routers reach each other, on the best way that there is between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lab import Kind, Unexpected, why_not_wide

SCRIPTS = Path(__file__).parents[2] / "scripts"
PUNCHED_S = 3.0

pytestmark = [pytest.mark.lab, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _needs_a_wide_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_wide()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize("unexpected", ["drop", "reset"])
def test_each_pair_of_kinds_ends_on_the_best_way_there_is(unexpected: Unexpected) -> None:
    from benchmarks._matrix import KINDS, best, matrix, of_all_kinds

    with of_all_kinds(unexpected) as swarm:
        swarm.settled()
        found = matrix(swarm)
    wanted = {f"{one}/{other}": best(one, other) for one in KINDS for other in KINDS}
    said = {pair: met.text for pair, met in found.items() if met.way != wanted[pair]}
    assert {pair: met.way for pair, met in found.items()} == wanted, said
    punched = {pair: met.best_s for pair, met in found.items() if met.way == "punched"}
    assert len(punched) == 4
    assert all(at is not None and at <= PUNCHED_S for at in punched.values()), punched


@pytest.mark.parametrize("kind", ["full-cone", "port-restricted", "symmetric"])
def test_neighbours_behind_one_router_meet_on_their_lan(kind: Kind) -> None:
    import lab
    from benchmarks._matrix import Swarm

    with lab.WideLab() as wide:
        swarm = Swarm(wide)
        home = wide.router("home", kind)
        swarm.add({name: wide.host(name, home) for name in ("one", "other")})
        swarm.settled()
        (met,) = swarm.meet([("one", "other", "direct")])
        remote = swarm.members["one"].where()["remotes"][swarm.members["other"].peer]
    assert met.way == "direct", met.text
    assert remote.startswith(f"/ip4/{swarm.members['other'].host.ip}/")


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
    from benchmarks._matrix import best

    assert best(one, other) == best(other, one) == way


def test_the_table_for_people_has_the_best_way_of_each_pair() -> None:
    from benchmarks._matrix import KINDS, best

    lines = (SCRIPTS.parent / "README.md").read_text("utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| caller \\ called |"))
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin : begin + 7])
    found = {
        (row[0], called): cell.split()[0] for row in rows[1:] for called, cell in zip(head[1:], row[1:], strict=True)
    }
    assert found == {(caller, called): best(caller, called) for caller in KINDS for called in KINDS}
