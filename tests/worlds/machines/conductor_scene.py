"""One peer's parts of the conductor's service, with nothing of the network beneath them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import trio

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.swarm import Conducts, Mbs, MemberSync, Position, Seqs, TrainerSync
from peerd.rpc.rpc import Incoming
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.conductor.duty import Duty
from peerd.swarm.conductor.machine_driver import MachineDriver
from peerd.swarm.conductor.orders import ConductingConfig, OrderContext
from peerd.swarm.conductor.reports import Reports
from peerd.swarm.conductor.rivals import ConductorClaim
from peerd.swarm.events import ConductorConfig, Event, SendMove, SendPrepare
from peerd.swarm.positions.proven_positions import Backing
from peerd.swarm.roster import START
from tests.worlds.simulation.clock import SimClock

RUN = b"r" * 16
OWN, OTHER, THIRD = (Keypair.from_seed(name.encode().ljust(32, b".")) for name in ("own", "other", "third"))


class Directory:
    """Of records there are none; counts how often it is read."""

    def __init__(self) -> None:
        self.announced: dict[Any, Any] = {}
        self.kept: dict[PeerId, list[Position]] = {}
        self.only_dials, self.reads = False, 0

    async def refresh(self) -> None:
        await trio.lowlevel.checkpoint()
        self.reads += 1


class Orders:
    """Notes what members are to be told."""

    def __init__(self) -> None:
        self.prepares: list[SendPrepare] = []
        self.moves: list[SendMove] = []
        self.cancelled: list[bytes] = []
        self.reign: OrderContext | None = None

    def begin(self, nursery: trio.Nursery, orders: list[SendPrepare], reign: OrderContext) -> None:
        self.prepares += orders
        self.reign = reign

    async def move(self, order: SendMove, reign: OrderContext) -> None:
        await trio.lowlevel.checkpoint()
        self.moves.append(order)

    def cancel(self, attempt: bytes) -> None:
        self.cancelled.append(attempt)

    def cancel_all(self) -> None:
        self.cancelled.append(b"all")


class Others:
    """In place of `Rivals`: who conducts, whose claim is better, who answers."""

    def __init__(self, following: ConductorClient) -> None:
        self.following = following
        self.terms: dict[PeerId, int] = {}
        self.looks: list[float] = []
        self.ours: list[ConductorClaim] = []
        self.silent: set[PeerId] = set()

    async def conducting(self) -> dict[PeerId, Conducts]:
        await trio.lowlevel.checkpoint()
        self.looks.append(trio.current_time())
        return {peer: Conducts(term) for peer, term in self.terms.items()}

    async def reachable(self, peers: Any) -> set[PeerId]:
        await trio.lowlevel.checkpoint()
        return set(peers) - self.silent

    async def answers(self, peer: PeerId) -> bool:
        await trio.lowlevel.checkpoint()
        return peer not in self.silent

    def better(self, ours: ConductorClaim, peer: PeerId, told: Conducts, backing: Backing) -> bool:
        self.ours.append(ours)
        return told.term > ours.term


class Scene:
    """The duty of a peer that has served stage 0 from the beginning; `start` runs its tasks."""

    def __init__(self, **sizes: Any) -> None:
        self.directory, self.orders, self.notes = Directory(), Orders(), list[str]()
        self.following = ConductorClient(cast(Any, None), OWN.peer_id, cast(Any, self.directory), joined_since=1.0)
        self.others = Others(self.following)
        self.driver = MachineDriver(cast(Any, self.orders), self.others.answers, self.notes.append)
        self.unreachable: set[PeerId] = set()
        links = SimpleNamespace(best=lambda peer: None)
        host = SimpleNamespace(sign=OWN.sign, links=links, connect=self._connect)
        conductor = ConductorConfig(**{"stages": 1, "microbatches": 1, "gather_s": 1.0, **sizes})
        config = ConductingConfig(RUN, conductor, samples=1, prepare_timeout_s=60.0)
        rpc = SimpleNamespace(gate=None)
        self.proofs = proofs = CommitProofs(RUN, cast(Any, rpc), cast(Any, host), self.following, ())
        self.duty = Duty(config, cast(Any, host), SimClock(1, "own"), cast(Any, self.others), self.driver, proofs)
        self.rpc: Any = rpc
        self.reports = Reports(RUN, self.rpc, self.following, self.duty, self.driver)

    async def _connect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self.unreachable:
            raise Unreachable("nobody there", peer)

    def start(self, nursery: trio.Nursery) -> None:
        """Run all tasks of the duty."""
        self.driver.nursery = nursery
        nursery.start_soon(self.driver.keep_time)
        nursery.start_soon(self.driver.watch_silence)
        nursery.start_soon(self.duty.look_around)

    def feed(self, event: Event) -> None:
        self.driver.feed(event)


@asynccontextmanager
async def running(**sizes: Any) -> AsyncIterator[Scene]:
    """A scene whose tasks run until the end of the block; `driver.nursery` runs more of them."""
    async with trio.open_nursery() as nursery:
        scene = Scene(**sizes)
        scene.start(nursery)
        yield scene
        nursery.cancel_scope.cancel()


def member(by: Keypair, **changes: Any) -> Incoming[MemberSync]:
    """A member's first report; it holds nothing."""
    told: dict[str, Any] = {
        **{"run": RUN, "session": 7, "stage": 0, "position": START, "prepared": None, "saved": [], "held": Mbs()},
        **{"counted": Mbs(), "addrs": [], "since": 1.0, "term": 0, "seen": 0, "wait_s": 0.0, **changes},
    }
    return Incoming(by.peer_id, MemberSync(**told), (), trio.current_time() + 60.0)


def trainer(by: Keypair, **changes: Any) -> Incoming[TrainerSync]:
    """A trainer's report, without news."""
    told: dict[str, Any] = {
        **{"run": RUN, "term": 0, "step": 0, "open": Seqs(), "done": [], "seen": 0, "seen_members": 0},
        **{"wait_s": 0.0, **changes},
    }
    return Incoming(by.peer_id, TrainerSync(**told), (), trio.current_time() + 60.0)
