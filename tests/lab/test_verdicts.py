"""Each peer knows within five seconds of joining how others reach it, behind real routers of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts.lab import Unexpected, why_not_wide
from scripts.waiting import eventually

if TYPE_CHECKING:
    from scripts.benchmarks._matrix import Swarm

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXPECTED = {
    "public": "reachable",
    "full-cone": "reachable",
    "port-restricted": "port-restricted",
    "symmetric": "symmetric",
    "firewall": "firewall",
}
VERDICT_S = 5.0
PATIENCE_S = 10.0

pytestmark = [pytest.mark.lab, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _needs_a_wide_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_wide()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(SCRIPTS))


def judged(swarm: Swarm) -> dict[str, dict[str, Any]]:
    """What each peer knows, once all know or PATIENCE_S have passed."""
    told: dict[str, dict[str, Any]] = {}

    def all_know() -> bool:
        told.update({name: member.where()["status"] for name, member in swarm.members.items()})
        return all(status["found_after_s"] is not None for status in told.values())

    swarm.settled()
    eventually(all_know, PATIENCE_S)
    return told


@pytest.mark.parametrize("unexpected", ["drop", "reset"])
def test_the_verdict_is_right_within_five_seconds_whatever_the_router(unexpected: Unexpected) -> None:
    from benchmarks._matrix import KINDS, of_all_kinds

    with of_all_kinds(unexpected) as swarm:
        told = judged(swarm)
        relays = [relay.where()["status"]["verdict"] for relay in swarm.relays]
    assert {name: status["verdict"] for name, status in told.items()} == {
        f"{kind}{number}": EXPECTED[kind] for kind in KINDS for number in (1, 2)
    }
    late = {name: status["found_after_s"] for name, status in told.items() if status["found_after_s"] > VERDICT_S}
    assert late == {}
    assert relays == ["reachable"] * len(swarm.relays)
    closed = {name: len(status["relays"]) for name, status in told.items() if status["verdict"] != "reachable"}
    assert set(closed.values()) == {2}
    print({name: (status["verdict"], round(status["found_after_s"], 2)) for name, status in told.items()})
