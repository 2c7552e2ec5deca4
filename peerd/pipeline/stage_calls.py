"""Dispatch of `stage/6` and `handover/2` calls on one peer: each goes to the post that serves the stage it names.

One process may have several posts: stages that it serves, and stages for which it sums as a helper. The methods are
served from the start of the first post to the end of the last one. In one stage a peer is either a member or a helper:
a helper ends when a post of the same stage begins. Hostile calls are refused before their frames are received: calls of
another run, to stages not served here, of methods that the post does not answer, with tensors of impossible shapes, and
orders of a peer other than the conductor that this peer follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import trio

from peerd.core.errors import LocalError, PeerdError, Refused, other_run_file
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_ROUND_DEADLINE_S, STREAMS_INBOUND
from peerd.core.signals import Signal
from peerd.messages.handover import PassRequest
from peerd.messages.swarm import Commit, Prepare, Relocate, Restore, StageForward, StageLoss
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.runfile import RunFile, fingerprint

Handler = Callable[[Incoming[Any]], Awaitable[Answer[Any]]]
Objection = Callable[[PeerId, Any], PeerdError | None]

_ORDERS: Final = Declaration(
    shows=Shows.CONDUCTOR, rows=None, memory_bytes=0, device_s=0.0, body_bytes=1 << 20, calls_per_peer=4
)
_WORK: Final = Declaration(
    shows=Shows.GRANT,
    rows=Needs.MICROBATCH,
    memory_bytes=Needs.MICROBATCH,
    device_s=Needs.MICROBATCH,
    frames=2,
    frame_bytes=256 << 20,
    calls_per_peer=64,
    calls=2048,
)
# A microbatch's call stays open until its gradient comes back. `Room` and the post limit its memory in bytes.
_WAY: Final = replace(_WORK, calls_per_peer=STREAMS_INBOUND - 32, calls=2048)
_METHODS: Final = {
    "prepare": ("stage/6/prepare", Prepare, replace(_ORDERS, deadline_s=RPC_ROUND_DEADLINE_S)),
    "commit": ("stage/6/commit", Commit, _ORDERS),
    "restore": ("stage/6/restore", Restore, _ORDERS),
    "transfer": ("stage/6/relocate", Relocate, _ORDERS),
    "forward": ("stage/6/forward", StageForward, _WORK),
    "loss": ("stage/6/loss", StageLoss, _WORK),
    "passes": ("handover/2/pass", PassRequest, _WAY),
}
DECLARED: Final = {method: declared for method, _, declared in _METHODS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHandlers:
    """The calls that one post answers. Methods that are None are refused."""

    prepare: Handler
    commit: Handler | None = None
    restore: Handler | None = None
    transfer: Handler | None = None
    forward: Handler | None = None
    loss: Handler | None = None
    passes: Handler | None = None
    objections: Mapping[str, Objection] = field(default_factory=dict)  # by method, before the frames
    samples_per_s: Callable[[], float] = lambda: 0.0  # of a device that is never idle; 0 if unknown


class StageCalls:
    """Passes calls to this peer's posts in one run. `conductor` returns the peer whose orders are accepted, or None."""

    def __init__(self, rpc: Rpc, run: RunFile, conductor: Callable[[], PeerId | None]) -> None:
        self._rpc, self._fingerprint, self._conductor = rpc, fingerprint(run), conductor
        self._shapes = MicrobatchShapes(run)
        self._posts: dict[int, StageHandlers] = {}
        self._helpers: dict[int, tuple[StageHandlers, trio.CancelScope]] = {}
        self._changed = Signal()  # notified when a post begins or ends

    @property
    def stages(self) -> list[int]:
        """The stages that this peer serves, in order."""
        return sorted(self._posts)

    def samples_per_s(self, stage: int) -> float:
        """Samples per second that the post of `stage` could compute if it were never idle; 0 if unknown."""
        handlers = self._posts.get(stage)
        return handlers.samples_per_s() if handlers is not None else 0.0

    async def changed(self) -> None:
        """Wait until a post begins or ends."""
        await self._changed.wait()

    @contextmanager
    def serving(self, stage: int, handlers: StageHandlers) -> Iterator[None]:
        """Serve `stage` until the block ends, and cancel a helper of it. Raises LocalError if it is already served."""
        if stage in self._posts:
            raise LocalError(f"stage {stage} is served by this process already")
        with self._open():
            self._posts[stage] = handlers
            if stage in self._helpers:
                self._helpers[stage][1].cancel()
            self._changed.notify()
            try:
                yield
            finally:
                del self._posts[stage]
                self._changed.notify()

    @contextmanager
    def helping(self, stage: int, handlers: StageHandlers) -> Iterator[trio.CancelScope]:
        """Help `stage` until the block ends; cancelled when a post serves it.

        Raises LocalError if this process already serves or helps the stage.
        """
        if stage in self._posts or stage in self._helpers:
            raise LocalError(f"stage {stage} is served or helped by this process already")
        with self._open(), trio.CancelScope() as scope:
            self._helpers[stage] = handlers, scope
            try:
                yield scope
            finally:
                del self._helpers[stage]

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Serve the methods while there are posts."""
        if not self._posts and not self._helpers:
            for name, (method, request, declared) in _METHODS.items():
                answer, objection = partial(self._answer, name), partial(self._objection, name)
                if declared.shows is not Shows.CONDUCTOR:
                    declared = self._shapes.bound(declared)
                self._rpc.serve(
                    method,
                    request,
                    answer,
                    declared=declared,
                    objection=objection,
                    frames_objection=self._shapes.objection if declared.frames else None,
                )
        try:
            yield
        finally:
            if not self._posts and not self._helpers:
                self._rpc.unserve("stage/6")
                self._rpc.unserve("handover/2", {"pass"})

    def _find(self, name: str, peer: PeerId, body: Any) -> tuple[StageHandlers, Handler]:
        """The post that a call is for, and its handler for the method. Raises Refused."""
        if body.run != self._fingerprint:
            raise other_run_file()
        if _METHODS[name][2].shows is Shows.CONDUCTOR and peer != self._conductor():
            raise Refused("this peer does not follow you")
        helper = self._helpers.get(body.stage)
        post = self._posts.get(body.stage) or (helper[0] if helper is not None else None)
        handler: Handler | None = getattr(post, name, None)
        if post is None or handler is None:
            told = f"stage {', '.join(map(str, self.stages))}" if self._posts else "no stage"
            raise Refused(f"this peer serves {told}; the call is for stage {body.stage}")
        return post, handler

    async def _answer(self, name: str, call: Incoming[Any]) -> Answer[Any]:
        _, handler = self._find(name, call.peer, call.body)
        return await handler(call)

    def _objection(self, name: str, peer: PeerId, body: Any) -> PeerdError | None:
        try:
            post, _ = self._find(name, peer, body)
        except Refused as error:
            return error
        judge = post.objections.get(name)
        return judge(peer, body) if judge is not None else None
