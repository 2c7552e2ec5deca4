"""Runs with tokens for tests: an organizer, tokens of every kind, and peers with a gate in a simulated world."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from peerd.access.access_guard import Access
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.encoding import Empty
from peerd.messages.token import Revoked, Token, normal_roles, seal
from peerd.role.peer_stack import PeerStack
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import AccessSection, PipelineSection, RunFile
from tests.kit.declared import declared
from tests.kit.virtual_time import within
from tests.worlds.simulation.clock import EPOCH_S
from tests.worlds.simulation.programs import stack_on
from tests.worlds.simulation.world import Node, World

ORGANIZER = Keypair.from_seed(b"organizer".ljust(32, b"."))
STRANGER = Keypair.from_seed(b"stranger".ljust(32, b"."))
NOW = int(EPOCH_S)
ROLES = ("stage", "trainer", "aux", "backbone", "expert")
SERVED = (
    "stage/6/forward",
    "stage/6/commit",
    "handover/2/pass",
    "handover/2/relay",
    "swarm/6/member",
    "swarm/6/trainer",
    "average/2/part",
    "other/1/ask",
)


def run_file(run: str = "tiny", stages: int = 2) -> RunFile:
    access = AccessSection(allow="tokens", organizer=ORGANIZER.peer_id.text)
    return RunFile(run=run, pipeline=PipelineSection(stages=stages), access=access)


def token(peer: PeerId, *roles: str, number: int = 1, by: Keypair = ORGANIZER, **changes: Any) -> bytes:
    """A sealed token for `peer`, valid for an hour of the simulated world unless `changes` say otherwise."""
    told: dict[str, Any] = {"run": "tiny", "name": "Ann", "issued": NOW, "expires": NOW + 3600, **changes}
    body = Token(number.to_bytes(8, "big"), peer.public_key, roles=normal_roles(roles or ("stage", "trainer")), **told)
    return seal(body, by)


def revoked(number: int, *tokens: int, by: Keypair = ORGANIZER) -> bytes:
    """A sealed list of these tokens, by the `number` they were made with."""
    return seal(Revoked(number, [one.to_bytes(8, "big") for one in sorted(tokens)]), by)


@dataclass
class Papers:
    """Files of a peer, as a test writes them."""

    mine: bytes = b""
    lists: list[bytes] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)

    async def token(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.mine

    async def revoked(self) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [*self.lists, *self.kept[-1:]]

    async def keep(self, revoked: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.kept.append(revoked)


class Organizer:
    """The organizer of a run with tokens, for the nodes of a world; each has its token, and may be given another."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._papers: dict[str, Papers] = {}
        self._peers: dict[str, PeerId] = {}
        self._numbers: dict[str, int] = {}  # of the tokens that count
        self._issued, self._lists = 0, 0
        self._revoked: set[int] = set()

    def gate(self, node: Node, stack: PeerStack) -> Access:
        """The gate of a node's calls, with the papers that its owner has on this disk."""
        self._peers[node.name] = node.id
        papers = self._papers.setdefault(node.name, Papers())
        if node.name not in self._numbers:
            self.renew(node.name)
        access = Access(self._run, stack.host, stack.rpc, node.clock, papers)
        stack.rpc.guard(access)
        return access

    def withhold(self, name: str) -> None:
        """Give a node none before it is renewed."""
        self._numbers[name], self._papers[name] = 0, Papers()

    def renew(self, name: str) -> None:
        """Give a node a token that counts; it lies there until the node looks again."""
        self._issued += 1
        self._numbers[name] = self._issued
        mine = token(self._peers[name], *ROLES, number=self._issued, run=self._run.run)
        self._papers[name].mine = mine

    def has_token(self, name: str) -> bool:
        """False for a node that has not come up yet."""
        return name in self._numbers

    def revoke(self, name: str, told: str) -> None:
        """Take a node's token back; the list is given to one other."""
        self._revoked.add(self._numbers[name])
        self._lists += 1
        self._papers[told].lists = [revoked(self._lists, *self._revoked)]


class Member:
    """One peer: its parts, and a record of the calls to it."""

    def __init__(self, node: Node, papers: Papers, run: RunFile | None) -> None:
        self.node, self.papers = node, papers
        self.id = node.id
        stack = stack_on(node)
        self.host, self.rpc, self.dht = stack.host, stack.rpc, stack.dht
        self.access: Access | None = None
        self.called: list[tuple[PeerId, str]] = []
        if run is not None:
            self.access = Access(run, self.host, self.rpc, node.clock, papers)
            self.rpc.guard(self.access)
        for method in SERVED:
            limits = declared(frames=2, frame_bytes=1 << 20)
            self.rpc.serve(method, Empty, functools.partial(self._answer, method), declared=limits)

    async def _answer(self, method: str, call: Incoming[Empty]) -> Answer[Empty]:
        await trio.lowlevel.checkpoint()
        self.called.append((call.peer, method))
        return Answer(Empty())

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.host.run, [self.node.addr])
            await nursery.start(self.rpc.run)
            if self.access is not None:
                await nursery.start(self.access.run)
                nursery.start_soon(self.access.refresh, self.dht)
            await nursery.start(self.dht.run, list(self.node.world.bootstrap))
            task_status.started()

    async def ask(self, other: Member, method: str = "other/1/ask") -> None:
        """One call; what it raises leaves."""
        self.host.learn(other.id, [other.node.full_addr])
        await self.rpc.call(other.id, method, Empty(), Empty, timeout_s=20)


class Club:
    """Members by name, in one world. The first one started is everybody's way in."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def start(
        self,
        papers: Callable[[PeerId], Papers],
        run: RunFile | None = None,
        *,
        keypair: Keypair | None = None,
        skew_s: float = 0.0,
    ) -> Member:
        """A peer with the papers that `papers(its id)` gives it; without `run`, one that knows no tokens."""
        made: list[Member] = []

        async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
            node.keypair = keypair or node.keypair
            made.append(Member(node, papers(node.id), run))
            await made[-1].run(task_status=task_status)

        node = await self.world.start(program=program, skew_s=skew_s)
        if not self.world.bootstrap:
            self.world.bootstrap.append(node.full_addr)
        return made[-1]

    async def member(self, *roles: str, number: int = 1, run: RunFile | None = None, **changes: Any) -> Member:
        """A peer with a token of its own."""
        return await self.start(
            lambda peer: Papers(token(peer, *roles, number=number, **changes)), run if run is not None else run_file()
        )


async def nothing(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    """A program that ends at once."""
    task_status.started()


@asynccontextmanager
async def club() -> AsyncIterator[Club]:
    """A world without members."""
    async with World(1, nothing).running() as world:
        yield Club(world)


in_club = within(club)
