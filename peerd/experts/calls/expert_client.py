"""Calls to the experts of one run, for layers of experts: implements `run.expert_network.ExpertNetwork`.

Every call goes to the host whose claim counts and never to another one, because another host has other weights. A
backward goes to the host that answered its forward, always with the same request id, so that a repeat after a lost link
counts once. If a host refuses, and the directory shows that the expert has moved to another host in a later generation,
that host is called once. All calls of a round share one deadline (`experts/rules/answer_rule`); experts that fail or
answer late are left out of the average.

A hostile host may stay silent, send its answer very slowly, answer with other rows, another dtype or shape, more
frames, NaN, or an older generation than it claims, or say that it does not have the expert. Each of these fails only
that call; the log names the host, which is then not called for a while (`host_rests`). Sizes are limited before frames
arrive.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import (
    LocalError,
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooFewExperts,
    TooSlow,
    Unreachable,
)
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_RESTS, EXPERT_TOP_K
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.experts.calls.answer_check import AnswerCheck
from peerd.experts.calls.call_figures import CallFigures, reason_of
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.experts.rules.answer_rule import AnswerRule, RoundLimit
from peerd.experts.rules.prefix_cache import CachedClaim
from peerd.experts.rules.product_key_beam import BeamSearch
from peerd.messages.experts import Backward, Forward, Gradient, Name, Output
from peerd.rpc.rpc import Answer, Rpc
from peerd.run.expert_network import ExpertCall, ExpertReply, ServedBy
from peerd.run.grid import Uid, grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile, fingerprint

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

log = logging.getLogger("peerd.experts.calls.expert_client")

_FORWARD: Final = "expert/1/forward"
_BACKWARD: Final = "expert/1/backward"
_SOONEST_S, _LATEST_S = 0.02, 5.0  # bounds of the pause before an overloaded host is called again
_LOOK_AGAIN_S: Final = 1.0  # between two reads of a prefix in search of moved experts
_REPEATS: Final = 3  # repeats of a backward after lost links, few because the host may be gone
_REPEAT_S: Final = 0.5  # before each repeat
_LATE_IN_A_ROW: Final = 4  # late answers of one host after which it rests


@dataclass(slots=True)
class _Round:
    """Calls that are awaited together."""

    rule: AnswerRule
    replies: list[ExpertReply | None]
    began: float
    took: list[float] = field(default_factory=list)  # seconds until each answer
    slow: list[int] = field(default_factory=list)  # calls that timed out
    changed: Signal = field(default_factory=Signal)


class ExpertClient:
    """Calls to the experts of one run, at their hosts."""

    def __init__(self, run: RunFile, rpc: Rpc, directory: ExpertDirectory, clock: Clock, worker: Worker) -> None:
        self._section = run.experts or ExpertsSection()
        self._fingerprint, self._grid = fingerprint(run), grid_of(run)
        self._rpc, self._directory, self._clock, self._worker = rpc, directory, clock, worker
        shape_in, shape_out = sample_shapes(run)
        self._outputs = AnswerCheck(shape_out, self._section.dtype, self._section.code, worker)
        self._gradients = AnswerCheck(shape_in, self._section.dtype, self._section.code, worker)
        self._live_share = 1.0  # share of first prefixes with live experts
        self._late = BoundedDict[PeerId, int](EXPERT_RESTS)  # late answers in a row
        self._looked_again = BoundedDict[Uid, float](EXPERT_RESTS)  # prefix -> time
        self._limit = RoundLimit(self._section.timeout_s)
        self.figures = CallFigures()

    async def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        """The best `k` live experts for each sample, best first, by beam search; fewer if fewer are live."""
        if not 1 <= k <= EXPERT_TOP_K:
            raise LocalError(f"{k} experts for a sample; allowed: 1 to {EXPERT_TOP_K}")
        search = await self._run(partial(BeamSearch, self._grid, layer, scores, k, self._live_share))
        asked = await self._run(partial(search.step, {}))
        while asked:
            live = self._directory.live(await self._directory.below(asked))
            asked = await self._run(partial(search.step, live))
        self._live_share = search.live_share
        return await self._run(search.result)

    async def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        """The experts' outputs, None for those that failed or were late; one deadline for all (see `RoundLimit`).

        Raises TooFewExperts if one of the `samples` samples has fewer than `k_min` answers.
        """
        self._check_asks(asks, 1)
        calls = [(ask.uid, ask.samples) for ask in asks]
        grace_s = self._section.grace_s * self._limit.stretch  # proportional to the limit
        rule = AnswerRule(calls, samples, self._section.k_min, grace_s)
        replies = await self._all(asks, rule, self._forward)
        shortage = rule.shortage()
        if shortage is not None:
            self.figures.short += 1
            raise TooFewExperts(shortage)
        return replies

    async def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        """Gradients of the inputs, None for experts that failed: these count as constants (no gradient).

        Each expert that answers has made an update.
        """
        self._check_asks(asks, 2)
        rule = AnswerRule([(ask.uid, ()) for ask in asks], 0, 0, math.inf)
        return await self._all(asks, rule, self._backward)

    def status(self) -> dict[str, Any]:
        """Plain data for `peerd status`."""
        return {**self.figures.status(), "limit_s": self._limit.seconds, "directory": self._directory.status()}

    def _check_asks(self, asks: Sequence[ExpertCall], frames: int) -> None:
        """Raise LocalError if these calls are malformed."""
        for ask in asks:
            if not self._grid.is_expert(ask.uid):
                raise LocalError(f"{ask.uid} is no expert of the grid {self._grid}")
            rows = {frame.shape[:1] for frame in ask.frames}
            if len(ask.frames) != frames or rows != {(len(ask.samples),)}:
                raise LocalError(f"{len(ask.samples)} samples for expert {ask.uid} with {len(ask.frames)} frames")
            if frames > 1 and ask.served is None:
                raise LocalError(f"a backward of expert {ask.uid} without the host that answered its forward")

    async def _run(self, job: Callable[[], T]) -> T:
        return await self._worker.run(job, name="choose experts")

    # --- rounds ------------------------------------------------------------------------------------------------

    async def _all(
        self, asks: Sequence[ExpertCall], rule: AnswerRule, ask_one: Callable[[ExpertCall, float], Any]
    ) -> list[ExpertReply | None]:
        """Make all calls concurrently until the rule ends the round."""
        began, limit_s = trio.current_time(), self._limit.seconds
        turn = _Round(rule, [None] * len(asks), began)
        rule.begin(began, limit_s)
        deadline = began + limit_s
        async with trio.open_nursery() as nursery:
            for number, ask in enumerate(asks):
                nursery.start_soon(self._one, turn, number, partial(ask_one, ask, deadline))
            while not rule.over(trio.current_time()):
                with trio.move_on_at(rule.wake_at()):
                    await turn.changed.wait()
            nursery.cancel_scope.cancel()
        self._end(turn, asks, limit_s, timed_out=trio.current_time() >= deadline)
        return turn.replies

    def _end(self, turn: _Round, asks: Sequence[ExpertCall], limit_s: float, *, timed_out: bool) -> None:
        """Adapt the limit after a round, and judge the hosts that did not answer.

        If no host answered in time, the limit may have been too short, so no host rests.
        """
        late = turn.rule.late() if trio.current_time() > turn.began else []
        few = turn.rule.shortage() is not None or not turn.took
        self._limit.ended(limit_s, turn.took, in_vain=few and timed_out and bool(turn.slow or late))
        self.figures.late += len(late)
        for number in (*late, *turn.slow):
            self._overdue(asks[number], limit_s if timed_out else None, rests=bool(turn.took))

    async def _one(self, turn: _Round, number: int, ask_one: Callable[[], Any]) -> None:
        try:
            reply: ExpertReply = await ask_one()
        except RemoteError as error:
            turn.rule.failed(trio.current_time(), number, _reason_text(error))
            if isinstance(error, TooSlow):
                turn.slow.append(number)
        else:
            if turn.rule.answered(trio.current_time(), number):
                turn.replies[number] = reply
                turn.took.append(trio.current_time() - turn.began)
        turn.changed.notify()

    # --- calls -------------------------------------------------------------------------------------------------

    async def _forward(self, ask: ExpertCall, deadline: float) -> ExpertReply:
        claim = self._directory.owner(ask.uid)
        if claim is None:
            await self._directory.below([ask.uid.prefix])
            claim = self._directory.owner(ask.uid)
        if claim is None:
            self.figures.failed["gone"] += 1
            raise Unreachable("no host that can be called announces it")
        try:
            return await self._forward_at(claim, ask, deadline, follows=claim.generation)
        except _MovedError as moved:
            return await self._forward_at(moved.to, ask, deadline)

    async def _forward_at(
        self, claim: CachedClaim, ask: ExpertCall, deadline: float, follows: int | None = None
    ) -> ExpertReply:
        body = Forward(self._fingerprint, Name.of(ask.uid))

        async def call() -> ExpertReply:
            answer = await self._call(claim.host, _FORWARD, body, Output, ask, deadline)
            await self._outputs.check(answer, len(ask.samples))
            told = answer.body
            if told.generation < claim.generation:
                raise ProtocolViolation(f"generation {told.generation} of {claim.generation} that it claims")
            self.figures.note_version(ask.uid, told.generation, told.version)
            return ExpertReply(answer.frames[0], ServedBy(claim.host.text, told.generation, told.version))

        reply = await self._guarded(ask.uid, claim.host, call, deadline, follows, backward=False)
        self.figures.forwards += 1
        return reply

    async def _backward(self, ask: ExpertCall, deadline: float) -> ExpertReply:
        served, request = ask.served, self._clock.secure_bytes(16)
        assert served is not None
        host = PeerId.parse(served.host)
        try:
            return await self._backward_at(host, request, ask, deadline, follows=served.generation)
        except _MovedError as moved:
            return await self._backward_at(moved.to.host, request, ask, deadline)

    async def _backward_at(
        self, host: PeerId, request: bytes, ask: ExpertCall, deadline: float, follows: int | None = None
    ) -> ExpertReply:
        served = ask.served
        assert served is not None
        named = (Name.of(ask.uid), request, served.generation, served.version)
        body = Backward(self._fingerprint, *named, self._section.most_stale)

        async def call() -> ExpertReply:
            answer = await self._call(host, _BACKWARD, body, Gradient, ask, deadline)
            await self._gradients.check(answer, len(ask.samples))
            told = answer.body
            if told.generation < served.generation or not told.version:
                raise ProtocolViolation(f"update {told.version} of generation {told.generation}")
            self.figures.note_version(ask.uid, told.generation, told.version)
            stale = max(0, told.version - 1 - served.version)  # negative if the expert was restored with an older state
            return ExpertReply(answer.frames[0], ServedBy(host.text, told.generation, told.version), stale)

        reply = await self._guarded(ask.uid, host, call, deadline, follows, backward=True)
        self.figures.note_backward(reply.stale)
        return reply

    async def _moved(self, uid: Uid, refused: PeerId, generation: int) -> CachedClaim | None:
        """The claim of the host to which an expert has moved from the one that refused, or None if none is known."""
        now = self._clock.now()
        if now - self._looked_again.get(uid.prefix, -math.inf) >= _LOOK_AGAIN_S:
            self._looked_again[uid.prefix] = now
            self._directory.forget(uid)
        await self._directory.below([uid.prefix])
        claim = self._directory.owner(uid)
        return claim if claim is not None and claim.host != refused and claim.generation > generation else None

    async def _call(
        self, host: PeerId, method: str, body: Forward | Backward, reply: type[Any], ask: ExpertCall, deadline: float
    ) -> Answer[Any]:
        check = self._outputs if method == _FORWARD else self._gradients
        most_bytes = check.most_bytes(len(ask.samples))
        timeout_s = max(0.0, deadline - trio.current_time())
        return await self._rpc.call(
            host, method, body, reply, frames=ask.frames, timeout_s=timeout_s, reply_frame_bytes=most_bytes
        )

    async def _guarded(
        self, uid: Uid, host: PeerId, call: Callable[[], Any], deadline: float, follows: int | None, *, backward: bool
    ) -> ExpertReply:
        """Make one call; repeat it while the host is overloaded, and a backward, which counts once, after a lost link.

        `follows`: if the host refuses, look for the expert at another host in a generation beyond this one.
        """
        started, repeats = trio.current_time(), _REPEATS if backward else 0
        while True:
            try:
                reply: ExpertReply = await call()
            except Overloaded as error:
                self.figures.failed["overloaded"] += 1
                pause_s = min(max(error.retry_after_s, _SOONEST_S), _LATEST_S)
                if trio.current_time() + pause_s >= deadline:
                    raise
            except Unreachable as error:
                if not repeats:
                    raise self._failed(uid, host, error, backward=backward) from None
                repeats, pause_s = repeats - 1, _REPEAT_S
            except Refused as error:
                if follows is not None and (moved := await self._moved(uid, host, follows)) is not None:
                    raise _MovedError(moved) from None
                raise self._failed(uid, host, error.blame(host), backward=backward) from None
            except TooSlow:
                raise  # judged at the end of the round
            except RemoteError as error:
                raise self._failed(uid, host, error.blame(host), backward=backward) from None
            else:
                self._directory.rests.answered(host, uid)
                self._late.pop(host, None)
                self.figures.seconds += trio.current_time() - started
                return reply
            self.figures.repeats += 1
            await trio.sleep(pause_s)

    # --- outcomes ----------------------------------------------------------------------------------------------

    def _failed(self, uid: Uid, host: PeerId, error: RemoteError, *, backward: bool, rests: bool = True) -> RemoteError:
        """Count and log a failure. Unless `rests` is False, avoid the host for a while, for this or for any expert.

        A refused backward may only be too old or a repeat, so it does not count against the expert.
        """
        reason = reason_of(error)
        self.figures.failed[reason] += 1
        kept_from, now = self._directory.rests, self._clock.now()
        rested = kept_from.rests(now, host, uid)
        if not rests:
            times = 1
        elif not isinstance(error, Refused):
            times = kept_from.failed(now, host)
        elif backward:
            times = 1
        else:
            times = kept_from.failed(now, host, uid)
            self._directory.forget(uid)
        level = logging.INFO if times == 1 and not rested else logging.DEBUG  # log only the first failure as info
        log.log(level, "expert %s %s: %s", uid, reason, error)
        return error

    def _overdue(self, ask: ExpertCall, limit_s: float | None, *, rests: bool) -> None:
        """Handle a host that has not answered. This is a failure if the round lasted for its limit, or if the host is
        late repeatedly.

        `limit_s`: that limit; None if the round ended earlier. `rests`: after a failure the host is not called for a
        while.
        """
        claim = self._directory.owner(ask.uid)
        host = PeerId.parse(ask.served.host) if ask.served is not None else claim.host if claim is not None else None
        if host is None:
            return
        self._late[host] = times = self._late.get(host, 0) + 1
        if limit_s is not None:
            error = TooSlow(f"no answer within {limit_s:.3g} s", host)
        elif times >= _LATE_IN_A_ROW:
            error = TooSlow(f"{times} answers in a row came late or never", host)
        else:
            return
        self._failed(ask.uid, host, error, backward=ask.served is not None, rests=rests)


class _MovedError(Exception):
    """An expert is no longer at the host that was called. `to`: the claim that counts now."""

    def __init__(self, to: CachedClaim) -> None:
        super().__init__(f"it is at peer {to.host} now")
        self.to = to


def _reason_text(error: RemoteError) -> str:
    return f"was {reason_of(error)}: {error}"
