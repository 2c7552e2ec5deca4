"""Hosts share a grid of experts, announce what they have, and of two hosts of one expert exactly one goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from peerd.core.errors import ConfigError, LocalError, Refused
from peerd.core.ids import PeerId
from peerd.experts.hosting.host import ExpertHost, OwnExpert, Told
from peerd.experts.rules.claims import last_prefixes
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.log import EventLog
from peerd.messages.experts import Announced, Forward, Name, Output
from peerd.rpc.rpc import Rpc
from peerd.run.grid import Uid, coordinates_in
from peerd.run.runfile import LimitsSection, RunFile, fingerprint
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import WIDTH, FakeExpert, frame
from tests.worlds.machines.fakehost import FakeHost, FakeNet, TrioClock, fake_net
from tests.worlds.roles.contexts import role_context
from tests.worlds.roles.inline_worker import InlineWorker

X = Uid(0, (1, 2))
PERIOD_S = 8.0


@dataclass
class ToldClaim:
    host: PeerId
    generation: int


@dataclass
class Board:
    """What all hosts have announced; a host that is cut off sees its own part of it alone."""

    records: dict[PeerId, dict[Uid, Announced]] = field(default_factory=dict)
    cut_off: set[PeerId] = field(default_factory=set)

    def seen_by(self, me: PeerId) -> Iterable[tuple[PeerId, Announced]]:
        for peer, records in self.records.items():
            if peer == me or not {peer, me} & self.cut_off:
                yield from ((peer, record) for record in records.values())


@dataclass
class View:
    """The board as one host uses it."""

    board: Board
    me: PeerId
    reads: int = 0

    async def below(self, prefixes: Iterable[Uid]) -> Told:
        return await self.read(prefixes)

    async def read(self, prefixes: Iterable[Uid]) -> Told:
        await trio.sleep(0.1)
        self.reads += 1
        found: dict[Uid, dict[int, list[ToldClaim]]] = {prefix: {} for prefix in prefixes}
        for peer, record in self.board.seen_by(self.me):
            if record.prefix.uid in found:
                for coordinate, generation in zip(coordinates_in(record.below), record.generations, strict=True):
                    found[record.prefix.uid].setdefault(coordinate, []).append(ToldClaim(peer, generation))
        return found

    async def announce(self, records: Iterable[Announced]) -> None:
        await trio.sleep(0.1)
        self.board.records[self.me] = {record.prefix.uid: record for record in records}

    async def add(self, records: Iterable[Announced]) -> None:
        await trio.sleep(0.1)
        self.board.records.setdefault(self.me, {}).update({record.prefix.uid: record for record in records})

    async def withdraw(self) -> None:
        self.board.records.pop(self.me, None)


@dataclass
class Peer:
    """One host."""

    fake: FakeHost
    rpc: Rpc
    host: ExpertHost
    log: EventLog
    scope: trio.CancelScope
    clock: TrioClock

    def told(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.log.recent() if event["name"] == name]


class SkewedClock(TrioClock):
    """A clock whose wall time is off, and whose random streams are its own."""

    def __init__(self, name: str, skew_s: float) -> None:
        self._name, self._skew_s = name, skew_s

    def wall(self) -> float:
        return super().wall() + self._skew_s

    def rng(self, purpose: str) -> Any:
        return super().rng(f"{self._name}/{purpose}")


@dataclass
class Scene:
    """Hosts of one run."""

    net: FakeNet
    folder: Path
    run: RunFile
    board: Board = field(default_factory=Board)

    async def start(
        self, name: str, limit: int = 0, fits: int = 0, keeper: Any = None, skew_s: float = 0.0, wait: bool = True
    ) -> Peer:
        fake, clock = self.net.host(name), SkewedClock(name, skew_s)
        rpc, worker, log = Rpc(fake, clock), InlineWorker(), EventLog(clock)
        await self.net.nursery.start(rpc.run)
        run = msgspec.structs.replace(self.run, limits=LimitsSection(experts=limit))
        stack: Any = SimpleNamespace(host=fake, rpc=rpc, dht=None, clock=clock)
        ctx = role_context(stack, run, self.folder, lambda device: worker, log)
        host = ExpertHost(ctx, View(self.board, fake.id), FakeExpert, lambda: fits)
        keeper = keeper or FakeKeeper()
        keeper.host = host
        host.keepers.append(keeper)
        scope = trio.CancelScope()

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await host.run(task_status=task_status)

        await self.net.nursery.start(serve)
        return Peer(fake, rpc, host, log, scope, clock)


@asynccontextmanager
async def scene(folder: Path, **experts: Any) -> AsyncIterator[Scene]:
    with trio.fail_after(10_000):
        async with fake_net() as net:
            yield Scene(net, folder, expert_run(width=WIDTH, **{"announce_s": PERIOD_S, "layers": 2} | experts))


@dataclass
class Recalled:
    """A checkpoint on the own disk."""

    generation: int
    state: bytes


@dataclass
class FakeKeeper:
    """Checkpoints from before, and orphans. The higher generation owns an expert here, then the higher peer id."""

    before: Mapping[Uid, Recalled] = field(default_factory=dict)
    kept: Collection[Uid] = ()
    about_to: Collection[Uid] = ()
    left: list[set[Uid]] = field(default_factory=list)
    host: ExpertHost | None = None

    async def others(self, mine: Mapping[Uid, int]) -> Mapping[Uid, SeenClaim]:
        assert self.host is not None
        told, found = await self.host._board.read(last_prefixes(mine)), dict[Uid, SeenClaim]()
        for uid, generation in mine.items():
            claims = told[uid.prefix].get(uid.at[-1], ())
            highest = max(claims, key=lambda claim: (claim.generation, claim.host.text), default=None)
            if highest and (highest.generation, highest.host.text) > (generation, self.host._me):
                found[uid] = SeenClaim(highest.host, highest.generation, 0, 0.0)
        return found

    async def recall(self) -> Mapping[Uid, OwnExpert]:
        mine = {uid: recalled.generation for uid, recalled in self.before.items()}
        others = await self.others(mine)
        return {uid: OwnExpert(generation, others.get(uid)) for uid, generation in mine.items()}

    async def state(self, uid: Uid) -> bytes:
        return self.before[uid].state

    async def orphans(self, uids: Collection[Uid]) -> Collection[Uid]:
        return [uid for uid in uids if uid in self.kept]

    def taking(self) -> Collection[Uid]:
        return self.about_to

    async def run(self, host: ExpertHost) -> None:
        """Give up what others have a higher claim to."""
        while True:
            await trio.sleep(PERIOD_S / 2)
            mine = {uid: hosted.generation for uid, hosted in host.experts.items()}
            for uid in await self.others(mine):
                await host.drop(uid, "another has a higher claim")

    async def hand_over(self, host: ExpertHost) -> None:
        self.handed_over = sorted(host.experts)

    async def leave(self, host: ExpertHost) -> None:
        self.left.append(set(host.experts))


def state(uid: Uid, version: int) -> bytes:
    return FakeExpert(uid, version).snapshot()


async def test_hosts_that_come_together_share_the_grid_and_nobody_has_an_experts_twin(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        peers = [await s.start(f"host {i}", limit=16) for i in range(3)]
        await trio.sleep(6 * PERIOD_S)
        hosted = [uid for peer in peers for uid in peer.host.experts]
        assert len(hosted) == len(set(hosted)) == 32
        assert min(len(peer.host.experts) for peer in peers) >= 8
        assert max(len(peer.host.experts) for peer in peers) <= 16
        said = {prefix for records in s.board.records.values() for prefix in records}
        assert said >= {Uid(layer, (row,)) for layer in range(2) for row in range(4)}


async def test_a_host_takes_what_its_memory_holds_where_the_user_names_no_number(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        peer = await s.start("host", fits=8)
        assert len(peer.host.experts) == 2  # a part at a time
        await trio.sleep(6 * PERIOD_S)
        assert len(peer.host.experts) == 7  # one place is for orphans
        assert (peer.host.capacity, peer.host.room()) == (8, 1)
        whole = await s.start("whole", fits=100)
        await trio.sleep(6 * PERIOD_S)
        assert (whole.host.capacity, len(whole.host.experts)) == (32, 25)


async def test_a_host_that_announced_an_expert_serves_it(tmp_path: Path, autojump_clock: object) -> None:
    async with scene(tmp_path) as s:
        peer, other = await s.start("host", limit=1), await s.start("other", limit=1)
        (uid,) = peer.host.experts
        body = Forward(fingerprint(peer.host._run), Name.of(uid))
        call = other.rpc.call(peer.fake.id, "expert/1/forward", body, Output, frames=[frame(2.0)], timeout_s=5)
        assert (await call).body.version == 0
        with pytest.raises(Refused, match="no room"):
            await peer.host.adopt(X if uid != X else Uid(1, (0, 0)), 1, None)
        with pytest.raises(LocalError):
            await peer.host.adopt(Uid(0, (9, 9)), 1, None)


async def test_what_was_dropped_is_refused_with_the_reason_and_announced_no_more(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        one, other = await s.start("one", limit=1, keeper=FakeKeeper(before={X: Recalled(0, state(X, 70))})), None
        await trio.sleep(1)
        assert X in one.host.experts
        await one.host.drop(X, "another has a higher claim")
        other = await s.start("other", limit=1)
        body = Forward(fingerprint(one.host._run), Name.of(X))
        with pytest.raises(Refused, match="any more: another has a higher claim"):
            await other.rpc.call(one.fake.id, "expert/1/forward", body, Output, frames=[frame(2.0)], timeout_s=5)
        await trio.sleep(1)
        assert X.prefix not in s.board.records[one.fake.id]


async def test_an_expert_that_came_can_be_read_of_when_its_host_has_told(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        every = {Uid(layer, (row, column)) for layer in range(2) for row in range(4) for column in range(4)}
        peer = await s.start("host", limit=2, keeper=FakeKeeper(kept=every))
        assert not s.board.records[peer.fake.id]
        await peer.host.adopt(X, 3, state(X, 20))
        await peer.host.tell(X)
        assert sorted(s.board.records[peer.fake.id]) == [X.prefix]
        assert s.board.records[peer.fake.id][X.prefix].generations == [3]
        other = Uid(1, (2, 2))
        await peer.host.adopt(other, 1, state(other, 4))
        await peer.host.tell(other)
        assert X.prefix in s.board.records[peer.fake.id]  # what stood there stands
        await peer.host.leave()
        await peer.host.tell(X)
        assert peer.fake.id not in s.board.records


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
async def test_a_clock_that_is_off_by_a_minute_decides_nothing(
    skew_s: float, tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        peers = [await s.start("right", limit=32), await s.start("wrong", limit=32, skew_s=skew_s)]
        await trio.sleep(8 * PERIOD_S)
        hosted = [uid for peer in peers for uid in peer.host.experts]
        assert len(hosted) == len(set(hosted)) == 32
        uid = next(iter(peers[1].host.experts))
        body = Forward(fingerprint(peers[1].host._run), Name.of(uid))
        call = peers[0].rpc.call(peers[1].fake.id, "expert/1/forward", body, Output, frames=[frame(2.0)], timeout_s=5)
        assert 0.0 <= (await call).body.waited_s < 1.0


async def test_a_host_goes_on_with_its_own_experts_unless_another_has_them(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        damaged, mine = Uid(1, (0, 0)), Uid(1, (3, 3))
        adopter = await s.start("adopter", limit=1, keeper=FakeKeeper(before={X: Recalled(4, state(X, 50))}))
        before = {X: Recalled(3, state(X, 40)), mine: Recalled(2, state(mine, 7)), damaged: Recalled(0, state(X, 1))}
        back = await s.start("back", limit=2, keeper=FakeKeeper(before=before))
        assert X not in back.host.experts
        hosted = back.host.experts[mine]
        assert (hosted.generation, hosted.model.version) == (2, 7)
        (left,) = back.told("expert.left_to")
        assert (left["expert"], left["to"], left["generation"]) == (str(X), adopter.fake.id.text, 4)
        (lost,) = back.told("expert.not_loaded")
        assert (lost["expert"], "a state of 0.1.2" in lost["why"]) == (str(damaged), True)


async def test_an_expert_with_a_checkpoint_somewhere_is_never_begun_anew(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        every = {Uid(layer, (row, column)) for layer in range(2) for row in range(4) for column in range(4)}
        keeper = FakeKeeper(kept=every - {X, Uid(1, (0, 0))}, about_to=[Uid(1, (0, 0))])
        peer = await s.start("host", limit=32, keeper=keeper)
        await trio.sleep(5 * PERIOD_S)
        assert list(peer.host.experts) == [X]
        await peer.host.adopt(Uid(1, (1, 1)), 3, state(Uid(1, (1, 1)), 20))
        (event,) = peer.told("expert.taken")
        assert (event["expert"], event["generation"], event["version"]) == ("1.1.1", 3, 20)
        with pytest.raises(Refused, match="hosted here already"):
            await peer.host.adopt(Uid(1, (1, 1)), 4, None)
        with pytest.raises(ValueError, match="a state of"):
            await peer.host.adopt(Uid(1, (1, 2)), 4, state(X, 1))
        assert Uid(1, (1, 2)) not in peer.host.experts
        await trio.sleep(1.0)
        assert s.board.records[peer.fake.id][Uid(1, (1,))].generations == [3]
        assert peer.host.status()["adopted"] == 1


async def test_a_host_that_leaves_withdraws_what_it_announced_and_hands_in_the_rest(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with scene(tmp_path) as s:
        keeper = FakeKeeper()
        peer = await s.start("host", limit=2, keeper=keeper)
        await peer.host.leave()
        await trio.sleep(3 * PERIOD_S)
        assert peer.fake.id not in s.board.records
        assert keeper.left == [set(peer.host.experts)]
        assert peer.host.room() == 0


async def test_a_host_whose_memory_holds_no_expert_says_so(tmp_path: Path, autojump_clock: object) -> None:
    async with scene(tmp_path) as s:
        with pytest.raises((ConfigError, ExceptionGroup)) as caught:
            await s.start("host", fits=0)
        assert "no expert of this run fits into this machine's memory" in str(caught.value)
