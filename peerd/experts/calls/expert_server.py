"""Serving of experts: answers `expert/1/forward` and `expert/1/backward` for the experts that this peer hosts.

Calls wait in the merge queue and are computed in batches on the device's worker. A queued backward counts once, no
matter how often it is repeated, and is withdrawn only if its computation has not begun and no caller waits for it. The
host decides which experts are hosted; the server looks them up, and `forget` reports one that is gone.

A hostile caller may send calls for experts outside the grid or not served here, rows, shapes and dtypes that do not fit
the run file (refused by the frames' headers, before the payloads arrive), values that are not finite, a backward of
another run or generation, the same backward repeatedly, and any number of calls. Each of these affects only its own
caller; protocol errors are logged with the caller's name, a few lines a minute at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import trio

from peerd.codec.format.frame import FrameHeader, TensorFrame
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import NoMemory, Overloaded, PeerdError, ProtocolViolation, Refused, other_run_file
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_QUEUED, EXPERT_QUEUED_PER_CALLER, RPC_MESSAGE_FRAME_BYTES
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.experts.calls.expert_batch import BatchPart, ExpertModel, Frames, Result, compute_batch, too_old
from peerd.experts.rules.kept_answers import KeptAnswers, Known
from peerd.experts.rules.merge_queue import MergeQueue, QueueBounds, Queued
from peerd.messages.experts import Backward, Forward, Gradient, Output
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.grid import Uid, grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile, fingerprint
from peerd.wire.rate.quota import LogLimit

__all__ = ["ExpertModel", "ExpertServer", "HostedModel", "ServerConfig"]

_log = logging.getLogger("peerd.experts")
_AHEAD: Final = 2  # batches at the worker, so that the device never idles; with more, fewer requests would be merged
_BACKWARD_COST: Final = 3.0  # cost of a sample in forward passes: forward again, backward, update
_NAMED_S: Final = 30.0  # time between two log lines about a caller's protocol errors, or about a lack of memory
_NO_MEMORY_S: Final = 1.0  # retry delay for a request that found no memory
_MORE_CALLS: Final = 32  # calls of one caller beyond the waiting ones, as running ones and repeats also count
_SLACK_BYTES: Final = 64 << 10  # by which encoded frames may exceed their samples
_FORWARD: Final = Declaration(
    shows=Shows.NOTHING,
    rows=Needs.EXPERT_BATCH,
    memory_bytes=Needs.EXPERT_BATCH,
    device_s=Needs.EXPERT_BATCH,
    frames=1,
    frame_bytes=RPC_MESSAGE_FRAME_BYTES,
    calls_per_peer=EXPERT_QUEUED_PER_CALLER + _MORE_CALLS,
    calls=2 * EXPERT_QUEUED,
)
DECLARED: Final = {"expert/1/forward": _FORWARD, "expert/1/backward": replace(_FORWARD, frames=2)}
_GONE: Final = 4096  # number of formerly hosted experts remembered, with the reason

Contain = Callable[[Callable[[], Awaitable[None]], Callable[[], str]], Awaitable[bool]]
Line = tuple[Uid, bool]  # (expert, is a backward)


class HostedModel(Protocol):
    """An expert that this peer hosts."""

    @property
    def model(self) -> ExpertModel: ...

    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server. `cost_s`, for simulations: the time of a batch, by (is a backward, samples)."""

    cost_s: Callable[[bool, int], float] = lambda backward, samples: 0.0


@dataclass(slots=True)
class ServingStats:
    """Counters since the start."""

    forwards: int = 0  # requests answered
    backwards: int = 0
    updates: int = 0
    batches: int = 0
    samples: int = 0
    repeats: int = 0  # backwards already made or running
    stale: int = 0  # backwards that were too old for their callers
    refused: int = 0  # calls that broke the protocol
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Offer:
    """One waiting call, with its frames."""

    frames: Frames


@dataclass(slots=True, eq=False)
class _Request:
    """One request in the queue, and the calls that wait for it: more than one if it was repeated."""

    peer: PeerId
    body: Forward | Backward
    offers: list[_Offer] = field(default_factory=list)
    done: trio.Event = field(default_factory=trio.Event)
    answer: Answer[Any] | None = None
    failure: PeerdError | None = None

    @property
    def kept_as(self) -> tuple[Uid, bytes] | None:
        """The key of an update's kept answer; None for a forward."""
        return (self.body.expert.uid, self.body.request) if isinstance(self.body, Backward) else None

    def settle(self, result: Answer[Any] | PeerdError) -> None:
        if isinstance(result, Answer):
            self.answer = result
        else:
            self.failure = result
        self.done.set()


