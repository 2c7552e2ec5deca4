"""js-libp2p behind a home router meets a peer of ours over our relay, and both end up without it.

js dials from any port but the one that it listens on, and names no address that others have not confirmed: only we can
be dialed, and only if our router lets strangers in. The prepared p2pd does not know the protocol at all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from scripts.benchmarks._matrix import Swarm
from scripts.benchmarks._remote_process import RemoteProcess
from scripts.lab import WideLab
from scripts.waiting import eventually
from tests.worlds.processes.foreign import command_line, require

PORT = 4001
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.interop,
    pytest.mark.lab,
    pytest.mark.socket,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def wide(_needs_a_wide_lab: None) -> Iterator[WideLab]:
    require("js")
    with WideLab(delay_ms=10) as lab:
        yield lab


def until(what: Callable[[], object]) -> bool:
    """True when the condition holds within PATIENCE_S."""
    return bool(eventually(what, PATIENCE_S))


def is_past_the_relay(way: str | None, seen: list[str]) -> bool:
    """Notes each new way."""
    if way is not None and way not in seen:
        seen.append(way)
    return way in ("direct", "punched")


def test_js_behind_our_relay_is_reached_and_dials_us_then(wide: WideLab) -> None:
    swarm = Swarm(wide, relays=1)
    (relay,) = swarm.known
    argv = command_line("js", (f"behind={relay}", f"listen=/ip4/0.0.0.0/tcp/{PORT}", "dcutr"))
    js = RemoteProcess(wide.host("js", "port-restricted").popen, argv, stderr=subprocess.DEVNULL)
    peer = js.answer()["ready"]
    try:
        assert until(lambda: swarm.relays[0].where()["status"]["carries"]["reservations"] == 1)
        swarm.known.append(f"{relay}/p2p-circuit/p2p/{peer}")  # ours dials it as it starts
        swarm.add({"ours": wide.host("ours", "full-cone")})
        ours, ways = swarm.members["ours"], list[str]()
        assert until(lambda: is_past_the_relay(ours.where()["ways"].get(peer), ways)), ways
        assert "relayed" in ways  # that was the beginning
    finally:
        js.end()
