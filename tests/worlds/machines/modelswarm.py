"""A model of a swarm under one conductor after another, for tests with random happenings.

The model keeps what matters: a member's accumulator is a bag of microbatches, a sum is that of what its group brings,
bags or earlier sums, a position's history is the list of means that led to it. In a delayed run a member has a second
bag, for the step after its own, and nothing that is averaged was computed with parameters older than one step.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import random
from collections import Counter
from dataclasses import dataclass, field

from peerd.messages.swarm import Done, LineInfo, Mb, Position, Redo
from peerd.swarm.events import (
    CancelAttempt,
    ConductorConfig,
    MemberGone,
    MemberHello,
    MoveEnded,
    Origin,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerGone,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor

STAGES, BATCH = 2, 6
Bag = frozenset[tuple[Mb, int]]


@dataclass
class Member:
    name: str
    stage: int
    session: int
    position: Position = START
    bag: Counter[Mb] = field(default_factory=Counter)
    early: Counter[Mb] = field(default_factory=Counter)
    at: dict[Mb, int] = field(default_factory=dict)  # the step of the parameters that each was computed with
    sums: dict[bytes, Counter[Mb]] = field(default_factory=dict)  # by the attempt that gave each
    sent: Counter[Mb] | None = None  # of its last gradient in factors, until the second ones are made
    mean: Counter[Mb] | None = None
    prepared: Position | None = None
    counted: frozenset[Mb] = frozenset()
    digest: bytes = b""  # of the last mean
    saved: list[Position] = field(default_factory=list)
    seen: list[Position] = field(default_factory=list)  # of the swarm, as far as it was there
    known: bool = False


@dataclass
class Trainer:
    name: str
    step: int = 0
    next_seq: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # whose batch each was begun for
    open: dict[int, list[str]] = field(default_factory=dict)  # holders so far
    done: dict[int, list[str]] = field(default_factory=dict)
    unsaid: set[int] = field(default_factory=set)


class Swarm:
    members_of_stage = 2
    group_size = 0
    loss = 0.05  # share of calls, and of answers to them, that is lost
    factors = False  # are gradients summed in factors?
    weighs = False  # does the conductor weigh what each member's gradients are worth?

    def __init__(self, seed: int, delayed: bool = False) -> None:
        self.delayed = delayed
        self.stale = 0  # microbatches averaged that were computed with the parameters before the last step
        self.rng = random.Random(seed)
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.trainers = {name: Trainer(name) for name in ("t1", "t2")}
        self.histories: dict[tuple[int, Position], tuple[Bag, ...]] = {}
        self.serial = 0
        self.conductor = self.new_conductor()
        self.calls: list[SendPrepare | SendMove] = []
        self.rounds: dict[bytes, dict[str, tuple[SendPrepare, Counter[Mb]]]] = {}
        self.clients = True  # some members cannot be reached by others
        self.helped = 0
        self.faulty = False
        self.asleep = ""
        self.overslept = 0
        self.absent = 0  # orders to bring a sum that the member did not have
        for stage in range(STAGES):
            self.histories[stage, START] = ()
            for _ in range(self.members_of_stage):
                self.join(stage)

    def new_conductor(self) -> Conductor:
        config = ConductorConfig(
            stages=STAGES,
            microbatches=BATCH,
            delayed=self.delayed,
            first_save=2,
            gather_s=1.0,
            broken_s=3.0,
            group_size=self.group_size,
            factors=self.factors,
            weighs=self.weighs,
        )
        return Conductor(config, random.Random(self.rng.random()), self.now, self.origin())

    def origin(self) -> Origin:
        """What the peer knows that conducts next: of stage 0 the one that joined first."""
        own = next((m for m in self.members.values() if m.stage == 0), None)
        if own is None:
            return Origin()
        known = {m.peer: m.stage for m in self.conductor.members() if m.ready}
        return Origin(own=own.name, established=known, seen=own.seen)

    def join(self, stage: int) -> None:
        self.serial += 1
        name = f"m{self.serial}"
        self.members[name] = Member(name, stage, self.serial)

    # --- one random happening -------------------------------------------------------------------------------

    def happen(self, faults: bool) -> None:
        self.now += self.rng.choice([0.0, 0.05, 0.3])
        choice = self.rng.random()
        self.faulty = self.faulty or faults
        if faults and choice < 0.02:
            self.kill(self.rng.choice(sorted(self.members)))
        elif faults and choice < 0.03:
            self.replace_conductor()
        elif faults and choice < 0.04:
            trainer = self.rng.choice(sorted(self.trainers))
            self.trainers[trainer] = Trainer(trainer, next_seq=self.trainers[trainer].next_seq + 1000)
            self.tell(TrainerGone(trainer))
        elif choice < 0.3:
            self.sync_member(self.rng.choice(sorted(self.members)))
        elif choice < 0.6:
            self.work(self.trainers[self.rng.choice(sorted(self.trainers))])
        elif choice < 0.9 and self.calls:
            self.deliver(self.calls.pop(self.rng.randrange(len(self.calls))))
        else:
            before = {name: self.seen_by(name) for name in self.trainers}
            self.take(self.conductor.wake(self.now))
            self.check_news(before, "")
        self.conductor.batches.check()
        self.conductor.course.check()

    def say_line(self, name: str, stage: int, mode: str) -> None:
        """Report of a member or a helper on its line; never the same twice."""
        rate = self.rng.choice([0.0, 1e6, 2e7, float("nan"), float("inf")])
        line = LineInfo(mode, rate, rate, 1000, "float32")  # type: ignore[arg-type]
        self.conductor.said_of_line(self.now, name, stage, line)

    def check_split(self, call: SendPrepare) -> None:
        if call.split is None:
            return
        parties = call.split.parties
        assert sorted(p.peer for p in parties if p.mode != "aux") == sorted(call.group)
        assert abs(sum(p.share for p in parties) - 1) < 1e-9
        assert all(p.share == 0 for p in parties if p.mode == "client")
        assert call.peer in {p.peer for p in parties}
        self.helped += any(p.mode == "aux" for p in parties)

    def tell(self, event: object) -> None:
        before = {name: self.seen_by(name) for name in self.trainers}
        self.take(self.conductor.handle(self.now, event))  # type: ignore[arg-type]
        self.check_news(before, event.peer if isinstance(event, TrainerReport) else "")

    def seen_by(self, trainer: str) -> tuple[int, object, set[Redo]]:
        """The version of what a trainer sees, that, and what it has to repeat."""
        told = self.conductor
        places = told.admitted(trainer), told.admitted(trainer, early=True)
        seen = told.current, told.phase is Phase.COMPLETE, *places
        return told.version(trainer), seen, set(told.redo(trainer))

    def check_news(self, before: dict[str, tuple[int, object, set[Redo]]], reporter: str) -> None:
        """Check that every waiting trainer is woken by all that concerns it; the one that has just reported hears of it
        by the answer.
        """
        for name, (version, seen, redo) in before.items():
            now_version, now_seen, now_redo = self.seen_by(name)
            assert now_version >= version
            if name != reporter and (now_seen != seen or now_redo - redo):
                assert now_version > version, f"{name} would wait on at {seen}, {redo}, and now is {now_seen}"

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, SendPrepare | SendMove):
                self.calls.append(output)
                if isinstance(output, SendPrepare):
                    assert not any(peer in self.conductor.resting for peer in output.group)
                    self.check_split(output)
            elif isinstance(output, CancelAttempt):
                self.calls = [c for c in self.calls if not (isinstance(c, SendPrepare) and c.attempt == output.attempt)]

    def kill(self, name: str) -> None:
        """Never so that no position is left that all stages hold: nobody could go on from there."""
        member = self.members.pop(name)
        members = [m for m in self.members.values() if self.is_believed(m)]
        reach = [{p for m in members if m.stage == s for p in (m.position, *m.saved)} for s in range(STAGES)]
        if not set.intersection(*reach) - {START} and any(p.step > 0 for r in reach for p in r):
            self.members[name] = member
            return
        self.tell(MemberGone(name))
        if self.rng.random() < 0.1:
            self.tell(MemberGone(f"helper {member.stage}"))
        self.join(member.stage)

    def is_believed(self, m: Member) -> bool:
        """True when a conductor would take the member's word for what it holds."""
        return True

    def replace_conductor(self) -> None:
        self.conductor, self.calls = self.new_conductor(), []
        self.conductor.expect(self.members)
        for member in self.members.values():
            member.known = False
        for trainer in self.trainers.values():
            trainer.unsaid = set(trainer.done)

    def sync_member(self, name: str) -> None:
        m, current = self.members[name], self.conductor.settled
        m.known = m.known and self.conductor.is_member(name, m.session)
        if m.known and current is not None and current not in m.seen:
            m.seen.append(current)
        if m.known and current is not None and m.position != current and self.conductor.resting.of(name) is None:
            self.download(m, current)
        self.conductor.saved(name, m.saved)
        self.say_line(name, m.stage, "client" if self.clients and m.session % 4 == 0 else "node")
        self.say_line(f"helper {m.stage}", m.stage, "aux")
        if not m.known:
            m.known = True
            hello = MemberHello(
                name,
                m.stage,
                m.session,
                m.position,
                m.prepared,
                tuple(m.saved),
                frozenset(m.bag),
                m.counted,
                (),
                frozenset(m.early),
                digest=m.digest,
                seen=tuple(m.seen[-16:]),
            )
            self.tell(hello)

    def download(self, m: Member, current: Position) -> None:
        donors = [d for d in self.members.values() if d.stage == m.stage and d.position == current]
        if donors:
            m.position, m.bag, m.mean, m.prepared, m.counted = current, Counter(), None, None, frozenset()
            m.early = Counter()
            m.known = False

    # --- trainers -------------------------------------------------------------------------------------------

    def work(self, t: Trainer) -> None:
        current = self.conductor.current
        if current is None or t.name == self.asleep:
            return
        if current.step != t.step:
            self.check_counted(t, current)
            kept = {seq for seq, step in t.steps.items() if step == t.step + 1 == current.step}
            t.step, t.steps = current.step, dict.fromkeys(kept, current.step)
            t.open = {seq: holders for seq, holders in t.open.items() if seq in kept}
            t.done = {seq: holders for seq, holders in t.done.items() if seq in kept}
            t.unsaid &= kept
        while len(t.open) < 3:
            t.open[t.next_seq] = [""] * STAGES
            t.next_seq += 1
        places = dict.fromkeys(self.conductor.admitted(t.name), t.step)
        places |= dict.fromkeys(self.conductor.admitted(t.name, early=True), t.step + 1)
        assert self.delayed or t.step + 1 not in places.values()
        for seq in [s for s in t.open if s in places]:
            if t.steps.setdefault(seq, places[seq]) != places[seq]:
                del t.open[seq], t.steps[seq]  # begun for another step: its samples get another number
            elif self.rng.random() < 0.5:
                self.advance(t, seq)
        orders = self.conductor.redo(t.name)
        unknown = tuple(redo.seq for redo in orders if redo.seq not in t.done and redo.seq not in t.open)
        for redo in orders:
            if redo.seq in t.done and self.rng.random() < 0.5:
                self.accumulate(t, redo.seq, redo.stage, t.done[redo.seq])
                t.unsaid.add(redo.seq)
        taken = self.conductor.takes(t.step)
        done = tuple(self.done(t, seq) for seq in sorted(t.unsaid))
        early = tuple(seq for seq, step in t.steps.items() if step == t.step + 1)
        self.tell(TrainerReport(t.name, t.step, tuple(t.open), done, early, unknown))
        if taken:
            t.unsaid.clear()

    def done(self, t: Trainer, seq: int) -> Done:
        """A trainer's report of a microbatch that it has finished."""
        return Done(seq, list(t.done[seq]))

    def check_counted(self, t: Trainer, current: Position) -> None:
        """Check what a trainer hears that did not hear how its step ended."""
        told = self.conductor.counted(t.name, t.step)
        if current.step <= t.step:
            assert told == []
            return
        history = next((h for s in range(STAGES) if (h := self.histories.get((s, current))) is not None), None)
        if history is None:  # no stage has taken the commit: there is no way to this position any more
            return
        counted = sorted(mb.seq for mb, _ in history[t.step] if mb.trainer == t.name)
        assert told is None or set(told) <= set(counted)
        if not self.faulty:
            assert told == counted
            self.overslept += t.step + 1 < current.step

    def advance(self, t: Trainer, seq: int) -> None:
        holders = t.open[seq]
        stage = max(s for s in range(STAGES) if not holders[s])
        self.accumulate(t, seq, stage, holders)
        if all(holders):
            t.done[seq] = t.open.pop(seq)
            t.unsaid.add(seq)

    def accumulate(self, t: Trainer, seq: int, stage: int, holders: list[str]) -> None:
        step = t.steps[seq]
        ready = [m for m in self.members.values() if m.stage == stage and 0 <= step - m.position.step <= self.delayed]
        if not ready:
            return
        if len(ready) > 1 and self.rng.random() < 0.1:  # the answer is lost: a second peer will do it again
            self.compute(ready.pop(0), Mb(t.name, seq), step)
        member = self.rng.choice(ready)
        self.compute(member, Mb(t.name, seq), step)
        holders[stage] = member.name

    def compute(self, m: Member, mb: Mb, step: int) -> None:
        book = m.bag if step == m.position.step else m.early
        if mb not in book:  # a repeat finds what was kept
            book[mb], m.at[mb] = 1, m.position.step

    # --- calls to members -----------------------------------------------------------------------------------

    def deliver(self, call: SendPrepare | SendMove) -> None:
        m = self.members.get(call.peer)
        lost = self.rng.random() < self.loss
        if isinstance(call, SendPrepare):
            if call.peer not in call.group:  # a helper, or a member that rests
                self.tell(PrepareEnded(call.peer, call.attempt, not lost))
            elif m is None or lost:
                self.tell(PrepareEnded(call.peer, call.attempt, False))
            else:
                self.prepare(m, call)
            return
        if m is not None and not (lost and self.rng.random() < 0.5):
            self.move(m, call)
        if lost and m is not None:
            m.known = False
        self.tell(MoveEnded(call.peer, m.position if m and not lost else None))

    def prepare(self, m: Member, call: SendPrepare) -> None:
        """The sum lies ready when the whole group has sent what it brings; the last answers may still be lost."""
        brought = self.brought(m, call)
        if brought is None:
            return
        group = self.rounds.setdefault(call.attempt, {})
        group[m.name] = call, brought
        if set(group) < set(call.group):
            return
        total = functools.reduce(operator.add, (group[name][1] for name in call.group))
        for name in call.group:
            fails = self.rng.random() < self.loss
            if (other := self.members.get(name)) is None or (fails and self.rng.random() < 0.5):
                self.tell(PrepareEnded(name, call.attempt, False))
                continue
            order = group[name][0]
            alone = set(call.group) - set(call.listeners) == {name}  # others get its copy
            other.sums[call.attempt] = found = total if alone else self.sum_for(name, call, total)
            if order.last:
                other.mean, other.counted = found, frozenset(order.assigned)
                other.prepared = Position(other.position.step + 1, call.lineage)
                other.digest = self.digest(name, found)
            self.tell(PrepareEnded(name, call.attempt, not fails, digest=self.digest(name, found)))

    def brought(self, m: Member, call: SendPrepare) -> Counter[Mb] | None:
        """What a member brings to a sum; None: it cannot, and says so."""
        if m.name in call.listeners or call.brings:
            m.sums = {name: found for name, found in m.sums.items() if name == call.brings}
        if m.name in call.listeners:
            return Counter()
        if call.second:
            found, m.sent = m.sent, None
            assert found is not None, "second factors of what was not sent"
            return found
        if call.brings:
            if call.brings not in m.sums:
                self.absent += 1
                self.tell(PrepareEnded(m.name, call.attempt, False, absent=True))
            return m.sums.get(call.brings)
        m.sums.clear()
        missing = tuple(mb for mb in call.assigned if mb not in m.bag)
        if missing:
            self.tell(PrepareEnded(m.name, call.attempt, False, missing))
            return None
        m.bag = Counter(dict.fromkeys(call.assigned, 1))
        for mb in call.assigned:
            age = m.position.step - m.at[mb]
            assert 0 <= age <= self.delayed, "a gradient of parameters that are too old"
            self.stale += age
        m.sent = m.bag.copy()
        return m.bag.copy()

    def sum_for(self, name: str, call: SendPrepare, total: Counter[Mb]) -> Counter[Mb]:
        """The sum with which a member ends the round."""
        return total

    def digest(self, name: str, mean: Counter[Mb]) -> bytes:
        """The digest that a member states of its sum."""
        return hashlib.sha256(repr(sorted(mean.items())).encode()).digest()

    def move(self, m: Member, call: SendMove) -> None:
        if not call.commit and call.target in (START, *m.saved):
            m.position, m.counted = call.target, frozenset()
            m.bag, m.early, m.mean, m.prepared = Counter(), Counter(), None, None
        if m.prepared != call.target or m.mean is None:
            return
        history = (*self.histories[m.stage, m.position], frozenset(m.mean.items()))
        assert self.histories.setdefault((m.stage, call.target), history) == history, "two pasts of one position"
        m.saved = [p for p in [*m.saved[-2:], m.position] if p != START]
        m.position, m.bag, m.early, m.mean, m.prepared = call.target, m.early, Counter(), None, None
        m.seen.append(call.target)

    def check(self) -> None:
        for (stage, position), history in self.histories.items():
            assert len(history) == position.step
            for bag in history:
                assert len(bag) == BATCH, "a batch is not whole"
                assert all(times == 1 for _, times in bag), "a microbatch counted twice"
            others = [self.histories.get((s, position)) for s in range(STAGES) if s != stage]
            assert all(o is None or o == history for o in others), "stages stepped with different batches"
        for history in self.histories.values():
            seen = [mb for bag in history for mb, _ in bag]
            assert len(seen) == len(set(seen)), "a microbatch counted in two steps"


