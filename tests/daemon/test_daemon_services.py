"""One peer as a whole: whatever service fails by a fault of ours, the peer goes on, and its status says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peerd.daemon.control import socket
from peerd.daemon.daemon import Daemon
from peerd.run.home import socket_path
from tests.daemon.test_daemon import Quiet, peer


class Calm(Quiet):
    """Must live on, and is never begun again."""


def breaking(original: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """`original`, which fails at its first calls."""
    left = [times]

    @functools.wraps(original)
    def broken(*args: Any, **more: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("nobody foresaw this")
        return original(*args, **more)

    return broken


# A method of each service that its own loop calls, and the name that the log has for the service.
SERVICES: list[tuple[Callable[[Daemon], Any], str, str]] = [
    (lambda d: d.host.links, "run", "service host"),
    (lambda d: d.rpc, "_keep_time", "service calls"),
    (lambda d: d.dht._timer, "run", "service directory"),
    (lambda d: d.dht, "_follow_addrs", "service directory"),
    (lambda d: d.connectivity.reach._timer, "run", "service reach"),
    (lambda d: d.connectivity.reserving, "look", "service reserving"),
    (lambda d: d.connectivity.circuits._renewal, "run", "service circuits"),
    (lambda d: d.connectivity.punching._host, "connected", "service"),
    (lambda d: d, "_reasons", "service waits"),
]


@pytest.mark.parametrize(("of", "method", "where"), SERVICES, ids=[f"{w}-{m}" for _, m, w in SERVICES])
async def test_a_fault_in_a_service_ends_neither_the_peer_nor_its_roles(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    of: Callable[[Daemon], Any],
    method: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Calm.happened.clear()
    async with peer(tmp_path, Calm) as one:
        found = of(one.daemon)
        owner = found if "__dict__" in dir(found) else type(found)
        monkeypatch.setattr(owner, method, breaking(getattr(owner, method)))
        await trio.sleep(100)
        faults = one.daemon.host.faults
        assert faults.total >= 1
        assert any(fault.where.startswith(where) for fault in faults.places.values())
        assert Calm.happened == ["built"]
        told = await trio.to_thread.run_sync(socket.fetch, str(socket_path(one.home)))
        assert told["faults"]["count"] == faults.total
        assert told["faults"]["last"] == faults.last != ""
        assert not one.ended.is_set()


async def test_a_snapshot_that_fails_tells_of_the_fault(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer(tmp_path, Calm) as one:
        await trio.sleep(5)
        monkeypatch.setattr(one.daemon.rpc, "status", breaking(one.daemon.rpc.status))
        path = str(socket_path(one.home))
        told = await trio.to_thread.run_sync(socket.fetch, path)
        assert (told["faults"]["count"], "roles" in told) == (1, False)
        told = await trio.to_thread.run_sync(socket.fetch, path)
        assert (told["faults"]["count"], "roles" in told) == (1, True)
        assert told["budgets"]
        assert {"means", "used", "of"} <= told["budgets"][0].keys()
