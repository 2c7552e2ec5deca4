"""The field of an attack: the honest peers of a run, and hostile peers at an address of their own among them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.core.addr import split_peer
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.dht.dht import Dht
from peerd.messages.progress import decode_stage, stage_key
from peerd.messages.swarm import Position
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.run.runfile import RunFile, fingerprint
from peerd.wire.clock import RealClock
from peerd.wire.tcp.tcp_transport import TcpTransport


class OwnAddress(TcpTransport):
    """TCP that leaves from one address of this machine."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def _source(self, family: int, host: str) -> tuple[str, int] | None:
        return self._address, 0


class WrongClock(RealClock):
    """A clock that is off by `off_s`."""

    def __init__(self, seed: int, off_s: float) -> None:
        super().__init__(seed)
        self.off_s = off_s

    def wall(self) -> float:
        return super().wall() + self.off_s


@dataclass
class Field:
    """Targets of the attacks (addresses with /p2p), their run, and the attackers' address."""

    targets: list[Multiaddr]
    run: RunFile
    address: str
    rng: random.Random
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fingerprint = fingerprint(self.run)

    def target(self) -> Multiaddr:
        """One of them."""
        return self.rng.choice(self.targets)

    def peers(self) -> list[PeerId]:
        """The ids of all targets."""
        return [peer for peer in (split_peer(addr)[1] for addr in self.targets) if peer is not None]

    def keypair(self) -> Keypair:
        """A new identity: they cost nothing."""
        return Keypair(self.rng.randbytes(32))

    @asynccontextmanager
    async def peer(self, clock_off_s: float = 0.0, listen: bool = False) -> AsyncIterator[PeerStack]:
        """A hostile peer that speaks all that honest ones speak; connected to every target that lets it."""
        keypair, clock = self.keypair(), WrongClock(self.rng.getrandbits(32), clock_off_s)
        stack = peer_stack(keypair, clock, [OwnAddress(self.address)])
        at = [Multiaddr(f"/ip4/{self.address}/tcp/0")] if listen else []
        async with trio.open_nursery() as nursery:
            await nursery.start(stack.run, at, self.targets[:1])
            await each([lambda addr=addr: stack.host.connect_addr(addr) for addr in self.targets])
            yield stack
            nursery.cancel_scope.cancel()

    async def positions(self, dht: Dht) -> dict[PeerId, tuple[int, int, float]]:
        """Stage, step and start time of stage peers, by the directory."""
        keys = {stage_key(self.run.run, stage): stage for stage in range(self.run.pipeline.stages)}
        found = await dht.get_many(list(keys))
        told = {}
        for key, stage in keys.items():
            for record in found.get(key, []):
                try:
                    progress = decode_stage(record.value)
                except RemoteError:
                    continue
                if record.publisher in self.peers():
                    told[record.publisher] = stage, progress.step, progress.since
        return told

    def done(self, what: str) -> None:
        """Count one more of these."""
        self.counts[what] = self.counts.get(what, 0) + 1


async def each(work: list[Callable[[], Awaitable[object]]]) -> None:
    """All of it side by side; what is refused is refused."""

    async def quietly(one: Callable[[], Awaitable[object]]) -> None:
        with suppress(RemoteError):
            await one()

    async with trio.open_nursery() as nursery:
        for one in work:
            nursery.start_soon(quietly, one)


FAR = Position(1_000_000, b"nowhere.")  # where a liar says it stands
