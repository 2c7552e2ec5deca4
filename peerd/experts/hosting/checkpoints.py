"""Checkpoints of the experts that this peer hosts: when one is due, on its own disk, and copies at holders (other
hosts).

A checkpoint is a snapshot between two updates, including moments, taken by a job on the device's worker. Its signed
pointer and its bytes are handed to `experts.copies` other peers that offer room. The choice of peers follows from
their ids (`experts.rules.orphan_watch`), so a newer checkpoint usually goes to the holders of the previous one and
replaces it. A full disk or missing holders cost only copies: `problem` reports them, and the copy is tried again. An
expert that never made an update needs no checkpoint, because its weights follow from the run's seed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import digests_of
from peerd.experts.rules.orphan_watch import HolderRoom, choose_holders
from peerd.messages.experts import CheckpointRef, HolderOffer, Name, PreviousOwner, state_root
from peerd.role.role import RoleContext
from peerd.run.grid import Uid

_AT_ONCE: Final = 2  # snapshots in memory at once
_TICK_S: Final = 1.0  # longest time between two checks of what is due
_AGAIN_S: Final = 5.0  # pause before the next search for holders; doubles
_LONGEST_S: Final = 60.0
_ANSWER_S: Final = 2.0  # for a holder to answer a probe, as a lost one would delay all other checkpoints


class SnapshotModel(Protocol):
    """An expert's model that can save its state: `experts.model.hosted_expert.HostedExpert`."""

    @property
    def version(self) -> int: ...

    def snapshot(self) -> bytes:
        """The complete state. Runs as a job on the device's worker."""
        ...


class HostedState(Protocol):
    """An expert that this peer hosts."""

    @property
    def model(self) -> SnapshotModel: ...
    @property
    def generation(self) -> int: ...


class AdoptingHost(Protocol):
    """What checkpoints and adoption need from this peer's `ExpertHost`."""

    @property
    def experts(self) -> Mapping[Uid, HostedState]: ...

    async def adopt(self, uid: Uid, generation: int, state: bytes | bytearray | None) -> None:
        """Host an expert, from `state` or, if that is None, from its initial weights.

        Raises ValueError if the state does not fit or contains NaN.
        """
        ...

    async def tell(self, uid: Uid) -> None:
        """Announce an expert that was just adopted; returns when others can read it."""
        ...

    async def drop(self, uid: Uid, why: str) -> None:
        """Stop hosting it."""
        ...

    def room(self) -> int:
        """Number of experts that still fit."""
        ...


@dataclass(slots=True)
class _Safe:
    """Record of one expert's newest checkpoint and of its holders."""

    generation: int
    version: int  # of the newest checkpoint
    began: int  # version at which the generation began
    former: PreviousOwner | None = None  # the checkpoint from which the generation continued
    pointer: CheckpointRef | None = None
    holders: set[PeerId] = field(default_factory=set)
    unsaved_since: float | None = None
    failures: int = 0
    again_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _HostSigner:
    peer_id: PeerId
    sign_with: Callable[[bytes], bytes]

    def sign(self, data: bytes, /) -> bytes:
        return self.sign_with(data)


