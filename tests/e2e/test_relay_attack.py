"""A relay in a process of its own, over real sockets, attacked by another process: honest circuits keep their rate."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.net.clock import RealClock
from peerd.net.host.host import Host
from peerd.net.link.stream import Stream
from peerd.net.relay.circuit_transport import Circuits
from tests.kit.relay_process import CONFIG, FromPlace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.socket,
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8, and /proc"),
]
ROOT = Path(__file__).resolve().parents[2]
PAIRS = 2
CALM_S, ATTACK_S = 5.0, 15.0  # two stretches of real time whose rates are compared
HONEST_BYTES_PER_S = 1_000_000
PLACES = ("127.0.66.1", "127.0.77.1", "127.0.88.1")


class Told:
    """The last values that a process reported."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self.most: dict[str, Any] = {}
        self.first = trio.Event()

    async def read(self, stdout: trio.abc.ReceiveStream) -> None:
        buffer = b""
        async for data in stdout:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self.last |= json.loads(line)
                for key, value in self.last.items():
                    self.most[key] = max(value, self.most.get(key, value))
                self.first.set()


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Told]:
    """`tests.kit.relay_process`, which ends with the block."""
    command = [sys.executable, "-m", "tests.kit.relay_process", *arguments]
    running = await trio.lowlevel.open_process(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    told = Told()
    assert running.stdin is not None
    assert running.stdout is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(told.read, running.stdout)
            with trio.fail_after(30):
                await told.first.wait()
            yield told
            nursery.cancel_scope.cancel()
    finally:
        running.kill()
        with trio.CancelScope(shield=True):
            await running.wait()
            await running.stdin.aclose()
            await running.stdout.aclose()


async def a_host(nursery: trio.Nursery, ip: str, relay: PeerId, addr: str) -> tuple[Host, Circuits]:
    clock = RealClock()
    host = Host(Keypair.generate(clock.secure_bytes), clock, [FromPlace(ip)])
    circuits = Circuits(host, clock)
    host.add_transport(circuits)
    await nursery.start(host.run, [parse_addr(f"/ip4/{ip}/tcp/0")])
    await nursery.start(circuits.run)
    await host.connect(relay, [parse_addr(addr)])
    return host, circuits


@pytest.mark.thorough
async def test_honest_circuits_over_sockets_keep_their_rate_under_attack() -> None:
    got: dict[PeerId, int] = {}
    flowing = trio.Event()
    broken = 0

    async def take(stream: Stream) -> None:
        while data := await stream.receive_some(1 << 16):
            got[stream.peer] = got.get(stream.peer, 0) + len(data)
            if len(got) == PAIRS and min(got.values()) >= HONEST_BYTES_PER_S:
                flowing.set()

    async def send_steadily(source: Host, destination: PeerId) -> None:
        nonlocal broken
        begin, sent = trio.current_time(), 0
        try:
            stream = await source.open_stream(destination, "/take/1")
            while True:
                sent += 20_000
                await stream.send(bytes(20_000))
                await trio.sleep_until(begin + sent / HONEST_BYTES_PER_S)
        except Unreachable:
            broken += 1

    async with process("relay", "/ip4/127.0.1.1/tcp/0") as relay, trio.open_nursery() as nursery:
        relay_id, at = PeerId.parse(relay.last["id"]), relay.last["addr"]
        targets = []
        for number in range(PAIRS):
            a, _ = await a_host(nursery, f"127.0.{10 + number}.1", relay_id, at)
            b, behind = await a_host(nursery, f"127.0.{20 + number}.1", relay_id, at)
            b.handle("/take/1", take)
            await a.connect(b.id, (await behind.reserve(relay_id)).addrs)
            targets.append(b.id)
            nursery.start_soon(send_steadily, a, b.id)
        with trio.fail_after(10 * CALM_S):
            await flowing.wait()
        before = dict(got)
        await trio.sleep(CALM_S)
        calm = {peer: (got[peer] - before[peer]) / CALM_S for peer in before}
        attackers = "attack", f"{at}/p2p/{relay_id}", ",".join(PLACES), ",".join(map(str, targets))
        async with process(*attackers) as attack:
            before = dict(got)
            await trio.sleep(ATTACK_S)
            kept = {peer: (got[peer] - before[peer]) / ATTACK_S / calm[peer] for peer in before}
            tried = dict(attack.last)
        most = relay.most
        print(
            f"\nhonest circuits keep {', '.join(f'{share:.0%}' for share in kept.values())} of "
            f"{HONEST_BYTES_PER_S / 1e6:.0f} MB/s each, {broken} broke; {tried['attempts']} attempts, "
            f"{tried['opened']} opened, {most['refused']} refused; at most {most['circuits']} circuits and "
            f"{most['reservations']} reservations; {most['carried_bytes'] / 1e6:.0f} MB carried; "
            f"the relay's process held at most {most['resident_bytes'] / 1e6:.0f} MB"
        )
        assert tried["opened"] > 20
        assert min(kept.values()) >= 0.8
        assert broken == 0
        assert most["circuits"] <= PAIRS + len(PLACES) * CONFIG.circuits_per_place
        assert most["reservations"] <= PAIRS + len(PLACES) * CONFIG.reservations_per_place
        assert most["resident_bytes"] < 256 << 20
        nursery.cancel_scope.cancel()
