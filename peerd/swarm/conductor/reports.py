"""Reports to the conductor and its answers: `swarm/6/member`, `trainer`, `leave`, `members` and `who`.

A report is the state of a stage peer, helper or trainer as it describes it; the machine gets it as events. If there is
no news for its sender, a report waits here until there is some (long polling), so that news needs no calls of its own.
A peer that does not conduct refuses a report, and names the peer that does. Hostile input: any body. A report affects
only its sender's posts, and names of other peers in it mean their posts at the sender's stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import trio

from peerd.core.errors import Refused, not_conducting, other_run_file
from peerd.core.ids import PeerId
from peerd.core.limits import POSTS
from peerd.messages.encoding import Empty
from peerd.messages.swarm import (
    Conducts,
    Done,
    Leave,
    ListMembers,
    Mbs,
    MemberAnswer,
    MembersListed,
    MemberSync,
    Seqs,
    TrainerAnswer,
    TrainerSync,
    WhoConducts,
)
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.conductor.duty import Duty
from peerd.swarm.conductor.machine_driver import MEMBERS, MachineDriver
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.events import MemberHello, TrainerReport
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import post_name
from peerd.swarm.steps.conductor import Conductor

_SMALL: Final = Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0)
_LARGE: Final = replace(_SMALL, body_bytes=1 << 20, calls_per_peer=8, calls=8192)
DECLARED: Final = {
    "swarm/6/member": _LARGE,
    "swarm/6/trainer": _LARGE,
    "swarm/6/leave": _SMALL,
    "swarm/6/members": _SMALL,
    "swarm/6/who": _SMALL,
}
_PUT_ASIDE_S = 1.0  # delay of the answer to a member that the machine has excluded
_NO_SEQS = Seqs()


class Reports:
    """Serves `swarm/6`. `run`: the run's fingerprint."""

    def __init__(self, run: bytes, rpc: Rpc, following: ConductorClient, duty: Duty, driver: MachineDriver) -> None:
        self._run, self._rpc, self._following = run, rpc, following
        self._duty, self._driver = duty, driver

    def serve(self) -> None:
        """Answer calls from now on."""
        rpc, declared = self._rpc, DECLARED
        rpc.serve("swarm/6/member", MemberSync, self._member, declared=declared["swarm/6/member"])
        rpc.serve("swarm/6/trainer", TrainerSync, self._trainer, declared=declared["swarm/6/trainer"])
        rpc.serve("swarm/6/leave", Leave, self._leave, declared=declared["swarm/6/leave"])
        rpc.serve("swarm/6/members", ListMembers, self._list, declared=declared["swarm/6/members"])
        rpc.serve("swarm/6/who", WhoConducts, self._who, declared=declared["swarm/6/who"])

    def unserve(self) -> None:
        """Stop answering calls."""
        self._rpc.unserve("swarm/6")

    def _check_run(self, fingerprint: bytes) -> None:
        if fingerprint != self._run:
            raise other_run_file()

    # --- members and helpers ----------------------------------------------------------------------------------

    async def _member(self, call: Incoming[MemberSync]) -> Answer[MemberAnswer]:
        body, name = call.body, post_name(call.peer.text, call.body.stage)
        self._check_run(body.run)
        tenure = self._duty.act(body.term, call.peer)
        machine = tenure.machine
        helps = body.line is not None and body.line.mode == "aux"
        self._check_post(machine, call.peer.text, body.stage, helps=helps)
        self._driver.report_came(name)
        if helps:
            self._driver.helpers.add(name)
            self._take_line(machine, name, body)
        else:
            self._take_member(machine, call.peer, name, body)
        machine.saved(name, body.saved)
        if body.load is not None:
            machine.rebalancing.told(trio.current_time(), name, body.load)
        resend = not helps and not (machine.is_member(name, body.session) and machine.knows(name, body.position))
        # An excluded member that has just reported in full would otherwise do so again at once, and repeatedly.
        wait_s = body.wait_s if not resend else _PUT_ASIDE_S if body.held is not None else 0.0
        await self._driver.wait_for_news(MEMBERS, lambda: machine.members_version != body.seen, tenure, wait_s)
        self._still(tenure, name)
        resend = not helps and (resend or not machine.is_member(name, body.session))
        return Answer(self._to_member(tenure, name, body, resend=resend))

    def _check_post(self, machine: Conductor, peer: str, stage: int, *, helps: bool) -> None:
        """Refuse a stage that the run does not have, and more stages than one identity may serve.

        A peer helps one stage: a report from another stage ends its earlier help. A post that helped and now serves, or
        the reverse, is a new post.
        """
        stages, heard, helpers, post = machine.roster.stages, self._driver.heard, self._driver.helpers, post_name
        if stage not in stages:
            raise Refused(f"the run has {len(stages)} stages, and no stage {stage}")
        name = post(peer, stage)
        if name in heard and (name in helpers) == helps:
            return
        others = [post(peer, other) for other in stages if other != stage and post(peer, other) in heard]
        if not helps and sum(other not in helpers for other in others) >= POSTS:
            raise Refused(f"one peer serves {POSTS} stages at most, and helps one")
        self._driver.gone([name, *(other for other in others if helps and other in helpers)])

    def _take_member(self, machine: Conductor, peer: PeerId, name: str, body: MemberSync) -> None:
        gate = self._rpc.gate
        if gate is not None and not gate.allows(peer, "stage"):
            raise Refused("your token does not allow stage")
        self._take_line(machine, name, body)
        if body.stage == 0:
            self._following.note_stage0(peer, body.since, machine.roster.lines.is_client(name))
        if body.held is not None:
            self._driver.feed(_hello(name, body, body.held))

    def _take_line(self, machine: Conductor, name: str, body: MemberSync) -> None:
        if body.line is None:
            return
        version = machine.members_version
        machine.said_of_line(trio.current_time(), name, body.stage, body.line, tuple(body.addrs))
        if machine.members_version != version:
            self._driver.wake_waiting()

    def _to_member(self, tenure: Tenure, name: str, body: MemberSync, *, resend: bool) -> MemberAnswer:
        machine = tenure.machine
        return MemberAnswer(
            term=tenure.term,
            current=machine.settled,
            complete=machine.phase is Phase.COMPLETE,
            waits_for=tenure.post_waits_for(name),
            resend=resend,
            version=machine.members_version,
            members=tenure.members_since(body.listed),
            forecast=tenure.forecast(),
            lost=machine.lost,
            wanted=machine.search.wanted() if machine.lost else [],
            apart=machine.search.is_apart(body.position),
            rests=machine.resting.of(name),
            spared=machine.spares(trio.current_time(), name),
        )

    # --- trainers ---------------------------------------------------------------------------------------------

    async def _trainer(self, call: Incoming[TrainerSync]) -> Answer[TrainerAnswer]:
        body, name = call.body, call.peer.text
        self._check_run(body.run)
        tenure = self._duty.act(body.term, call.peer)
        machine = tenure.machine
        self._driver.report_came(name)
        taken = machine.takes(body.step)
        begun, done = body.open.numbers(), tuple(map(_held_by_posts, body.done))
        self._driver.feed(TrainerReport(name, body.step, begun, done, body.early.numbers(), body.unknown.numbers()))
        news = lambda: machine.version(name) != body.seen  # noqa: E731
        await self._driver.wait_for_news(name, news, tenure, body.wait_s)
        self._still(tenure, name)
        return Answer(self._to_trainer(tenure, name, body, taken=taken))

    def _to_trainer(self, tenure: Tenure, name: str, body: TrainerSync, *, taken: bool) -> TrainerAnswer:
        machine = tenure.machine
        step = machine.current.step if machine.current is not None else body.step
        grant = tenure.grant(step, name, machine.admitted(name))
        grant_early = tenure.grant(step + 1, name, machine.admitted(name, early=True), early=True)
        return TrainerAnswer(
            term=tenure.term,
            step=step,
            taken=taken,
            admitted=grant.seqs if grant is not None else _NO_SEQS,
            redo=machine.redo(name),
            counted=_seqs(machine.counted(name, body.step)),
            evaluate=tenure.evaluation_grant(step, name) if machine.current and machine.evaluates(name) else None,
            complete=machine.phase is Phase.COMPLETE,
            waits_for=tenure.trainer_waits_for(name),
            version=machine.version(name),
            members=tenure.members_since(body.seen_members),
            forecast=tenure.forecast(),
            early=grant_early.seqs if grant_early is not None else _NO_SEQS,
            counted_early=_seqs(machine.counted(name, body.step + 1)),
            grant=grant,
            grant_early=grant_early,
        )

    def _still(self, tenure: Tenure, name: str) -> None:
        """Check a report that has waited: Refused if our tenure has ended. Otherwise its sender counts as alive."""
        if self._driver.tenure is not tenure:
            raise not_conducting(" any more")
        self._driver.still_heard(name)

    # --- others -----------------------------------------------------------------------------------------------

    async def _leave(self, call: Incoming[Leave]) -> Answer[Empty]:
        """A peer leaves a stage, or stops training."""
        self._check_run(call.body.run)
        name = call.peer.text if call.body.stage is None else post_name(call.peer.text, call.body.stage)
        self._driver.gone([name])
        return Answer(Empty())

    async def _list(self, call: Incoming[ListMembers]) -> Answer[MembersListed]:
        """The member list, for a peer that is about to choose a stage. Refused if this peer does not conduct."""
        self._check_run(call.body.run)
        tenure = self._driver.tenure
        if tenure is None:
            raise not_conducting()
        machine = tenure.machine
        return Answer(
            MembersListed(
                tenure.members_since(call.body.listed), machine.roster.held_stages(), machine.rebalancing.capacity()
            )
        )

    async def _who(self, call: Incoming[WhoConducts]) -> Answer[Conducts]:
        """Answer with the term and position if this peer conducts; refuse otherwise."""
        self._check_run(call.body.run)
        if self._driver.tenure is None:
            raise not_conducting()
        machine = self._driver.machine
        return Answer(Conducts(self._duty.term, machine.current if machine is not None else None))


def _hello(name: str, body: MemberSync, held: Mbs) -> MemberHello:
    """A member's full report as an event of the machine."""
    return MemberHello(
        peer=name,
        stage=body.stage,
        session=body.session,
        position=body.position,
        prepared=body.prepared,
        saved=tuple(body.saved),
        held=frozenset(held),
        counted=frozenset(body.counted),
        addrs=tuple(body.addrs),
        early=frozenset(body.early),
        since=body.since,
        digest=body.digest,
        seen=tuple(body.witnessed),
    )


def _held_by_posts(done: Done) -> Done:
    """A trainer's report on a finished microbatch, with posts in place of the holders' peer ids."""
    holders = [post_name(peer, stage) if peer else peer for stage, peer in enumerate(done.holders)]
    return Done(done.seq, holders, done.receipts)


def _seqs(numbers: list[int] | None) -> Seqs | None:
    return None if numbers is None else Seqs.of(numbers) if numbers else _NO_SEQS
