"""A conductor's calls to stage peers: average in an attempt, commit, restore, move to another stage.

The orders come from `swarm/steps/conductor`. Each order ends with one event, which is passed to
`OrderContext.tell`; a transfer that is accepted has no event. Makes no decisions. Every call has a deadline. Hostile
answers: the conductor receives each answer as a claim of the member that sent it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import trio

from peerd.averaging.shares import NoSplit
from peerd.averaging.work_split import Split
from peerd.core.errors import Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_ROUND_DEADLINE_S, WAITS_CHARS
from peerd.core.work import Worker
from peerd.messages.encoding import Empty
from peerd.messages.swarm import Commit, Mbs, Moved, Party, Position, Prepare, Prepared, Relocate, Restore
from peerd.rpc.rpc import Rpc
from peerd.swarm.events import (
    ConductorConfig,
    Event,
    MoveEnded,
    PrepareEnded,
    SendMove,
    SendPrepare,
    SendTransfer,
    TransferRefused,
)
from peerd.swarm.posts import peer_of, post_name, stage_of

log = logging.getLogger("peerd.swarm.conductor.orders")

_TRANSFER_TIMEOUT_S = 10.0
_MOVE_TIMEOUT_S = 60.0  # to step or to read a checkpoint; a slower member continues, and reports when done


@dataclass(frozen=True, slots=True)
class ConductingConfig:
    """One run's fingerprint and sizes. `prepare_timeout_s`: for an averaging round, besides the time for its bytes."""

    fingerprint: bytes
    conductor: ConductorConfig
    samples: int  # of the batch
    prepare_timeout_s: float


@dataclass(frozen=True, slots=True)
class OrderContext:
    """The context of orders: their term, their step, and `tell`, which receives the event that ends each order."""

    term: int
    step: int
    tell: Callable[[Event], None]


