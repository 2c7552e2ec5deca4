"""AutoNAT with go-libp2p, in the lab, since it looks at public addresses only: as our judge, and judged by us."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.benchmarks._matrix import Swarm, started
from scripts.lab import Kind, Unexpected, WideHost, WideLab
from scripts.waiting import eventually
from tests.worlds.processes.foreign import command_line, require

PORT = 31337
GO_WAITS_S = 90.0  # go-libp2p lets some time pass before it asks

pytestmark = [pytest.mark.lab, pytest.mark.interop, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _needs_a_wide_lab_and_go(_needs_a_wide_lab: None) -> None:
    require("go")


class Go:
    """p2pd on a host of the lab, driven as in tests/worlds/processes/foreign.py."""

    def __init__(self, host: WideHost, *flags: str) -> None:
        argv = command_line("go", [f"-hostAddrs=/ip4/{host.ip}/tcp/{PORT}", *flags])
        pipe = subprocess.PIPE
        self._process = host.popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        ready = self._hear()
        self.addr = f"/ip4/{host.ip}/tcp/{PORT}/p2p/{ready['ready']}"

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": 1, **command}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def go(host: WideHost, *flags: str) -> Iterator[Go]:
    made = Go(host, *flags)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize(
    ("kind", "unexpected", "verdict"),
    [("none", "drop", "reachable"), ("port-restricted", "reset", "port-restricted"), ("firewall", "reset", "firewall")],
)
def test_go_libp2p_is_a_judge_for_our_peers(kind: Kind, unexpected: Unexpected, verdict: str) -> None:
    with WideLab(delay_ms=5) as lab, go(lab.host("go"), "-autonat", "-forceReachabilityPublic") as judge:
        leaf = started(lab.host("leaf", kind, unexpected), [judge.addr])
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
        with go(lab.host("go"), "-autonat") as asker:
            asker.ask(do="dial", addr=swarm.known[0])
            assert eventually(lambda: ours.where()["status"]["dialed_back"]["through"], GO_WAITS_S) > 0
