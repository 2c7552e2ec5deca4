"""A relay in a process of its own, attacked over real sockets: what the attack costs in processor time and memory.

In virtual time, where neither counts, `tests/sim/test_relay_attack.py` shows that every limit of the relay holds.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from peerd.core.addr import parse_addr, split_peer
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from tests.worlds.processes.relay_process import client

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


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[trio.Process, str]]:
    """`tests.worlds.processes.relay_process`, which ends with the block, and the line that it prints."""
    command = [sys.executable, "-m", "tests.worlds.processes.relay_process", *arguments]
    run = functools.partial(trio.run_process, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    async with trio.open_nursery() as nursery:
        running = await nursery.start(run, command)
        with trio.fail_after(30):
            said = b""
            while not said.endswith(b"\n"):
                said += await running.stdout.receive_some()
        yield running, said.decode().strip()
        nursery.cancel_scope.cancel()


def peak_bytes(process: trio.Process) -> int:
    """The most memory that a process has used so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


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

    async def rates(seconds: float) -> dict[PeerId, float]:
        before = dict(got)
        await trio.sleep(seconds)
        return {peer: (got[peer] - before[peer]) / seconds for peer in before}

    async with process("relay", "/ip4/127.0.1.1/tcp/0") as (relay, at), trio.open_nursery() as nursery:
        targets = []
        for number in range(PAIRS):
            a, _ = await client(nursery, f"127.0.{10 + number}.1", at)
            b, behind = await client(nursery, f"127.0.{20 + number}.1", at)
            b.handle("/take/1", take)
            held = await behind.reserve(split_peer(parse_addr(at))[1])
            await a.connect(b.id, held.addrs)
            targets.append(str(b.id))
            nursery.start_soon(send_steadily, a, b.id)
        with trio.fail_after(10 * CALM_S):
            await flowing.wait()
        calm = await rates(CALM_S)
        async with process("attack", at, ",".join(PLACES), ",".join(targets)) as (_, opened):
            attacked = await rates(ATTACK_S)
        shares = [attacked[peer] / calm[peer] for peer in calm]
        print(
            f"\nhonest circuits keep {', '.join(f'{share:.0%}' for share in shares)} of {HONEST_BYTES_PER_S / 1e6:.0f} "
            f"MB/s each; {opened}; the relay's process used at most {peak_bytes(relay) / 1e6:.0f} MB"
        )
        assert min(shares) >= 0.8
        assert broken == 0
        assert peak_bytes(relay) < 256 << 20
        nursery.cancel_scope.cancel()