class Orders:
    """Makes the conductor's calls to members, and cancels those of an averaging attempt together."""

    def __init__(self, config: ConductingConfig, rpc: Rpc) -> None:
        self._config, self._rpc = config, rpc
        self.notes: Callable[[str], None] = log.info
        self.moved: Callable[[str, Position, Moved], None] = lambda post, target, answer: None  # after each commit
        self.solver: Worker | None = None  # None: rate limits between pairs of peers are ignored
        self._attempts: dict[bytes, trio.CancelScope] = {}

    def begin(self, nursery: trio.Nursery, orders: list[SendPrepare], reign: OrderContext) -> None:
        """Start these averaging attempts: order all their members to average."""
        attempts: dict[bytes, list[SendPrepare]] = {}
        for order in orders:
            attempts.setdefault(order.attempt, []).append(order)
        for attempt, found in attempts.items():
            self._attempts[attempt] = trio.CancelScope()
            nursery.start_soon(self._run_attempt, found, reign, self._attempts[attempt])

    def cancel(self, attempt: bytes) -> None:
        """Cancel the calls of an averaging attempt."""
        if scope := self._attempts.pop(attempt, None):
            scope.cancel()

    def cancel_all(self) -> None:
        """Cancel all averaging attempts."""
        for attempt in list(self._attempts):
            self.cancel(attempt)

    async def _run_attempt(self, orders: list[SendPrepare], reign: OrderContext, scope: trio.CancelScope) -> None:
        with scope:
            split = await self._divided(orders[0].split)  # the same for all orders
            orders = [order for order in (replace(order, split=split) for order in orders) if order.takes_part]
            async with trio.open_nursery() as nursery:
                for order in orders:
                    nursery.start_soon(self._prepare, order, reign)
        if self._attempts.get(orders[0].attempt) is scope:
            del self._attempts[orders[0].attempt]

    async def _divided(self, split: Split | None) -> Split | None:
        """The split of the work, solved again if there are rate limits between pairs of peers."""
        if split is None or not split.pairs or self.solver is None:
            return split
        try:
            solved = await self.solver.run(split.within_pairs, name="divide a round")
        except NoSplit as error:  # a pair that cannot send its part fails, and one of the two is excluded
            self.notes(f"rate limits between some pairs of peers were ignored: {error}")
            return split
        # The first split has only the peers that the conductor has chosen, so another one must not add any.
        return solved if {p.peer for p in solved.parties} <= {p.peer for p in split.parties} else split

    async def _prepare(self, order: SendPrepare, reign: OrderContext) -> None:
        """Order one member to average."""
        config, split = self._config, order.split
        body = Prepare(
            config.fingerprint,
            reign.term,
            reign.step,
            order.attempt,
            order.lineage,
            _peers(order.group),
            Mbs.of(order.assigned),
            config.samples,
            min(RPC_ROUND_DEADLINE_S, order.most_s + config.prepare_timeout_s),
            stage=stage_of(order.peer),
            listeners=_peers(order.listeners),
            copy=order.copy,
            copies=order.copies,
            brings=order.brings or None,
            last=order.last,
            second=order.second,
            leads=order.leads,
        )
        if split is not None:
            body = msgspec.structs.replace(
                body,
                split=_parties(split.parties),
                part_bytes=split.part_bytes,
                elements=split.elements,
                dtype=split.dtype,
                further=split.further,
                s_per_byte=split.s_per_byte,
            )
        try:
            peer = PeerId.parse(peer_of(order.peer))
            found = (await self._rpc.call(peer, "stage/6/prepare", body, Prepared, timeout_s=body.timeout_s)).body
            lost = tuple(post_name(one, stage_of(order.peer)) for one in found.lost)
            told = tuple(found.missing), lost, found.digest, tuple(found.refused)
            end = PrepareEnded(order.peer, order.attempt, found.ok, *told, absent=found.absent)
        except RemoteError as error:
            log.info("an averaging attempt failed: %s", error)
            end = PrepareEnded(order.peer, order.attempt, False, declines=isinstance(error, Refused))
        reign.tell(end)

    async def move(self, order: SendMove, reign: OrderContext) -> None:
        """Order one member to commit or restore."""
        position, kind, began = None, Commit if order.commit else Restore, trio.current_time()
        body = kind(self._config.fingerprint, reign.term, order.target, stage_of(order.peer))
        method = "stage/6/commit" if order.commit else "stage/6/restore"
        try:
            peer = PeerId.parse(peer_of(order.peer))
            answer = (await self._rpc.call(peer, method, body, Moved, timeout_s=_MOVE_TIMEOUT_S)).body
            position = answer.position
            if order.commit:
                self.moved(order.peer, order.target, answer)
        except RemoteError as error:
            log.warning("a member did not reach step %d: %s", order.target.step, error)
        slow = trio.current_time() - began >= _MOVE_TIMEOUT_S  # by our own clock, not the member's claim
        reign.tell(MoveEnded(order.peer, position, slow=position is None and slow))

    async def transfer(self, order: SendTransfer, reign: OrderContext) -> None:
        """Order one member to move to another stage. Members' reports show later whether it has moved."""
        body = Relocate(
            self._config.fingerprint, reign.term, stage_of(order.peer), order.target, order.why[:WAITS_CHARS]
        )
        peer = PeerId.parse(peer_of(order.peer))
        try:
            await self._rpc.call(peer, "stage/6/relocate", body, Empty, timeout_s=_TRANSFER_TIMEOUT_S)
        except RemoteError as error:
            self.notes(f"peer {peer.short} stays at stage {body.stage}: {error}")
            reign.tell(TransferRefused(order.peer))


def _peers(posts: Iterable[str]) -> list[str]:
    return [peer_of(post) for post in posts]


def _parties(posts: Iterable[Party]) -> list[Party]:
    return [msgspec.structs.replace(party, peer=peer_of(party.peer)) for party in posts]
