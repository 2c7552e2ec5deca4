"""Direct hand-over, from the trainer's side: chooses each microbatch's route, signs its ticket, handles the result.

The trainer sends tokens and targets to a peer of the first stage. The stages' peers pass tensors on to each other, and
the answer names the holder of the gradient in each stage. If a hand-over fails, another route is tried. A stage that is
lost later is computed again from the tensors that its neighbours keep, or from the tokens if these are gone too. If a
peer reports its result as not finite, the microbatch takes another route with other peers up to that stage
(`not_finite`). Evaluations go through the trainer (`StageClient`). Hostile input: an answer without valid receipts of
all its stages does not count, and an answer influences nothing but the choice of peers.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.clock import Clock
from peerd.core.errors import NotFiniteHere, Overloaded, ProtocolViolation, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.messages.handover import NotFiniteAt, PassAnswer, PassRequest, Ticket
from peerd.messages.proof import signed_ticket
from peerd.messages.swarm import MemberInfo
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.next_stage import PASS, PASS_TIMEOUT_S, fault_of_hops
from peerd.pipeline.not_finite import NotFiniteJudge
from peerd.pipeline.routes.cheapest_route import CheapestRoute
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.pipeline.routes.planned_routes import PlannedRoutes
from peerd.pipeline.routes.route_policy import RoutePolicy, Sent
from peerd.pipeline.routes.second_opinion import SecondOpinion
from peerd.pipeline.routes.wiring import BACKWARD_COST
from peerd.pipeline.stage_client import StageClient, TrainerCredentials
from peerd.pipeline.stage_peers import StageLinks, StagePeers
from peerd.pipeline.trainer_relay import TrainerRelay
from peerd.rpc.rpc import Answer, Rpc
from peerd.run.runfile import RunFile, fingerprint
from peerd.run.stage_plan import followers
from peerd.swarm.batch.trainer_ledger import Holding
from peerd.wire.rate.backoff import backoff_s
from peerd.wire.rate.suspicion import Suspicion

log = logging.getLogger("peerd.pipeline.direct")

_PAUSE_S: Final = 0.05  # before another route is tried; doubles each time
_LONGEST_PAUSE_S: Final = 2.0
_SOON_S, _NOT_SO_SOON_S = 0.05, 5.0  # bounds of the pause before an overloaded peer is called again
_PATIENCE_S: Final = 3.0  # with a holder that is full
_BREAKS_BORNE: Final = 3  # failures behind a peer before it is avoided
_CUT_S: Final = 30.0  # time for which two peers that could not connect are not used in sequence
_CUTS: Final = 4096
_LATE: Final = 5.0  # times the longest route: by then its hops have detected which of them is late


@dataclass(slots=True)
class _Way:
    """The route of one attempt: the stages to compute, and a peer for each stage involved."""

    low: int
    high: int
    first: int
    route: list[str]

    def peer_of(self, stage: int) -> str:
        return self.route[stage - self.first]

    @property
    def done_by(self) -> list[str]:
        """The peers of the stages to compute."""
        return self.route[self.low - self.first : self.high - self.first + 1]

    def by(self, name: str) -> _Way:
        """The same route with another peer for its first stage."""
        return _Way(self.low, self.high, self.first, [name, *self.route[1:]])


@dataclass(slots=True)
class _Search:
    """The search for a route: the stages to compute, and the failures so far."""

    low: int
    high: int
    avoid: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # peers to avoid, by stage
    breaks: Counter[tuple[int, str]] = field(default_factory=Counter)  # failures of routes through a stage's peer
    failures: int = 0
    waited_s: float = 0.0  # for a holder that is full
    opinion: SecondOpinion = field(default_factory=SecondOpinion)

    @property
    def first(self) -> int:
        """The stage whose peer is called: the one before the lost stages, which has their input, or the first stage."""
        return max(0, self.low - 1)


class _Options(NamedTuple):
    """The candidates for one stage. `free`: the policy chooses among them."""

    names: list[str]
    free: bool


class DirectPipeline:
    """A run's stages in order, for one trainer. Relays calls in `relaying`."""

    def __init__(
        self,
        run: RunFile,
        rpc: Rpc,
        clock: Clock,
        ways: StageLinks,
        papers: TrainerCredentials,
    ) -> None:
        self._rpc, self._papers = rpc, papers
        self._mark = fingerprint(run)
        self._last = run.pipeline.stages - 1
        self._cost = run.pipeline.microbatch * (1.0 + BACKWARD_COST)
        self._peers = StagePeers(run.pipeline.stages, clock, ways, _LATE)
        flow = CheapestRoute(clock.rng("routes"))
        self._policy: RoutePolicy = flow if run.plan is None else PlannedRoutes(flow, followers(run.plan))
        self._stages = StageClient(run, rpc, self._peers, papers)
        self._judge = NotFiniteJudge(run, self._peers)
        self._cuts = Suspicion[tuple[str, str]](_CUT_S, _CUT_S, _CUTS)  # by peer and peer of the next stage
        self._serving: set[tuple[str, int]] = set()  # (peer, stage)
        self.relaying = TrainerRelay(rpc, self._serving, MicrobatchShapes(run))
        self._retries = 0
        self._sent_bytes = 0

    # --- microbatches -----------------------------------------------------------------------------------------

    async def train(self, step: int, seq: int, load: Microbatch) -> list[Holding]:
        """Have a microbatch computed in all stages; returns the holder of its gradient in each."""
        load.forget()
        await self._go(step, seq, load, 0, self._last)
        return [load.holdings[stage] for stage in range(self._last + 1)]

    async def repeat(self, step: int, seq: int, stage: int, load: Microbatch) -> Holding:
        """Have one stage computed again, with lost neighbouring stages; returns its new holder."""
        load.lost.add(stage)
        async with load.lock:
            if stage in load.lost:
                low = high = stage
                while low - 1 in load.lost:
                    low -= 1
                while high + 1 in load.lost:
                    high += 1
                await self._go(step, seq, load, low, high)
            return load.holdings[stage]

    async def _go(self, step: int, seq: int, load: Microbatch, low: int, high: int) -> None:
        """Have stages `low` to `high` computed, and more if their neighbours cannot provide the kept tensors."""
        search, way = _Search(low, high), None
        while True:
            way = await self._choose(load, search, way)
            started, sent = trio.current_time(), self._policy.sent(way.done_by)
            try:
                way, answer = await self._ask_or_hedge(way, step, seq, load, search.avoid[way.first])
            except Overloaded as error:
                await self._wait_for_room(search, way, error)
                continue
            except NotFiniteHere as error:
                self._not_finite(search, way, (way.first, way.route[0]), step, started, error)
            except RemoteError as error:
                self._entry_failed(search, way, started, error)
            else:
                broken = answer.body.broken
                if broken is None:
                    self._done(way, load, answer.body, started, sent)
                    self._judge.computed(search.opinion, started)
                    return
                reason = "".join(char if char.isprintable() else "?" for char in broken.reason)  # it is logged
                if isinstance(broken, NotFiniteAt) and search.low <= broken.stage <= search.high:
                    self._not_finite(search, way, (broken.stage, broken.peer), step, started, NotFiniteHere(reason))
                else:
                    self._broke(search, way, broken.stage, reason)
            finally:
                self._policy.ended(sent)
            self._retries += 1
            search.failures += 1
            await trio.sleep(backoff_s(search.failures, _PAUSE_S, _LONGEST_PAUSE_S))

    def _not_finite(
        self, search: _Search, way: _Way, where: tuple[int, str], step: int, started: float, error: NotFiniteHere
    ) -> None:
        """Choose another route after a peer (`where`: stage, peer) reported its result as not finite.

        Raises MicrobatchNotFinite if the microbatch should be dropped.
        """
        stage, name = where
        if stage < search.low:  # it was only asked for what it keeps
            self._give_up_holder(search, way, str(error))
            return
        if name not in self._peers.wiring(stage):
            name = way.peer_of(stage)
        search.opinion.say(stage, name, way.peer_of(stage - 1) if stage > way.first else "")
        self._judge.hear(search.opinion, stage, search.avoid[stage], step, error, started)
        for before in range(search.low, stage):  # one of these may have made the input invalid
            search.avoid[before].add(way.peer_of(before))

    async def _wait_for_room(self, search: _Search, way: _Way, error: Overloaded) -> None:
        """Let the route's first peer, which is full, rest; other peers may have room. A holder is waited for up
        to 3 s.
        """
        pause_s = min(max(_SOON_S, error.retry_after_s), _NOT_SO_SOON_S)
        self._peers.wiring(way.first).rest(way.route[0], trio.current_time() + pause_s)
        if way.first < search.low:
            search.waited_s += pause_s
            if search.waited_s > _PATIENCE_S:
                self._give_up_holder(search, way, str(error))
            await trio.sleep(pause_s)

    def _entry_failed(self, search: _Search, way: _Way, started: float, error: RemoteError) -> None:
        """Handle a failure of the route's first peer."""
        name = way.route[0]
        if way.first < search.low:  # it was only asked for what it keeps
            self._give_up_holder(search, way, str(error))
            return
        times = self._peers.failed(way.first, name, started, error)
        level = self._peers.level(name, times)
        log.log(level, "a microbatch failed at …%s, another route is tried: %s", name[-8:], error)
        search.avoid[way.first].add(name)

    def _give_up_holder(self, search: _Search, way: _Way, reason: str) -> None:
        """Have the stage before the lowest computed again as well, because its holder does not provide its output."""
        log.info(
            "stage %d is computed again as well, because …%s does not provide its output: %s",
            way.first,
            way.route[0][-8:],
            reason,
        )
        search.low, search.waited_s = way.first, 0.0

    def _broke(self, search: _Search, way: _Way, stage: int, reason: str) -> None:
        """Handle a failed hand-over to `stage`: try other peers there; after repeated failures avoid earlier
        peers too.
        """
        name, before = way.peer_of(stage), way.peer_of(stage - 1)
        level = logging.DEBUG if self._is_cut(before, name) else logging.INFO  # repeats are logged for debugging only
        log.log(level, "the hand-over of a microbatch from …%s to …%s failed: %s", before[-8:], name[-8:], reason)
        if stage > search.high:  # it was only asked for what it keeps
            search.high = stage
            return
        self._note_cut(before, name)
        search.avoid[stage].add(name)
        for at, peer in enumerate(way.route[: stage - way.first], way.first):
            search.breaks[at, peer] += 1
            if search.breaks[at, peer] < _BREAKS_BORNE:
                continue
            if at < search.low:
                self._give_up_holder(search, way, reason)
            else:
                search.avoid[at].add(peer)

    async def _ask_or_hedge(
        self, way: _Way, step: int, seq: int, load: Microbatch, avoid: Set[str]
    ) -> tuple[_Way, Answer[PassAnswer]]:
        """Send an attempt and, if its first peer is late, another one with a different first peer."""
        name = way.route[0]

        async def ask(first: str) -> Answer[PassAnswer]:
            answer = await self._ask(way.by(first), step, seq, load)
            if first != name and answer.body.broken is not None:
                raise Refused("its own hand-over failed", PeerId.parse(first))
            return answer

        alone = way.first < way.low  # it only provides what it keeps, which no other peer has
        by, answer = await self._peers.first_answer(way.first, name, self._cost, ask, avoid, alone=alone)
        return way.by(by), answer

    async def _ask(self, way: _Way, step: int, seq: int, load: Microbatch) -> Answer[PassAnswer]:
        """Send an attempt; returns the checked answer of its first peer."""
        bare = Ticket(step, seq, load.attempt, way.low, way.high, way.first, list(way.route))
        load.attempt += 1
        ticket = signed_ticket(self._papers.sign, self._mark, self._papers.own, bare)
        frames = [load.tokens] if way.first == way.low == 0 else []
        frames += [load.targets] if way.high == self._last else []
        peer = PeerId.parse(way.route[0])
        body = PassRequest(self._mark, way.first, self._papers.own, ticket, self._papers.grant_of(seq))
        started = trio.current_time()
        within_s = self._peers.given_up_after_s(way.first, way.route[0], PASS_TIMEOUT_S)
        with self.relaying.open(ticket), self._peers.call_to(way.route[0], within_s) as limit_s:
            answer = await self._rpc.call(peer, PASS, body, PassAnswer, frames=frames, timeout_s=limit_s)
            self._check(peer, way, ticket, answer)
        if answer.body.broken is None and way.first == way.low:
            self._peers.took(way.first, way.route[0], started)
        else:
            self._peers.heard(way.route[0])
        self._sent_bytes += sum(len(frame.payload) for frame in frames)
        return answer

    def _check(self, peer: PeerId, way: _Way, ticket: Ticket, answer: Answer[PassAnswer]) -> None:
        """Raise ProtocolViolation unless the answer has hops with receipts for all stages to compute.

        The conductor knows whether these peers still serve: it orders a stage to be repeated if its holder has left.
        """
        passed = answer.body
        if answer.frames:
            raise ProtocolViolation("a trainer's microbatch was answered with tensors", peer)
        if passed.broken is not None:
            if not way.first < passed.broken.stage <= ticket.last:
                raise ProtocolViolation(
                    f"a failed hand-over is reported for stage {passed.broken.stage}, outside the route", peer
                )
            return
        if fault := fault_of_hops(self._mark, self._papers.own, ticket, way.low, passed.hops):
            raise ProtocolViolation(fault, peer)

    def _done(self, way: _Way, load: Microbatch, passed: PassAnswer, started: float, sent: Sent) -> None:
        now = trio.current_time()
        for stage, hop in enumerate(passed.hops, way.low):
            load.holdings[stage] = Holding(hop.peer, hop.receipt)
            load.lost.discard(stage)
            self._peers.wiring(stage).answered(hop.peer, self._cost, started, now)
            if stage + 1 < way.first + len(way.route) and hop.instead_of == way.peer_of(stage + 1):
                self._note_cut(hop.peer, hop.instead_of)
        if way.low == 0 and way.route[0] == sent.route[0]:  # else a mate was called later
            self._policy.answered(now, sent, passed.hops, now - started)
        if way.low == 0 and way.high == self._last:
            load.loss_sum = passed.loss_sum

    # --- the choice of a route --------------------------------------------------------------------------------

    async def _choose(self, load: Microbatch, search: _Search, before: _Way | None) -> _Way:
        """Choose a peer for each stage.

        Peers of the previous attempt are kept unless they are to be avoided. For stages that only provide kept tensors,
        the holders are used. The policy chooses all others.
        """
        first = search.first
        picked: dict[int, str] = {}
        to_do = range(search.low, search.high + 1)
        while True:  # peers may leave while we wait for one: check all stages again
            options = {stage: self._options(stage, search, before, picked) for stage in to_do}
            empty = next((stage for stage, found in options.items() if not found.names), None)
            if empty is None:
                break
            picked[empty] = await self._peers.pick(empty, self._cost, search.avoid[empty], called=empty == first)
        stages = range(first, min(self._last, search.high + 1) + 1)
        names = [options[stage].names if stage in options else [load.holdings[stage].peer] for stage in stages]
        route = self._policy.choose(trio.current_time(), names, self._is_cut)
        for stage, found in options.items():
            if found.free:
                self._peers.chosen(stage, route[stage - first], self._cost)
        return _Way(search.low, search.high, first, route)

    def _options(self, stage: int, search: _Search, before: _Way | None, picked: dict[int, str]) -> _Options:
        """Peers that may compute a stage now. Empty if the caller must wait for one, which is then in `picked`."""
        wiring, avoid, now = self._peers.wiring(stage), search.avoid[stage], trio.current_time()
        known = before.peer_of(stage) if before is not None and before.low <= stage <= before.high else None
        if known is not None and known in wiring and known not in avoid and not wiring.rests(known, now):
            return _Options([known], free=False)
        if picked.get(stage) in wiring:
            return _Options([picked[stage]], free=False)
        return _Options(self._peers.options(stage, avoid, called=stage == search.first), free=True)

    def _is_cut(self, one: str, other: str) -> bool:
        """True if `one` recently failed to reach `other`."""
        return self._cuts.is_aside(trio.current_time(), (one, other))

    def _note_cut(self, one: str, other: str) -> None:
        self._cuts.put_aside((one, other), trio.current_time() + _CUT_S)

    # --- evaluation and the stages' peers ---------------------------------------------------------------------

    async def evaluate(self, tokens: TensorFrame, targets: TensorFrame) -> float:
        """The loss summed over the samples, with the current parameters of the stages."""
        return await self._stages.evaluate(tokens, targets)

    async def run(self) -> None:
        """Check overdue answers and probe unreachable peers, until cancelled."""
        await self._peers.run()

    def update(self, members: Iterable[MemberInfo]) -> None:
        """Replace the serving peers."""
        members = list(members)
        self._serving.clear()
        self._serving.update((m.peer, m.stage) for m in members if m.since)
        self._peers.update(members)
        self._policy.update(self._peers.rates())

    def peers(self) -> int:
        """Number of stage peers that may be called."""
        return len(self._peers)

    @property
    def waits_for(self) -> str | None:
        """Why no peer of a stage is called, as text, or None."""
        return self._peers.waits_for

    @property
    def retries(self) -> int:
        """Number of routes tried again and of calls repeated."""
        return self._retries + self._stages.retries

    @property
    def sent_bytes(self) -> int:
        """Bytes of the frames that this peer sent to stage peers, and of those that it relayed between stage peers."""
        return self._sent_bytes + self._stages.sent_bytes + self.relaying.relayed_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of the frames that this peer received from stage peers, and of those that it relayed between them."""
        return self._stages.received_bytes + self.relaying.relayed_bytes
