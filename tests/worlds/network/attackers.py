"""Attackers of a relay, under many identities: ask and write without end, never read, never say a word."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core.addr import circuit_addr, with_peer
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.reach.relay.circuit_transport import Circuits
from peerd.wire.transport import RawLink


@dataclass
class Tally:
    """Counts of what was tried."""

    attempts: int = 0
    opened: int = 0
    greedy_bytes: int = 0


async def flood(
    circuits: Circuits, relay: tuple[PeerId, Multiaddr], targets: list[PeerId], rng: random.Random, tally: Tally
) -> None:
    """One identity: reserve and connect without end; write into every circuit, read none."""
    way = circuit_addr(relay[1], relay[0])
    async with trio.open_nursery() as nursery:

        async def hold(raw: RawLink) -> None:
            try:
                while rng.random() < 0.999:
                    await raw.send_all(bytes(32_000))
                    tally.greedy_bytes += 32_000
                await trio.sleep_forever()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        while True:
            await trio.sleep(rng.uniform(0.05, 0.3))
            tally.attempts += 1
            with contextlib.suppress(RemoteError):
                await circuits.reserve(relay[0])
            try:
                raw = await circuits.dial(with_peer(way, rng.choice(targets)))
            except RemoteError:
                continue
            tally.opened += 1
            nursery.start_soon(hold, raw)


def attack(
    crew: list[Circuits],
    dial: Callable[[], Awaitable[RawLink]],
    relay: tuple[PeerId, Multiaddr],
    targets: list[PeerId],
    tally: Tally,
    nursery: trio.Nursery,
) -> None:
    """Start all attacks from one place: `crew` opens circuits to `targets` and to itself; `dial` only connects."""
    everyone = targets + [circuits._host.id for circuits in crew]
    for circuits in crew:
        circuits.welcome = swallow  # type: ignore[method-assign]
        rng = random.Random(str(circuits._host.id))
        nursery.start_soon(flood, circuits, relay, everyone, rng, tally)
    nursery.start_soon(never_shake_hands, dial, nursery)


async def swallow(raw: RawLink, peer: PeerId) -> None:
    """An attacker's own end of a circuit: half of them are read as fast as can be, the others never."""
    if peer.raw[-1] % 2:
        await wait_for_end(raw)


async def never_shake_hands(dial: Callable[[], Awaitable[RawLink]], nursery: trio.Nursery) -> None:
    """Connect, and say nothing, again and again."""
    while True:
        nursery.start_soon(wait_for_end, await dial())
        await trio.sleep(0.05)


async def wait_for_end(raw: RawLink) -> None:
    try:
        while await raw.receive_some(1 << 16):
            pass
    except trio.BrokenResourceError:
        pass
    await raw.aclose()
