"""The peers of each stage as one trainer knows them: who serves, who is asked next, who rests, and why it waits.

Keeps the scope of every call under way, so that a call ends when its peer leaves the swarm, falls silent, or has for
too long answered none of our calls: a peer with much to do answers one after the other. While `run` looks, a peer whose
answers are overdue is asked for a sign of life, and one that a call did not reach, or that gives no such sign, is left
out until a probe gets through (`machine/pipeline/cut_off`). How much each peer is asked is `machine/pipeline/wiring`'s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio

from peerd.core.clock import Clock
from peerd.core.errors import RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_DEADLINE_S
from peerd.core.messages.swarm import MemberInfo
from peerd.machine.pipeline.call_times import LATE, CallTimes
from peerd.machine.pipeline.cut_off import CutOff
from peerd.machine.pipeline.priors import usual_s
from peerd.machine.pipeline.routes import Route
from peerd.machine.pipeline.wiring import StochasticWiring
from peerd.service.pipeline.hedging import Hedged
from peerd.signals import Signal

A = TypeVar("A")

log = logging.getLogger("peerd.service.pipeline.stage_peers")

_OVERDUE_S = 2.0  # that an answer takes before its peer is asked for a sign of life
_SILENT_S = 5.0  # of a call without any, until nobody waits for it
_LOOK_S = 0.5  # between looks at what is overdue
_IDLE_LOOK_S = 5.0  # between looks for peers while a stage has none
_AFTER_REST_S = 0.01
_HELD_S = 30.0  # at most, that one call shows whether a peer is as quick again as it was
_PATIENCES = 4.0  # while its peer answers others, a call is waited for so many times as long
_LATER_S = 2.0  # each stage gives up so much later than the one after it
_WAYS = 10.0  # times as long as a way takes that waits for nobody
_PROBLEM_CHARS = 120  # of a failure, in what status says
_AWAY_S = 0.5  # between looks for a connection from one of the peers that can only dial


class StageLinks(Protocol):
    """The links to stage peers, as their callers see them."""

    def linked(self, peer: PeerId) -> bool:
        """True when calls get through to `peer` though it cannot be dialed."""
        ...

    def doubt(self, peer: PeerId) -> float:
        """An answer is overdue: check that the peer is still there; returns the seconds since it was last heard."""
        ...

    async def probe(self, peer: PeerId) -> None:
        """Have a link to `peer` over which it answers; else RemoteError, after some seconds at most."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way: its start, and the seconds without any answer of its peer after which it is given up."""

    started: float
    patience_s: float

    def deadline(self, heard_at: float) -> float:
        """The time to give it up, if nothing comes after `heard_at`."""
        return min(heard_at + self.patience_s, self.started + _PATIENCES * self.patience_s)