class ExpertCheckpoints:
    """Writes and copies the checkpoints of one host's experts. `run` does the work."""

    def __init__(self, ctx: RoleContext, vault: Vault, host: AdoptingHost) -> None:
        assert ctx.run is not None
        assert ctx.run.experts is not None
        self.problem: str | None = None
        self.written = 0  # number of checkpoints
        self._ctx, self._vault, self._host, self._section = ctx, vault, host, ctx.run.experts
        self._device, self._files = ctx.worker(ctx.device), ctx.worker("files")
        self._signer = _HostSigner(ctx.host.id, ctx.host.sign)
        self._safe: dict[Uid, _Safe] = {}
        self._busy: set[Uid] = set()
        self._offers: dict[PeerId, HolderOffer] = {}
        self._offers_at = -float("inf")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write checkpoints that are due, and ensure that they have enough copies, until cancelled."""
        tick_s = min(_TICK_S, self._section.checkpoint_s / 2, self._section.announce_s / 4)
        task_status.started()
        while True:
            await self._look_for_holders()
            await self._each(self._due(trio.current_time()), self._save)
            await self._each(self._uncopied(trio.current_time()), self._copy)
            await trio.sleep(tick_s)

    async def leave(self) -> None:
        """Save experts whose current state has no checkpoint, before the experts are given up."""
        await self._each([uid for uid, safe in self._known().items() if self._is_unsaved(uid, safe)], self._save)

    def began(self, uid: Uid, generation: int, version: int, former: PreviousOwner | None) -> None:
        """Record that this peer now hosts an expert in this state; a checkpoint of the new generation is due at once.

        `former` is the checkpoint from which the expert continues.
        """
        self._safe[uid] = _Safe(generation - 1, version, version, former)
        self._vault.directory.lineages.took(trio.current_time(), uid, generation, former)

    def kept_version(self, uid: Uid) -> int:
        """Number of the expert's updates in its newest checkpoint, here or at holders."""
        safe = self._safe.get(uid)
        return safe.version if safe is not None else 0

    def origin(self, uid: Uid) -> tuple[int, PreviousOwner | None]:
        """Number of the expert's updates when its generation began here, and the checkpoint that it continued from."""
        safe = self._safe.get(uid)
        return (safe.began, safe.former) if safe is not None else (0, None)

    def status(self) -> dict[str, object]:
        """Numbers of checkpoints, copies and unsaved updates, for `peerd status`."""
        known = self._known().items()
        copies = [len(safe.holders) for _, safe in known if safe.pointer is not None]
        unsaved = sum(max(0, self._host.experts[uid].model.version - safe.version) for uid, safe in known)
        return {
            "checkpoints": self.written,
            "copies_least": min(copies, default=None),
            "updates_unsaved": unsaved,
            "problem": self.problem or self._vault.problem,
        }

    # --- what is due ------------------------------------------------------------------------------------------

    def _known(self) -> dict[Uid, _Safe]:
        """The records of the experts hosted now."""
        for uid in [uid for uid in self._safe if uid not in self._host.experts]:
            if uid not in self._busy:
                del self._safe[uid]
        for uid, hosted in self._host.experts.items():
            if uid not in self._safe:
                self._safe[uid] = self._first(uid, hosted)
        return {uid: self._safe[uid] for uid in self._host.experts}

    def _first(self, uid: Uid, hosted: HostedState) -> _Safe:
        """The record of an expert that we see for the first time: it came from our own disk, or is new."""
        pointer = self._vault.own(uid)
        if pointer is not None and pointer.generation == hosted.generation:
            return _Safe(pointer.generation, pointer.version, pointer.began, pointer.former, pointer)
        began = hosted.model.version
        return _Safe(0 if hosted.generation == 0 else hosted.generation - 1, 0, began)

    def _is_unsaved(self, uid: Uid, safe: _Safe) -> bool:
        hosted = self._host.experts[uid]
        return hosted.generation != safe.generation or hosted.model.version > safe.version

    def _due(self, now: float) -> list[Uid]:
        """Experts whose checkpoint is due, the one that has waited longest first."""
        due = []
        for uid, safe in self._known().items():
            if not self._is_unsaved(uid, safe):
                safe.unsaved_since = None
                continue
            if safe.unsaved_since is None:
                safe.unsaved_since = now
            hosted = self._host.experts[uid]
            many = hosted.model.version - safe.version >= self._section.checkpoint_updates
            long = now - safe.unsaved_since >= self._section.checkpoint_s
            if now >= safe.again_at and (many or long or hosted.generation != safe.generation):
                due.append((safe.unsaved_since, uid))
        return [uid for _, uid in sorted(due)]

    def _uncopied(self, now: float) -> list[Uid]:
        """Experts whose newest checkpoint has too few holders that are still announced."""
        found = []
        for uid, safe in self._known().items():
            if safe.pointer is not None and safe.generation == self._host.experts[uid].generation:
                safe.holders &= self._offers.keys()
                if len(safe.holders) < self._section.copies and now >= safe.again_at:
                    found.append(uid)
        return found

    async def _each(self, uids: Sequence[Uid], work: Callable[[Uid], Awaitable[None]]) -> None:
        limit = trio.CapacityLimiter(_AT_ONCE)

        async def one(uid: Uid) -> None:
            async with limit:
                if uid in self._host.experts and uid not in self._busy:
                    self._busy.add(uid)
                    try:
                        await work(uid)
                    finally:
                        self._busy.discard(uid)

        async with trio.open_nursery() as nursery:
            for uid in uids:
                nursery.start_soon(one, uid)

    # --- a checkpoint -----------------------------------------------------------------------------------------

    async def _save(self, uid: Uid) -> None:
        """Save a checkpoint of an expert's current state."""
        hosted, safe = self._host.experts[uid], self._safe[uid]
        generation = hosted.generation
        pointer, digests, data = await self.snapshot(uid, hosted)
        if self._host.experts.get(uid) is not hosted:
            return  # dropped meanwhile
        version = pointer.version
        with self._vault.lent(pointer, digests, data):
            on_disk = await self._put(pointer, digests, data)
            holders = await self._hand(pointer, set())
        if not on_disk and not holders:
            self._failed(safe)
            return
        self.written += 1
        safe.generation, safe.version, safe.unsaved_since = generation, version, None
        safe.pointer, safe.holders = pointer, holders
        self._ctx.log.event(
            "expert.checkpointed", level="debug", expert=str(uid), version=version, holders=sorted(holders)
        )
        self._count(uid, safe)

    async def snapshot(
        self, uid: Uid, hosted: HostedState, heir: PeerId | None = None
    ) -> tuple[CheckpointRef, bytes, bytes]:
        """The current state of an expert, with its signed pointer and the digests of its pieces.

        `heir` is the host that owns the expert in the next generation, if it takes it.
        """
        generation, model, safe = hosted.generation, hosted.model, self._safe.get(uid)

        def taken() -> tuple[int, bytes]:
            return model.version, model.snapshot()

        version, data = await self._device.run(taken, name="snapshot of an expert")
        digests = await self._files.run(lambda: digests_of(data), name="hash a checkpoint of an expert")
        pointer = CheckpointRef(
            run=self._vault.fingerprint,
            expert=Name.of(uid),
            generation=generation,
            version=version,
            digest=state_root(digests),
            size_bytes=len(data),
            owner=self._ctx.host.id.public_key,
            began=safe.began if safe is not None else 0,
            former=safe.former if safe is not None else None,
            heir=heir.public_key if heir is not None else b"",
        )
        return pointer.signed(self._signer), digests, data

    async def _put(self, pointer: CheckpointRef, digests: bytes, data: bytes) -> bool:
        try:
            await self._vault.put(pointer, digests, data)
        except (OSError, ValueError, RemoteError) as error:
            self._say(f"the checkpoint of expert {pointer.expert.uid} could not be saved on this peer's disk: {error}")
            return False
        return True

    async def _copy(self, uid: Uid) -> None:
        """Send a checkpoint on our disk to further holders."""
        safe = self._safe[uid]
        if safe.pointer is not None:
            safe.holders |= await self._hand(safe.pointer, safe.holders)
            self._count(uid, safe)

    async def _hand(self, pointer: CheckpointRef, holders: set[PeerId]) -> set[PeerId]:
        """Send a checkpoint to further peers until there are enough copies; returns the peers that accepted it."""
        found, uid = set[PeerId](), pointer.expert.uid
        lacking = self._section.copies - len(holders)
        for peer in self._candidates(pointer):
            if len(found) >= lacking:
                break
            if peer in holders or not await self._vault.answers(peer, _ANSWER_S):
                continue
            try:
                await self._vault.hand(pointer, peer)
                found.add(peer)
            except RemoteError as error:
                self._ctx.log.event("expert.not_held", level="debug", expert=str(uid), peer=peer, reason=str(error))
        return found

    def _candidates(self, pointer: CheckpointRef) -> list[PeerId]:
        links, own = self._ctx.host.links, self._ctx.host
        offers = [
            HolderRoom(peer, offer.room_bytes, place_of(offer.addrs))
            for peer, offer in self._offers.items()
            if not offer.client or links.best(peer) is not None
        ]
        here = HolderRoom(own.id, 0, place_of([str(addr) for addr in own.addrs()]))
        return choose_holders(pointer.expert.uid, here, offers, pointer.size_bytes)

    def _count(self, uid: Uid, safe: _Safe) -> None:
        """Check whether there are enough copies; if not, report that and retry later."""
        lacking = self._section.copies - len(safe.holders)
        if lacking <= 0:
            safe.failures, safe.again_at = 0, 0.0
            if all(len(s.holders) >= self._section.copies for s in self._safe.values() if s.pointer is not None):
                self.problem = None
            return
        self._failed(safe)
        self._say(f"{len(safe.holders)} of {self._section.copies} peers hold the checkpoint of expert {uid}")

    def _failed(self, safe: _Safe) -> None:
        safe.again_at = trio.current_time() + min(_LONGEST_S, _AGAIN_S * 2.0**safe.failures)
        safe.failures = min(safe.failures + 1, 10)

    def _say(self, problem: str) -> None:
        level = "debug" if self.problem is not None else "warning"  # warn once, until all copies exist
        self.problem = problem
        self._ctx.log.event("expert.copies_missing", level=level, reason=problem)

    async def _look_for_holders(self) -> None:
        now = trio.current_time()
        if now - self._offers_at < self._section.announce_s:
            return
        try:
            self._offers = await self._vault.directory.offers()
            self._offers_at = now
        except RemoteError as error:
            self._ctx.log.event("dht.read_failed", level="debug", reason=str(error))


def place_of(addrs: Sequence[str]) -> str:
    """A peer's network location as it announces it: its first address without a relay, without the port."""
    direct = [addr.split("/") for addr in addrs if "p2p-circuit" not in addr]
    return "/".join(direct[0][1:3]) if direct else ""
