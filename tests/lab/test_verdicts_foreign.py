"""AutoNAT with go-libp2p, in the lab, since it looks at public addresses only: as our judge, and judged by us."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.benchmarks._matrix import Swarm, started
from scripts.benchmarks._remote_process import RemoteProcess
from scripts.lab import Kind, Unexpected, WideHost, WideLab
from scripts.waiting import eventually
from tests.worlds.processes.foreign import command_line, require

PORT = 31337
GO_WAITS_S = 90.0  # go-libp2p lets some time pass before it asks

pytestmark = [pytest.mark.lab, pytest.mark.interop, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _needs_a_wide_lab_and_go(_needs_a_wide_lab: None) -> None:
    require("go")


@contextmanager
def go(host: WideHost, *flags: str) -> Iterator[tuple[RemoteProcess, str]]:
    """p2pd on a host of the lab, driven as in tests/worlds/processes/foreign.py, and its address."""
    argv = command_line("go", [f"-hostAddrs=/ip4/{host.ip}/tcp/{PORT}", *flags])
    made = RemoteProcess(host.popen, argv, stderr=subprocess.DEVNULL)
    try:
        yield made, f"/ip4/{host.ip}/tcp/{PORT}/p2p/{made.answer()['ready']}"
    finally:
        made.end()


@pytest.mark.parametrize(
    ("kind", "unexpected", "verdict"),
    [("none", "drop", "reachable"), ("port-restricted", "reset", "port-restricted"), ("firewall", "reset", "firewall")],
)
def test_go_libp2p_is_a_judge_for_our_peers(kind: Kind, unexpected: Unexpected, verdict: str) -> None:
    with WideLab(delay_ms=5) as lab, go(lab.host("go"), "-autonat", "-forceReachabilityPublic") as (_, judge):
        leaf = started(lab.host("leaf", kind, unexpected), [judge])
        leaf.answer()
        status: dict[str, Any] = {}

        def is_known() -> bool:
            status.update(leaf.ask(do="where")["status"])
            return status["verdict"] != "unknown"

        eventually(is_known, 30)
        assert (status["verdict"], status["why"]) == (verdict, status["why"])
        leaf.end()


def test_go_libp2p_asks_our_peers_and_is_dialed_back() -> None:
    with WideLab(delay_ms=5) as lab:
        [ours] = (swarm := Swarm(lab, relays=1)).relays  # alone, so that nobody else asks it
        with go(lab.host("go"), "-autonat") as (asker, _):
            asker.ask(id=1, do="dial", addr=swarm.known[0])
            assert eventually(lambda: ours.where()["status"]["dialed_back"]["through"], GO_WAITS_S) > 0