class StagePeers:
    """See the module's header. `route`: held to its peers, else to whichever serve."""

    def __init__(
        self, stages: int, clock: Clock, ways: StageLinks, route: Route | None = None, late: float = LATE
    ) -> None:
        """`late`: times as long as the longest call before, and a call is late."""
        self._ways, self._route = ways, route
        self._clients: set[str] = set()  # stage peers that only dial: called while they are connected
        self._wirings = [StochasticWiring(clock.rng(f"wiring {stage}")) for stage in range(stages)]
        self._times = [CallTimes(late) for _ in range(stages)]
        self._calls: dict[str, dict[trio.CancelScope, _Call]] = {}  # by peer
        self._uplinks: list[dict[str, float]] = [{} for _ in range(stages)]  # peer -> bytes/s that it says arrive there
        self._reach, self._probes = CutOff(), False
        self._to_look = Signal()  # when a peer could not be reached, or calls are under way again
        self._changed = Signal()  # when other peers serve, or one can be reached again
        self._problems = [""] * stages  # what the peer that failed last said of it
        self.waits_for: str | None = None  # the reason that no peer of a stage is called

    def __len__(self) -> int:
        """Stage peers that may be called."""
        return sum(len(wiring) for wiring in self._wirings)

    def wiring(self, stage: int) -> StochasticWiring:
        """The choice among the peers of one stage."""
        return self._wirings[stage]

    def times(self, stage: int) -> CallTimes:
        """Durations of our calls to the peers of one stage."""
        return self._times[stage]

    def update(self, members: Iterable[MemberInfo]) -> None:
        """These peers serve now."""
        ready = [m for m in members if m.ready]
        self._clients = {m.peer for m in ready if m.client}
        for stage, wiring in enumerate(self._wirings):
            rates = {m.peer: m.rate for m in ready if m.stage == stage}
            peers = set(rates)
            if self._route is not None:
                peers = set(self._route.allowed(stage, sorted(peers)))
            wiring.update(peers, rates)
            self._times[stage].keep_only(peers)
            self._uplinks[stage] = {peer: rate for peer, rate in self._uplinks[stage].items() if peer in peers}
        self._reach.keep_only({m.peer for m in ready})
        for name in self._calls.keys() - {m.peer for m in ready}:
            for scope in self._calls[name]:  # a peer that has left will not answer: do not wait for the deadline
                scope.cancel()
        self._changed.notify()

    def rates(self) -> dict[str, float]:
        """Those that serve any stage, each with its published rate; 0: not known."""
        return {name: rate for wiring in self._wirings for name, rate in wiring.rates().items()}

    def given_up_after_s(self, first: int, name: str, at_first_s: float) -> float:
        """Seconds after which no answer of a peer of stage `first` is expected any more, in which all after it have a
        part.

        While no call was measured: `at_first_s`, and more where published rates say that devices are slow. The nearer
        to the first stage, the longer: who is next to the peer that does not answer is to find out first.
        """
        times = self._times[first]
        if times.late_after_s(name) is None:
            way_s = sum(usual_s(wiring.rates().values()) for wiring in self._wirings[first:])
            at_first_s = max(at_first_s, _WAYS * way_s)
        return times.given_up_after_s(name, at_first_s) + _LATER_S * (len(self._wirings) - 1 - first)

    # --- reachability -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at overdue answers and probe peers that could not be reached, until cancelled."""
        self._probes = True
        async with trio.open_nursery() as nursery:
            while True:
                self._look()
                now = trio.current_time()
                for name in self._reach.due(now):
                    nursery.start_soon(self._probe, name)
                with trio.move_on_at(min(self._reach.wakes_at(), now + _LOOK_S if self._calls else math.inf)):
                    await self._to_look.wait()

    async def _probe(self, name: str) -> None:
        try:
            await self._ways.probe(PeerId.parse(name))
        except RemoteError as error:
            log.debug("…%s cannot be reached: %s", name[-8:], error)
            self._reach.ended(name, False, trio.current_time())
        else:
            if self._reach.ended(name, True, trio.current_time()):
                log.info("…%s can be reached again", name[-8:])
                for wiring in self._wirings:
                    wiring.rested(name)
                self._changed.notify()
        self._to_look.notify()

    def failed(self, stage: int, name: str, started: float, error: RemoteError) -> int:
        """A call that was `started` then has failed; returns how often the peer did so since its last answer.

        0: the call went over a path that is gone, and the peer was found on another one since.
        """
        now = trio.current_time()
        if isinstance(error, Unreachable) and self._reach.is_stale(name, started):
            return 0
        self._problems[stage] = str(error)[:_PROBLEM_CHARS]
        if isinstance(error, TooSlow):
            self._times[stage].gave_up(name, now - started)
        serves = name in self._wirings[stage]  # else it has left, and its calls ended for that
        if self._probes and serves and isinstance(error, Unreachable) and self._reach.lost(name, now):
            log.info("…%s of stage %d cannot be reached: it is left out until it can be", name[-8:], stage)
            self._to_look.notify()
        return self._wirings[stage].failed(name, now, now - started)

    def level(self, name: str, times: int) -> int:
        """The level at which the log is told of a failure that `failed` counted: the first one tells it all."""
        return logging.INFO if times == 1 and not self.is_cut_off(name) else logging.DEBUG  # that is told by itself

    def answered(self, stage: int, name: str, cost: float, started: float) -> None:
        """A call of so much `cost` that was `started` then has been answered."""
        self._wirings[stage].answered(name, cost, started, trio.current_time())
        self.took(stage, name, started)

    def took(self, stage: int, name: str, started: float) -> None:
        """A call that was `started` then has been answered, perhaps by a whole way: it tells no one peer's speed."""
        times = self._times[stage]
        if times.is_overtaken(name):  # it is as quick again as it was
            self._wirings[stage].rested(name)
            self._changed.notify()
        times.took(name, trio.current_time() - started)
        self.heard(name)

    async def first_answer(
        self,
        stage: int,
        name: str,
        cost: float,
        ask: Callable[[str], Awaitable[A]],
        never: Set[str] = frozenset(),
        *,
        alone: bool = False,
    ) -> tuple[str, A]:
        """The first good answer to a call by `ask`: of `name`, or of a mate once that is late; returns who gave it.

        `never`: no mates; `alone`: no mate can do the same. Raises the error of `name` where there is no answer.
        """
        started = trio.current_time()
        hedged = Hedged(ask, partial(self.mate, stage, cost, name, never))
        by, answer = await hedged.first(name, None if alone else self._times[stage].late_after_s(name))
        if by != name:
            self.overtaken(stage, name, by, started)
        return by, answer

    def mate(self, stage: int, cost: float, late: str, never: Set[str] = frozenset()) -> str | None:
        """Another peer of the stage, for a call to one that is late; None: none is free, or enough were sent twice."""
        if not self._times[stage].can_hedge(late):
            return None
        name = self._wirings[stage].pick(trio.current_time(), cost, never=never | {late} | self.away())
        if name is not None:
            self._times[stage].hedged(late)
            self._ways.doubt(PeerId.parse(late))  # so that its silence says something once the mate has answered
            log.debug("…%s of stage %d is late with a microbatch: …%s is asked as well", late[-8:], stage, name[-8:])
        return name

    def overtaken(self, stage: int, name: str, by: str, started: float) -> None:
        """A late call was answered by a mate that was asked after it: let the late one rest.

        Where no link leads to it, or nothing at all came from it meanwhile, it is left out until it can be reached;
        else, after its rest, it gets one call at a time until it answers one.
        """
        peer, took_s = PeerId.parse(name), trio.current_time() - started
        reason = f"…{by[-8:]} was asked after it, and was first after {took_s:.1f} s"
        is_silent = not self._ways.linked(peer) or min(took_s, self._ways.doubt(peer)) > _OVERDUE_S
        times = self.failed(stage, name, started, Unreachable(reason, peer) if is_silent else TooSlow(reason, peer))
        self._times[stage].overtaken(name, took_s)
        level = self.level(name, times)
        log.log(level, "…%s of stage %d is late by its own measure and rests: %s", name[-8:], stage, reason)

    def _hold_overtaken(self, name: str) -> None:
        """Keep others from calling a peer that a mate has overtaken, now that a call shows whether it is back."""
        now = trio.current_time()
        for wiring, times in zip(self._wirings, self._times, strict=True):
            if times.is_overtaken(name):
                wiring.hold(name, now, now + _HELD_S)

    def is_cut_off(self, name: str) -> bool:
        """True while the peer cannot be reached."""
        return name in self._reach

    # --- the choice -------------------------------------------------------------------------------------------

    async def pick(self, stage: int, cost: float, avoid: set[str], *, called: bool = True) -> str:
        """The stage's next peer; waits while all rest or none is there. `called`: by us, not by a stage peer."""
        wiring = self._wirings[stage]
        while True:
            now = trio.current_time()
            name = wiring.pick(now, cost, avoid, self.away() if called else set())
            if name is not None:
                self._hold_overtaken(name)
                self.waits_for = None
                return name
            due = wiring.wakes_at(now)
            if called and due is not None and self._all_cut_off(stage):
                self.waits_for = f"the peers of stage {stage} cannot be reached"
                await self._changed.wait()
                continue
            self.waits_for = (
                f"stage {stage} has no peers{' on this route' if self._route is not None else ''}"
                if due is None
                else f"the peers of stage {stage} failed just now: {self._problems[stage]}"
            )
            if due is not None and due <= now:  # the peers that do not rest can only dial, and have not yet
                self.waits_for, due = f"the peers of stage {stage} can only dial, and are not connected", now + _AWAY_S
            with trio.move_on_at(due + _AFTER_REST_S if due is not None else now + _IDLE_LOOK_S):
                await self._changed.wait()

    def options(self, stage: int, avoid: set[str], *, called: bool) -> list[str]:
        """The stage's peers that `pick` may name now, in the order of their turns."""
        return self._wirings[stage].turns(trio.current_time(), avoid, self.away() if called else set())

    def others(self, stage: int, never: Set[str]) -> list[str]:
        """The stage's peers beside `never` that can be asked now."""
        return self._wirings[stage].turns(trio.current_time(), (), never | self.away())

    def chosen(self, stage: int, name: str, cost: float) -> None:
        """A policy has chosen this one of the stage's options."""
        self._wirings[stage].charge(name, cost)
        self._hold_overtaken(name)
        self.waits_for = None

    def away(self) -> set[str]:
        """Peers that cannot be reached, or can only dial, and are not connected."""
        away = {name for name in self._clients if not self._ways.linked(PeerId.parse(name))}
        return away.union(*(filter(self.is_cut_off, wiring) for wiring in self._wirings))

    def _all_cut_off(self, stage: int) -> bool:
        return all(map(self.is_cut_off, self._wirings[stage]))

    @contextmanager
    def call_to(self, name: str, patience_s: float) -> Iterator[float]:
        """The scope of a call to a peer; yields the call's time limit, in seconds.

        Unreachable is raised when the peer leaves the swarm or falls silent, TooSlow when it has answered none of our
        calls for `patience_s`.
        """
        self._hold_overtaken(name)
        if not self._calls:
            self._to_look.notify()
        calls, call = self._calls.setdefault(name, {}), _Call(trio.current_time(), patience_s)
        with trio.CancelScope(deadline=call.deadline(call.started)) as scope:
            calls[scope] = call
            try:
                yield min(_PATIENCES * patience_s, RPC_DEADLINE_S)
            finally:
                del calls[scope]
                if not calls:
                    self._calls.pop(name, None)
        if scope.cancelled_caught:
            now, peer = trio.current_time(), PeerId.parse(name)
            if now >= scope.deadline:
                raise TooSlow(f"no answer within {now - call.started:.0f} s", peer)
            serves = any(name in wiring for wiring in self._wirings)
            raise Unreachable("it has fallen silent" if serves else "the peer has left the swarm", peer)

    def heard(self, name: str) -> None:
        """A peer has answered one of our calls: it works, and the others are waited for."""
        now = trio.current_time()
        for scope, call in self._calls.get(name, {}).items():
            scope.deadline = call.deadline(now)
        if [wiring for wiring in self._wirings if wiring.let_go(name)]:
            self._changed.notify()

    def _look(self) -> None:
        """End the calls to peers with overdue answers that are silent as well.

        Otherwise a peer whose answers do not come through would cost us the whole time limit of a call. Silence before
        a call says nothing: nobody had asked the peer.
        """
        now = trio.current_time()
        for name, calls in self._calls.items():
            waited_s = now - min(call.started for call in calls.values())
            if waited_s > _OVERDUE_S and min(waited_s, self._ways.doubt(PeerId.parse(name))) > _SILENT_S:
                for scope in calls:
                    scope.cancel()

    def note_arrival_rate(self, stage: int, name: str, bytes_per_s: float) -> None:
        """Note the rate at which our frames arrive at `name`, as it says; 0: it does not know."""
        if bytes_per_s > 0:
            self._uplinks[stage][name] = bytes_per_s

    def arrival_rates(self, stage: int) -> list[float]:
        """The rates at which our frames arrive at the stage's peers, where known; empty for a stage that is not."""
        return list(self._uplinks[stage].values()) if stage >= 0 else []
