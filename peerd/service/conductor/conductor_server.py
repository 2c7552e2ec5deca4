"""The conductor's duty on a stage-0 peer: takes everyone's reports, drives `machine/conductor/conductor`, makes its
calls.

Inactive until somebody reports to it and it is its turn (`Following.duty`); it gives the duty back when a peer conducts
as well that has the better claim (`Rivals`): a term that a report names only makes it look. A report that has nothing
new waits here until something changed. Who lets go of its connection, or is silent for too long, is gone at once. Every
call that is awaited has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import trio

from peerd.core.clock import Clock
from peerd.core.errors import Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import WAITS_CHARS
from peerd.core.messages.encoding import Empty
from peerd.core.messages.proof import has_received
from peerd.core.messages.swarm import (
    Ask,
    Conducts,
    Done,
    Leave,
    LineInfo,
    Mb,
    MemberAnswer,
    MemberInfo,
    MemberNews,
    MemberSync,
    Receipt,
    Seqs,
    TrainerAnswer,
    TrainerSync,
)
from peerd.core.work import Worker
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.conductor.member_list import MemberList
from peerd.machine.conductor.phases import Phase
from peerd.machine.conductor.standstill import Standstill
from peerd.machine.conductor.step_eta import Outlook
from peerd.machine.swarm.events import (
    CancelAttempt,
    Event,
    MemberGone,
    MemberHello,
    Note,
    Origin,
    Output,
    Probe,
    SendMove,
    SendPrepare,
    TrainerGone,
    TrainerReport,
)
from peerd.machine.swarm.posts import peer_of, post_name, short
from peerd.net.host.host import Host, PeerDown
from peerd.service.conductor.conductor_client import Following
from peerd.service.conductor.grants import Granting
from peerd.service.conductor.orders import ConductingConfig, Orders, Reign
from peerd.service.conductor.rivals import Reigning, Rivals, believed, next_term
from peerd.service.rpc.rpc import Answer, Incoming, MethodLimits, Rpc

log = logging.getLogger("peerd.service.conductor.conductor_server")

_SILENT_S = 12.0  # a report comes at least every few seconds
_LOOK_S = 2.0
_REFRESH_S = 10.0  # for the directory, which asks many
_FIRST_LOOK_S = 0.5
_TAKE_OVER_GATHER_S = 0.3
_PUT_ASIDE_S = 1.0  # between two reports of a member that is not heard


class Conducting:
    """Serves `swarm/2/...`; `run` carries the duty."""

    def __init__(self, config: ConductingConfig, rpc: Rpc, host: Host, clock: Clock, following: Following) -> None:
        self._config = config
        self._rpc, self._host, self._clock, self._following = rpc, host, clock, following
        self._machine: Conductor | None = None
        self._term = 0
        self.notes: Callable[[str], None] = log.info
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()  # set, and replaced, with whatever somebody who waits may see
        self._changed_to: tuple[Conductor | None, tuple[int, int]] = None, (0, 0)
        self._fed = trio.Event()  # set, and replaced, with all that may move the next deadline
        self._heard: dict[str, float] = {}
        self._outlook = Outlook()
        self._standstill = Standstill()
        self._listed: MemberList | None = None  # by the machine
        self.orders = Orders(config, rpc)
        self.orders.notes = lambda text: self.notes(text)
        self._granting = Granting(config.fingerprint, host.sign)
        self._rivals = Rivals(config.fingerprint, rpc, host, following)
        self._doubt = trio.Event()  # set, and replaced, when somebody names a later term than ours

    @property
    def solver(self) -> Worker | None:
        """Divides rounds where there are limits between pairs of peers."""
        return self.orders.solver

    @solver.setter
    def solver(self, solver: Worker | None) -> None:
        self.orders.solver = solver

    @property
    def term(self) -> int:
        """The latest term that is believed: the one it acts in, if it acts."""
        return self._term

    @term.setter
    def term(self, heard: int) -> None:
        if self._machine is None:
            self._term = believed(self._term, heard)

    @property
    def acting(self) -> bool:
        """Is this peer the conductor now?"""
        return self._machine is not None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        reports = MethodLimits(body_bytes=1 << 20, calls_per_peer=8, calls=8192)
        self._rpc.serve("swarm/2/member", MemberSync, self._member, limits=reports)
        self._rpc.serve("swarm/2/trainer", TrainerSync, self._trainer, limits=reports)
        self._rpc.serve("swarm/2/leave", Leave, self._leave)
        self._rpc.serve("swarm/2/who", Ask, self._who)
        try:
            with self._host.watch() as events:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._keep_time)
                    nursery.start_soon(self._look_around)
                    nursery.start_soon(self._watch_silence)
                    task_status.started()
                    async for event in events:
                        if isinstance(event, PeerDown):
                            self._gone(name for name in list(self._heard) if peer_of(name) == event.peer.text)
        finally:
            self._rpc.unserve("swarm/2")
            self._machine, self._nursery = None, None

    # --- the duty -----------------------------------------------------------------------------------------------

    def _act(self, seen_term: int) -> Conductor:
        """Take the duty on if it is ours; Refused tells whom to ask instead."""
        if self._machine is not None and seen_term > self._term:
            self._doubt.set()
        if self._machine is None:
            own, duty = self._following.own, self._following.duty()
            if duty != own or self._following.joined_since is None or self._nursery is None:
                raise Refused(f"the conductor is {duty.short}")
            self._term = next_term(self._term, seen_term)
            now = trio.current_time()
            rng = self._clock.rng(f"conductor {own} {self._term} {now}")
            sizes = self._config.conductor
            if self._term > 1:  # a run that is on its way: its members are known, and all but here
                sizes = replace(sizes, gather_s=_TAKE_OVER_GATHER_S)
            origin = Origin(
                own=post_name(own.text, 0),
                established=self._following.established,
                verify=self._is_receipt,
                place_of=self._place,
            )
            self._machine, self._outlook = Conductor(sizes, rng, now, origin), Outlook()
            self._listed = MemberList(self._clock.rng(f"member list {own} {self._term} {now}"))
            self._standstill = Standstill()
            expected = [(p, stage) for p, stage in self._following.posts() if not self._following.suspected(p)]
            self._machine.search.announced_step = self._following.announced_step()
            self._machine.expect(post_name(peer.text, stage) for peer, stage in expected)
            for peer, stage in expected:
                self._nursery.start_soon(self._probe, self._machine, peer, stage)
            self.notes(f"conducts the run from now on (term {self._term})")
        return self._machine

    def _place(self, name: str) -> str:
        """Where a connected peer connects from; else one of its own."""
        link = self._host.links.best(PeerId.parse(peer_of(name)))
        return peer_of(name) if link is None else link.user.place

    def _is_receipt(self, holder: str, stage: int, step: int, mb: Mb, shown: Receipt) -> bool:
        """Has the holder signed this?"""
        try:
            return has_received(PeerId.parse(peer_of(holder)), self._config.fingerprint, stage, step, mb, shown)
        except ValueError:
            return False

    async def _probe(self, machine: Conductor, peer: PeerId, stage: int) -> None:
        """A member that is announced, but cannot be reached, is not waited for."""
        if peer != self._following.own:
            try:
                await self._host.connect(peer)
            except RemoteError:
                machine.unexpect(post_name(peer.text, stage))
                self._wake_waiting()

    def _resign(self, why: str) -> None:
        self.notes(f"hands the conductor's duty on: {why}")
        self._machine = None
        self.orders.cancel_all()
        self._granting.forget()
        self._heard.clear()
        self._wake_waiting()

    @property
    def _gathering(self) -> bool:
        """Has this peer's duty, if it comes, not yet come to a first decision?"""
        return self._machine is None or self._machine.phase is Phase.GATHERING

    async def _look_around(self) -> None:
        """Two peers may conduct for a moment: the later term stays, of one term the earlier in order.

        A run that begins looks more than once before its first step: peers that start together announce themselves
        while each believes that it is alone.
        """
        while True:
            with trio.move_on_after(_FIRST_LOOK_S if self._gathering else _LOOK_S):
                await self._doubt.wait()
                await trio.sleep(_FIRST_LOOK_S)  # who names one term after another makes us look no more often
            self._doubt = trio.Event()
            if self._machine is None:
                continue
            if self._following.directory.only_dials and self._following.duty() != self._following.own:
                self._following.conductor = None
                self._resign("others can be dialed, and this peer cannot")
                continue
            with trio.move_on_after(_REFRESH_S):
                await (self._following.directory.refresh() if self._gathering else self._following.refresh())
            await self._hear_of_steps()
            for peer, term in (await self._rivals.conducting()).items():
                if self._machine is not None and self._rivals.better(self._reigning(self._machine), peer, term):
                    self._following.trust(peer)
                    self._following.conductor = peer
                    self._resign(f"{peer.short} conducts, too, and has the better claim")

    def _reigning(self, machine: Conductor) -> Reigning:
        followers = {peer_of(post.peer) for post in machine.members() if post.since and post.peer in self._heard}
        return Reigning(self._term, followers, machine.course.has_stepped)

    async def _hear_of_steps(self) -> None:
        """What is said of steps elsewhere: that of keepers who can be reached counts for longer."""
        machine, directory = self._machine, self._following.directory
        if machine is None:
            return
        machine.search.announced_step = self._following.announced_step()
        kept = {peer: max(position.step for position in kept) for peer, kept in directory.kept.items()}
        if machine.current is None and kept:
            there = await self._rivals.reachable(kept)
            machine.search.kept_step = max((kept[peer] for peer in there), default=0)

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            self._drop_silent()

    def _drop_silent(self) -> None:
        now = trio.current_time()
        for name in [n for n, heard in self._heard.items() if now - heard > _SILENT_S]:
            self.notes(f"peer {short(name)} is silent")
            self._gone([name])

    def _gone(self, names: Iterable[str]) -> None:
        """Posts and trainers that are there no more."""
        for name in names:
            if self._machine is not None and self._heard.pop(name, None) is not None:
                self._feed(MemberGone(name))
                self._feed(TrainerGone(name))

    async def _probe_member(self, machine: Conductor, name: str) -> None:
        """A member that others cannot reach, and we neither, is gone."""
        try:
            answers = await self._rivals.answers(PeerId.parse(peer_of(name)))
        except ValueError:
            return
        if not answers and machine is self._machine:
            self.notes(f"peer {short(name)} does not answer")
            self._gone([name])

    # --- driving the machine ------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if self._machine is not None:
            self._carry_out(self._machine.handle(trio.current_time(), event))

    def _carry_out(self, outputs: list[Output]) -> None:
        assert self._nursery is not None
        assert self._machine is not None
        machine, step = self._machine, self._machine.current.step if self._machine.current is not None else 0
        reign = Reign(self._term, step, lambda event: self._feed(event) if self._machine is machine else None)
        prepares: list[SendPrepare] = []
        for output in outputs:
            match output:
                case SendPrepare():
                    prepares.append(output)
                case SendMove():
                    self._nursery.start_soon(self.orders.move, output, reign)
                case CancelAttempt(attempt):
                    self.orders.cancel(attempt)
                case Probe(peer):
                    self._nursery.start_soon(self._probe_member, machine, peer)
                case Note(text):
                    self.notes(text)
        self.orders.begin(self._nursery, prepares, reign)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        self._fed.set()
        self._fed = trio.Event()
        news = self._machine, self._machine.newest if self._machine is not None else (0, 0)
        if news != self._changed_to:
            self._changed_to = news
            self._changed.set()
            self._changed = trio.Event()

    async def _keep_time(self) -> None:
        while True:
            machine, now = self._machine, trio.current_time()
            due = machine.wake_at(now) if machine is not None else now + 5.0
            with trio.move_on_at(due):
                await self._fed.wait()
                continue
            if self._machine is not None:
                self._carry_out(self._machine.wake(trio.current_time()))

    # --- reports ------------------------------------------------------------------------------------------------

    def _check_run(self, fingerprint: bytes) -> None:
        if fingerprint != self._config.fingerprint:
            raise Refused("your run file differs from this run's")

    async def _member(self, call: Incoming[MemberSync]) -> Answer[MemberAnswer]:
        body, name = call.body, post_name(call.peer.text, call.body.stage)
        self._check_run(body.run)
        machine = self._act(body.term)
        self._heard[name] = trio.current_time()
        helps = body.line is not None and body.line.mode == "aux"
        gate = self._rpc.gate
        if gate is not None and not helps and not gate.allows(call.peer, "stage"):
            raise Refused("your token does not allow stage")
        if helps and machine.is_member(name, body.session):
            self._feed(MemberGone(name))
        if body.line is not None:
            version = machine.members_version
            line = _with_posts(body.line, body.stage)
            machine.said_of_line(trio.current_time(), name, body.stage, line, tuple(body.addrs))
            if machine.members_version != version:
                self._wake_waiting()
        if body.stage == 0 and not helps:
            self._following.note_stage0(call.peer, body.since, machine.roster.lines.is_client(name))
        if body.held is not None and not helps:
            hello = MemberHello(
                peer=name,
                stage=body.stage,
                session=body.session,
                position=body.position,
                prepared=body.prepared,
                saved=tuple(body.saved),
                held=frozenset(body.held),
                counted=frozenset(body.counted),
                addrs=tuple(body.addrs),
                early=frozenset(body.early),
                since=body.since,
                digest=body.digest,
            )
            self._feed(hello)
        machine.saved(name, body.saved)
        resend = not helps and not (machine.is_member(name, body.session) and machine.knows(name, body.position))
        # Who has just said all, and is put aside, would say it again at once, and again.
        wait_s = body.wait_s if not resend else _PUT_ASIDE_S if body.held is not None else 0.0
        await self._wait_for_news(lambda: machine.members_version != body.seen, machine, wait_s)
        self._still(machine, name)
        return Answer(
            MemberAnswer(
                term=self._term,
                current=machine.settled,
                complete=machine.phase is Phase.COMPLETE,
                waits_for=self._waits_for(machine),
                resend=not helps and (resend or not machine.is_member(name, body.session)),
                version=machine.members_version,
                members=self._members_since(machine, body.listed),
                forecast=self._outlook.look(trio.current_time(), machine),
                lost=machine.lost,
            )
        )

    async def _trainer(self, call: Incoming[TrainerSync]) -> Answer[TrainerAnswer]:
        body, name = call.body, call.peer.text
        self._check_run(body.run)
        machine = self._act(body.term)
        self._heard[name] = trio.current_time()
        taken = machine.takes(body.step)
        begun, done = tuple(body.open), tuple(map(_held_by_posts, body.done))
        self._feed(TrainerReport(name, body.step, begun, done, tuple(body.early), tuple(body.unknown)))
        await self._wait_for_news(lambda: machine.version(name) != body.seen, machine, body.wait_s)
        self._still(machine, name)
        step = machine.current.step if machine.current is not None else body.step
        admitted, early = machine.admitted(name), machine.admitted(name, early=True)
        return Answer(
            TrainerAnswer(
                term=self._term,
                step=step,
                taken=taken,
                admitted=Seqs.of(admitted),
                redo=machine.redo(name),
                counted=_seqs(machine.counted(name, body.step)),
                evaluate=machine.evaluates(name),
                complete=machine.phase is Phase.COMPLETE,
                waits_for=self._waits_for(machine),
                version=machine.version(name),
                members=self._members_since(machine, body.seen_members),
                forecast=self._outlook.look(trio.current_time(), machine),
                early=Seqs.of(early),
                counted_early=_seqs(machine.counted(name, body.step + 1)),
                grant=self._granting.grant(self._term, step, name, admitted),
                grant_early=self._granting.grant(self._term, step + 1, name, early, early=True),
            )
        )

    async def _wait_for_news(self, news: Callable[[], bool], machine: Conductor, wait_s: float) -> None:
        with trio.move_on_after(wait_s):
            while self._machine is machine and not news():
                await self._changed.wait()

    def _members_since(self, machine: Conductor, version: int) -> MemberNews | None:
        assert self._listed is not None
        self._listed.follow(machine.members_version, lambda: list(map(_as_peer, machine.members())))
        return self._listed.news(version)

    def _waits_for(self, machine: Conductor) -> str:
        return (machine.waits_for() or self._standstill.look(trio.current_time(), machine))[:WAITS_CHARS]

    def _still(self, machine: Conductor, name: str) -> None:
        """A report has waited: Refused where we conduct no more; who was lost meanwhile is not heard of by this."""
        if self._machine is not machine:
            raise Refused("this peer has handed the conductor's duty on")
        if name in self._heard:
            self._heard[name] = trio.current_time()

    async def _leave(self, call: Incoming[Leave]) -> Answer[Empty]:
        self._check_run(call.body.run)
        self._gone([call.peer.text if call.body.stage is None else post_name(call.peer.text, call.body.stage)])
        return Answer(Empty())

    async def _who(self, call: Incoming[Ask]) -> Answer[Conducts]:
        """Does this peer conduct? Answers, or refuses."""
        self._check_run(call.body.run)
        if self._machine is None:
            raise Refused("this peer does not conduct")
        return Answer(Conducts(self._term))


def _with_posts(line: LineInfo, stage: int) -> LineInfo:
    """What a peer says of its line, with the posts of `stage` in place of their peers."""
    pairs = [msgspec.structs.replace(pair, peer=post_name(pair.peer, stage)) for pair in line.pairs]
    return msgspec.structs.replace(line, pairs=pairs) if pairs else line


def _held_by_posts(done: Done) -> Done:
    """A report of what is done, with the posts that hold it in place of their peers."""
    holders = [post_name(peer, stage) if peer else peer for stage, peer in enumerate(done.holders)]
    return msgspec.structs.replace(done, holders=holders)


def _as_peer(post: MemberInfo) -> MemberInfo:
    """A post as members are told of it."""
    return msgspec.structs.replace(post, peer=peer_of(post.peer))


def _seqs(numbers: list[int] | None) -> Seqs | None:
    return None if numbers is None else Seqs.of(numbers)