_Queued = Queued[Line, _Request]


class ExpertServer:
    """Serves the experts of one host. `experts` are those hosted now."""

    def __init__(
        self,
        run: RunFile,
        rpc: Rpc,
        clock: Clock,
        experts: Mapping[Uid, HostedModel],
        config: ServerConfig | None = None,
    ) -> None:
        section = run.experts or ExpertsSection()
        self.stats = ServingStats()
        self.grid = grid_of(run)
        self._rpc, self._clock = rpc, clock
        self._experts, self._config = experts, config or ServerConfig()
        self._fingerprint = fingerprint(run)
        self._shapes, self._dtype = sample_shapes(run), section.dtype
        self._max_batch = section.max_batch
        self._queue: MergeQueue[Line, _Request] = MergeQueue(QueueBounds(max_batch=section.max_batch))
        self._kept: KeptAnswers[tuple[Uid, bytes], _Queued, Answer[Any]] = KeptAnswers()
        self._computing: dict[_Queued, None] = {}
        self._came, self._settled = Signal(), Signal()
        self._free_at = -math.inf
        self._gone = BoundedDict[Uid, str](_GONE)
        self._log_limit = LogLimit[PeerId | None](_NAMED_S)  # by caller; None for a lack of memory

    async def run(
        self,
        worker: Worker,
        contain: Contain,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled. `contain` runs work that may fail because of a bug of our own, as
        `Host.supervise` does.
        """
        self._serve()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(_AHEAD):
                    nursery.start_soon(self._work, worker, contain)
                task_status.started()
        finally:
            self._rpc.unserve("expert/1")
            for queued in list(self._computing):
                self._settle(queued, Refused("this peer is leaving"))
            while batch := self._queue.take():
                for queued in batch:
                    self._settle(queued, Refused("this peer is leaving"))

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    def queue_s(self) -> float:
        """Seconds that a new request would wait."""
        return self._queue.wait_s()

    async def hold(self, uid: Uid) -> None:
        """Pause updates of an expert until `release` or `forget`; returns when no update is running."""
        self._queue.hold((uid, True))
        while any(queued.line == (uid, True) for queued in self._computing):
            await self._settled.wait()

    def release(self, uid: Uid) -> None:
        """Resume updates of an expert, beginning with those that waited."""
        self._queue.release((uid, True))
        self._came.notify()

    def forget(self, uid: Uid, why: str) -> None:
        """Refuse waiting and later calls for an expert that is no longer hosted, with the reason `why`."""
        self._gone[uid] = why
        for backward in (False, True):
            for queued in self._queue.clear((uid, backward)):
                self._settle(queued, self._not_here(uid))

    # --- calls --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        kinds: dict[str, tuple[Any, Any]] = {
            "forward": (Forward, self._forward),
            "backward": (Backward, self._backward),
        }
        objection: Callable[[PeerId, Any], PeerdError | None] = self._objection
        for name, expected in (("forward", self._shapes[:1]), ("backward", self._shapes)):
            size = sum(4 * self._max_batch * math.prod(shape) for shape in expected) + _SLACK_BYTES
            method = f"expert/1/{name}"
            declared = replace(DECLARED[method], frame_bytes=min(size, RPC_MESSAGE_FRAME_BYTES))
            request, handler = kinds[name]
            frames = partial(self._frames_objection, expected)
            self._rpc.serve(method, request, handler, declared=declared, objection=objection, frames_objection=frames)

    def _objection(self, peer: PeerId, body: Forward | Backward) -> PeerdError | None:
        """Reason to refuse a call, from its body alone, or None."""
        uid = body.expert.uid
        if body.run != self._fingerprint:
            return other_run_file()
        if not self.grid.is_expert(uid):
            sides = " x ".join(map(str, self.grid.sides))
            return self._blame(f"expert {uid} is not in the grid of {self.grid.layers} layers of {sides}", peer)
        if isinstance(body, Backward) and self._known(peer, body) is not Known.NEW:
            return None
        hosted = self._experts.get(uid)
        if hosted is None:
            return self._not_here(uid)
        if isinstance(body, Backward) and (stale := self._stale(hosted, body)) is not None:
            return stale
        full = self._queue.objection(peer.text)
        if full is not None:
            self._name(str(full), peer)
        return full

    def _stale(self, hosted: HostedModel, body: Backward) -> Refused | None:
        """Reason why a backward is too old for its caller, or None; checked again when it is computed."""
        if body.most_stale < 0:
            return None
        uid, age = body.expert.uid, hosted.model.version - body.version
        if body.generation != hosted.generation:
            why = f"expert {uid} is of generation {hosted.generation} now, its forward was of {body.generation}"
        elif age > body.most_stale:
            why = too_old(age, body.most_stale)
        else:
            return None
        self.stats.stale += 1
        return Refused(why)

    def _frames_objection(
        self, expected: Sequence[tuple[int, ...]], peer: PeerId, headers: Sequence[FrameHeader | TensorFrame]
    ) -> PeerdError | None:
        """Reason to refuse a call, from the headers of its frames, or None."""
        if len(headers) != len(expected):
            return self._blame(f"a call with {len(headers)} frames; expected {len(expected)}", peer)
        for header, sample in zip(headers, expected, strict=True):
            if header.dtype != self._dtype:
                return self._blame(f"samples in {header.dtype}; this run's are in {self._dtype}", peer)
            if header.shape[1:] != sample or not header.shape:
                told = f"[rows, {', '.join(map(str, sample))}]"
                return self._blame(f"a frame of shape {list(header.shape)}; expected {told}", peer)
        rows = {header.shape[0] for header in headers}
        if len(rows) != 1 or not 1 <= min(rows) <= self._max_batch:
            allowed = f"allowed: 1 to {self._max_batch} (experts.max_batch), as many in each frame"
            return self._blame(f"a call with {' and '.join(map(str, sorted(rows)))} samples; {allowed}", peer)
        return None

    def _blame(self, why: str, peer: PeerId) -> ProtocolViolation:
        """A ProtocolViolation of the caller, which is also counted and logged."""
        self.stats.refused += 1
        self._name(why, peer)
        return ProtocolViolation(why, peer)

    def _name(self, why: str, peer: PeerId) -> None:
        """Log a caller's fault, at most once in 30 s."""
        if self._log_limit.may_log(self._clock.now(), peer):
            _log.warning("refused a call of peer %s: %s", peer, why)

    def _tell_of_memory(self, reason: str) -> None:
        if self._log_limit.may_log(self._clock.now(), None):
            _log.warning("experts cannot compute: %s", reason)

    def _not_here(self, uid: Uid) -> Refused:
        why = self._gone.get(uid)
        return Refused(f"expert {uid} is not served here{f' any more: {why}' if why else ''}")

    def _known(self, peer: PeerId, body: Backward) -> Known:
        return self._kept.look(self._clock.now(), peer.text, (body.expert.uid, body.request))

    async def _forward(self, call: Incoming[Forward]) -> Answer[Any]:
        return await self._answer(self._queue_up(call, backward=False), call)

    async def _backward(self, call: Incoming[Backward]) -> Answer[Any]:
        name, caller = (call.body.expert.uid, call.body.request), call.peer.text
        known = self._known(call.peer, call.body)
        if known is Known.NEW:
            queued = self._queue_up(call, backward=True)
            self._kept.begin(caller, name, queued)
            return await self._answer(queued, call)
        self.stats.repeats += 1
        if known is Known.KEPT:
            return self._kept.answer(caller, name)
        if known is Known.FORGOTTEN:
            raise Refused("this update was made, but its answer is no longer kept")
        queued = self._kept.under_way(caller, name)
        if call.frames[0].shape[0] != queued.samples:
            raise self._blame(f"a repeat with {call.frames[0].shape[0]} samples of {queued.samples}", call.peer)
        return await self._answer(queued, call)

    def _queue_up(self, call: Incoming[Any], *, backward: bool) -> _Queued:
        uid, samples = call.body.expert.uid, call.frames[0].shape[0]
        if uid not in self._experts:  # it left while the frames arrived
            raise self._not_here(uid)
        cost = samples * (_BACKWARD_COST if backward else 1.0)
        queued = Queued((uid, backward), call.peer.text, samples, cost, _Request(call.peer, call.body))
        refusal = self._queue.put(self._clock.now(), queued)
        if refusal is not None:
            raise refusal
        self._came.notify()
        return queued

    async def _answer(self, queued: _Queued, call: Incoming[Any]) -> Answer[Any]:
        """Wait for a request's answer. If the last waiting call is cancelled, the request is withdrawn."""
        request, offer = queued.request, _Offer(call.frames)
        request.offers.append(offer)
        try:
            await request.done.wait()
        finally:
            request.offers.remove(offer)
            if not request.offers and self._queue.withdraw(queued):
                self._settle(queued, Refused("its caller left"))
        if request.failure is not None:
            raise request.failure
        assert request.answer is not None
        return request.answer

    # --- batches ------------------------------------------------------------------------------------------------

    async def _work(self, worker: Worker, contain: Contain) -> None:
        while True:
            batch = self._queue.take()
            if not batch:
                await self._came.wait()
                continue
            uid, backward = batch[0].line
            about = f"a {'backward' if backward else 'forward'} of expert {uid}"
            self._computing |= dict.fromkeys(batch)
            parts = [_part(queued.request) for queued in batch]  # now, while each has a waiting caller
            if not await contain(partial(self._compute, worker, batch, parts), partial(str, about)):
                for queued in batch:
                    if queued in self._computing:
                        self._settle(queued, Refused(f"{about} failed here, not by the caller's fault"))

    async def _compute(self, worker: Worker, batch: Sequence[_Queued], parts: Sequence[BatchPart]) -> None:
        (uid, backward), began = batch[0].line, self._clock.now()
        hosted = self._experts.get(uid)
        if hosted is None:
            for queued in batch:
                self._settle(queued, self._not_here(uid))
            return
        generation, samples = hosted.generation, sum(queued.samples for queued in batch)
        try:
            results = await worker.run(
                partial(compute_batch, hosted.model, backward, parts),
                name="expert backward" if backward else "expert forward",
                cost_s=self._config.cost_s(backward, samples),
            )
        except NoMemory as error:
            self._tell_of_memory(str(error))
            for queued in batch:
                self._settle(queued, Overloaded("no memory is left for it", _NO_MEMORY_S))
            return
        self._count(batch, results, began)
        for queued, result in zip(batch, results, strict=True):
            self._settle(queued, self._told(queued, result, generation, began))

    def _count(self, batch: Sequence[_Queued], results: Sequence[Result], began: float) -> None:
        now, stats, backward = self._clock.now(), self.stats, batch[0].line[1]
        seconds = now - max(began, self._free_at)  # without the time in which another batch was computed
        self._free_at = now
        good = [queued for queued, result in zip(batch, results, strict=True) if result.frame is not None]
        self._queue.served(sum(queued.cost for queued in batch), seconds)
        stats.busy_s += seconds
        stats.batches += 1
        stats.samples += sum(queued.samples for queued in good)
        stats.stale += sum(result.stale for result in results)
        if backward:
            stats.backwards += len(good)
            stats.updates += len({result.version for result in results if result.frame is not None})
        else:
            stats.forwards += len(good)

    def _told(self, queued: _Queued, result: Result, generation: int, began: float) -> Answer[Any] | PeerdError:
        """The answer to one request, or its error."""
        if result.frame is None:
            return Refused(result.fault) if result.stale else self._blame(result.fault, queued.request.peer)
        waited_s = min(1e6, max(0.0, began - queued.since))
        kind = Gradient if queued.line[1] else Output
        return Answer(kind(generation, result.version, waited_s), (result.frame,))

    def _settle(self, queued: _Queued, result: Answer[Any] | PeerdError) -> None:
        """End a request: keep an update's answer, or drop the record that it was begun."""
        self._computing.pop(queued, None)
        name = queued.request.kept_as
        if name is not None:
            if isinstance(result, Answer):
                size = sum(memoryview(frame.payload).nbytes for frame in result.frames)
                self._kept.finish(self._clock.now(), queued.caller, name, result, size)
            else:
                self._kept.give_up(queued.caller, name)
        queued.request.settle(result)
        self._settled.notify()


def _part(request: _Request) -> BatchPart:
    frames = request.offers[0].frames
    body = request.body
    return BatchPart(frames, body.version, body.most_stale) if isinstance(body, Backward) else BatchPart(frames)
