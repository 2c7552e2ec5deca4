"""The peers of each stage as one caller knows them: who serves, who is called next, who rests, and what it waits for.

Keeps a cancel scope for every call in progress. A call ends early if its peer leaves the swarm, goes silent, or has
answered none of our calls for too long (a busy peer answers them one after another). `run` asks a peer whose answers
are overdue for a sign of life. A peer that a call did not reach, or that gives no sign of life, is left out until a
probe reaches it (`pipeline/routes/cut_off`). `pipeline/routes/wiring` decides how often each peer is called.
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
from peerd.core.signals import Signal
from peerd.messages.swarm import MemberInfo
from peerd.pipeline.hedging import Hedged
from peerd.pipeline.routes.call_times import LATE, CallTimes
from peerd.pipeline.routes.cut_off import CutOff
from peerd.pipeline.routes.priors import usual_s
from peerd.pipeline.routes.wiring import StochasticWiring

A = TypeVar("A")

log = logging.getLogger("peerd.pipeline.stage_peers")

_OVERDUE_S = 2.0  # age of an unanswered call at which its peer is asked for a sign of life
_SILENT_S = 5.0  # silence of a peer after which its overdue calls are cancelled
_LOOK_S = 0.5  # between two checks for overdue answers
_IDLE_LOOK_S = 5.0  # between two checks for peers while a stage has none
_AFTER_REST_S = 0.01
_HELD_S = 30.0  # longest time in which one call tests whether a peer has recovered
_PATIENCES = 4.0  # factor on a call's patience while its peer answers other calls
_LATER_S = 2.0  # each stage gives up this much later than the next one
_WAYS = 10.0  # factor on the time of a route without waiting
_PROBLEM_CHARS = 120  # length of a failure in status
_AWAY_S = 0.5  # between two checks for a connection from peers that can only dial


class StageLinks(Protocol):
    """The links to stage peers, as their callers use them."""

    def linked(self, peer: PeerId) -> bool:
        """True if there is a link to `peer`, so that calls reach it even if it cannot be dialed."""
        ...

    def doubt(self, peer: PeerId) -> float:
        """Report an overdue answer, so that the link checks the peer; returns the seconds since anything was received
        from it.
        """
        ...

    async def probe(self, peer: PeerId) -> None:
        """Establish a link to `peer` over which it answers. Raises RemoteError after a few seconds otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in progress: its start, and the seconds without any answer of its peer after which it is cancelled."""

    started: float
    patience_s: float

    def deadline(self, heard_at: float) -> float:
        """The time at which to cancel the call if its peer answers no call of ours after `heard_at`."""
        return min(heard_at + self.patience_s, self.started + _PATIENCES * self.patience_s)


class StagePeers:
    """The stage peers that one caller may call."""

    def __init__(self, stages: int, clock: Clock, ways: StageLinks, late: float = LATE) -> None:
        """A call is late after `late` times the duration of the longest earlier call."""
        self._ways = ways
        self._clients: set[str] = set()  # stage peers that only dial: called while they are connected
        self._wirings = [StochasticWiring(clock.rng(f"wiring {stage}")) for stage in range(stages)]
        self._times = [CallTimes(late) for _ in range(stages)]
        self._calls: dict[str, dict[trio.CancelScope, _Call]] = {}  # by peer
        self._uplinks: list[dict[str, float]] = [{} for _ in range(stages)]  # peer -> reported bytes/s of our frames
        self._reach, self._probes = CutOff(), False
        self._to_look = Signal()  # a peer could not be reached, or the first call begins
        self._changed = Signal()  # the peers changed, or one can be reached again
        self._problems = [""] * stages  # reason of the last failure, by stage
        self.waits_for: str | None = None  # why no peer of a stage is called

    def __len__(self) -> int:
        """Number of stage peers that may be called."""
        return sum(len(wiring) for wiring in self._wirings)

    def wiring(self, stage: int) -> StochasticWiring:
        """The `StochasticWiring` that chooses among the peers of one stage."""
        return self._wirings[stage]

    def times(self, stage: int) -> CallTimes:
        """Durations of our calls to the peers of one stage."""
        return self._times[stage]

    def update(self, members: Iterable[MemberInfo]) -> None:
        """Replace the serving peers by the ready ones of `members`, and cancel calls to all others."""
        ready = [m for m in members if m.ready]
        self._clients = {m.peer for m in ready if m.client}
        for stage, wiring in enumerate(self._wirings):
            rates = {m.peer: m.rate for m in ready if m.stage == stage}
            peers = set(rates)
            wiring.update(peers, rates)
            self._times[stage].keep_only(peers)
            self._uplinks[stage] = {peer: rate for peer, rate in self._uplinks[stage].items() if peer in peers}
        self._reach.keep_only({m.peer for m in ready})
        for name in self._calls.keys() - {m.peer for m in ready}:
            for scope in self._calls[name]:  # a peer that has left will not answer
                scope.cancel()
        self._changed.notify()

    def rates(self) -> dict[str, float]:
        """The peers that serve any stage, each with its published rate; 0 if unknown."""
        return {name: rate for wiring in self._wirings for name, rate in wiring.rates().items()}

    def given_up_after_s(self, first: int, name: str, at_first_s: float) -> float:
        """Seconds after which an answer of peer `name` of stage `first`, which depends on all later stages, is given
        up.

        Before the first measured call it is `at_first_s`, or more if published rates show that devices are slow.
        Earlier stages wait longer, so that the caller next to a silent peer notices first.
        """
        times = self._times[first]
        if times.late_after_s(name) is None:
            way_s = sum(usual_s(wiring.rates().values()) for wiring in self._wirings[first:])
            at_first_s = max(at_first_s, _WAYS * way_s)
        return times.given_up_after_s(name, at_first_s) + _LATER_S * (len(self._wirings) - 1 - first)

    # --- reachability -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check overdue answers and probe unreachable peers, until cancelled."""
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
        """Record a failed call that began at `started`; returns the number of failures of the peer since its last
        answer.

        Returns 0 if the call used a path that is gone and the peer has been reached on another one since.
        """
        now = trio.current_time()
        if isinstance(error, Unreachable) and self._reach.is_stale(name, started):
            return 0
        self._problems[stage] = str(error)[:_PROBLEM_CHARS]
        if isinstance(error, TooSlow):
            self._times[stage].gave_up(name, now - started)
        serves = name in self._wirings[stage]  # else its calls ended because it left
        if self._probes and serves and isinstance(error, Unreachable) and self._reach.lost(name, now):
            log.info("…%s of stage %d cannot be reached: it is left out until it can be", name[-8:], stage)
            self._to_look.notify()
        return self._wirings[stage].failed(name, now, now - started)

    def level(self, name: str, times: int) -> int:
        """The log level for a failure that `failed` counted: info for the first one, debug for the rest."""
        return logging.INFO if times == 1 and not self.is_cut_off(name) else logging.DEBUG

    def answered(self, stage: int, name: str, cost: float, started: float) -> None:
        """Record that a call of this `cost`, begun at `started`, was answered."""
        self._wirings[stage].answered(name, cost, started, trio.current_time())
        self.took(stage, name, started)

    def took(self, stage: int, name: str, started: float) -> None:
        """Record the duration of an answered call, begun at `started`. It may include the time of later stages."""
        times = self._times[stage]
        if times.is_overtaken(name):  # it has recovered
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
        """Call `name` by `ask` and, once it is late, a mate (another peer of the stage); returns the first good answer
        and its peer.

        `never`: peers not to use as mates; `alone`: no mate can replace it. Raises the error of `name` if there is no
        answer.
        """
        started = trio.current_time()
        hedged = Hedged(ask, partial(self.mate, stage, cost, name, never))
        by, answer = await hedged.first(name, None if alone else self._times[stage].late_after_s(name))
        if by != name:
            self.overtaken(stage, name, by, started)
        return by, answer

    def mate(self, stage: int, cost: float, late: str, never: Set[str] = frozenset()) -> str | None:
        """Another peer of the stage, for a hedged call; None if none is free or the limit for hedged calls is
        reached.
        """
        if not self._times[stage].can_hedge(late):
            return None
        name = self._wirings[stage].pick(trio.current_time(), cost, never=never | {late} | self.away())
        if name is not None:
            self._times[stage].hedged(late)
            self._ways.doubt(PeerId.parse(late))  # so that its silence is significant once the mate has answered
            log.debug("…%s of stage %d is late with a microbatch: …%s is asked as well", late[-8:], stage, name[-8:])
        return name

    def overtaken(self, stage: int, name: str, by: str, started: float) -> None:
        """Record that a mate answered before the late peer `name`: the late one rests.

        If there is no link to it, or nothing was received from it meanwhile, it is left out until it can be reached.
        Otherwise, after its rest, it gets one call at a time until it answers one.
        """
        peer, took_s = PeerId.parse(name), trio.current_time() - started
        reason = f"…{by[-8:]} was called later and answered first, after {took_s:.1f} s"
        is_silent = not self._ways.linked(peer) or min(took_s, self._ways.doubt(peer)) > _OVERDUE_S
        times = self.failed(stage, name, started, Unreachable(reason, peer) if is_silent else TooSlow(reason, peer))
        self._times[stage].overtaken(name, took_s)
        level = self.level(name, times)
        log.log(level, "…%s of stage %d is much slower than in earlier calls and rests: %s", name[-8:], stage, reason)

    def _hold_overtaken(self, name: str) -> None:
        """Allow a peer that a mate has overtaken only this one call, until its answer shows that it has recovered."""
        now = trio.current_time()
        for wiring, times in zip(self._wirings, self._times, strict=True):
            if times.is_overtaken(name):
                wiring.hold(name, now, now + _HELD_S)

    def is_cut_off(self, name: str) -> bool:
        """True while the peer cannot be reached."""
        return name in self._reach

    # --- the choice -------------------------------------------------------------------------------------------

    async def pick(self, stage: int, cost: float, avoid: set[str], *, called: bool = True) -> str:
        """The stage's next peer; waits while all rest or none serves. `called`: we call it ourselves, not a stage
        peer.
        """
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
                f"stage {stage} has no peers"
                if due is None
                else f"the peers of stage {stage} failed just now: {self._problems[stage]}"
            )
            if due is not None and due <= now:  # the remaining peers can only dial and have not done so
                self.waits_for, due = f"the peers of stage {stage} can only dial, and are not connected", now + _AWAY_S
            with trio.move_on_at(due + _AFTER_REST_S if due is not None else now + _IDLE_LOOK_S):
                await self._changed.wait()

    def options(self, stage: int, avoid: set[str], *, called: bool) -> list[str]:
        """The peers of the stage that `pick` may return now, in the order of their turns."""
        return self._wirings[stage].turns(trio.current_time(), avoid, self.away() if called else set())

    def others(self, stage: int, never: Set[str]) -> list[str]:
        """The peers of the stage, except `never`, that can be called now."""
        return self._wirings[stage].turns(trio.current_time(), (), never | self.away())

    def chosen(self, stage: int, name: str, cost: float) -> None:
        """Record that a policy has chosen this one of the stage's options."""
        self._wirings[stage].charge(name, cost)
        self._hold_overtaken(name)
        self.waits_for = None

    def away(self) -> set[str]:
        """Peers that cannot be reached, and peers that can only dial and are not connected."""
        away = {name for name in self._clients if not self._ways.linked(PeerId.parse(name))}
        return away.union(*(filter(self.is_cut_off, wiring) for wiring in self._wirings))

    def _all_cut_off(self, stage: int) -> bool:
        return all(map(self.is_cut_off, self._wirings[stage]))

    @contextmanager
    def call_to(self, name: str, patience_s: float) -> Iterator[float]:
        """The scope of a call to a peer; yields the call's time limit, in seconds.

        Raises Unreachable if the peer leaves the swarm or goes silent, and TooSlow if it has answered none of our calls
        for `patience_s`.
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
        """Record that a peer has answered one of our calls: it works, so its other calls get more time."""
        now = trio.current_time()
        for scope, call in self._calls.get(name, {}).items():
            scope.deadline = call.deadline(now)
        if [wiring for wiring in self._wirings if wiring.let_go(name)]:
            self._changed.notify()

    def _look(self) -> None:
        """Cancel the calls to peers with overdue answers from which nothing is received either.

        Otherwise a peer whose answers do not arrive would cost the full time limit of a call. Silence before a call
        does not count, because the peer had nothing to answer.
        """
        now = trio.current_time()
        for name, calls in self._calls.items():
            waited_s = now - min(call.started for call in calls.values())
            if waited_s > _OVERDUE_S and min(waited_s, self._ways.doubt(PeerId.parse(name))) > _SILENT_S:
                for scope in calls:
                    scope.cancel()

    def note_arrival_rate(self, stage: int, name: str, bytes_per_s: float) -> None:
        """Record the rate at which our frames arrive at `name`, as it reports; 0 if unknown."""
        if bytes_per_s > 0:
            self._uplinks[stage][name] = bytes_per_s

    def arrival_rates(self, stage: int) -> list[float]:
        """The known rates at which our frames arrive at the stage's peers. Empty if `stage` is negative."""
        return list(self._uplinks[stage].values()) if stage >= 0 else []