class RememberingSwarm(Swarm):
    """One whose peers remember, as peerd's do, whom a conductor named as ready and as one that has helped to make a
    step, while the next ones gather.

    The peer that joined first conducts, and no death takes the last state that a member who has helped to make a step
    has: what a newcomer holds proves nothing.
    """

    def __init__(self, seed: int, delayed: bool = False) -> None:
        self.established: dict[str, int] = {}
        super().__init__(seed, delayed)

    def happen(self, faults: bool) -> None:
        super().happen(faults)
        self.note_list()

    def note_list(self) -> None:
        """Remember the members of the conductor's list, as `ConductorClient.note_members` does."""
        members = self.conductor.members()
        ready = {m.peer: m.stage for m in members if m.ready and m.helped}
        stages, here = set(ready.values()), {m.peer for m in members}
        kept = {peer: stage for peer, stage in self.established.items() if stage not in stages or peer in here}
        self.established = kept | ready

    def origin(self) -> Origin:
        own = min((m for m in self.members.values() if m.stage == 0), key=lambda m: m.session, default=None)
        if own is None:
            return Origin()
        return Origin(own=own.name, established=self.established, seen=own.seen)

    def is_believed(self, m: Member) -> bool:
        return m.name in self.established


class WeighingSwarm(RememberingSwarm):
    """One of more members, on lines so different that some of them rest, and others later."""

    members_of_stage = 4
    weighs = True

    def __init__(self, seed: int, delayed: bool = False) -> None:
        self.rested = set[str]()  # members that did
        super().__init__(seed, delayed)

    def happen(self, faults: bool) -> None:
        super().happen(faults)
        self.rested |= {name for name in self.members if self.conductor.resting.of(name) is not None}

    def say_line(self, name: str, stage: int, mode: str) -> None:
        """Report of a line; it changes now and then."""
        rate = 10 ** random.Random(f"{name} {self.now // 60}").uniform(5.0, 8.0)
        line = LineInfo(mode, rate, rate, 10_000_000, "float32")  # type: ignore[arg-type]
        self.conductor.said_of_line(self.now, name, stage, line)
