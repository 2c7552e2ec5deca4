"""Vault: the checkpoints of experts that this peer holds, for itself and for others; serves `vault/2`.

`keep` asks it to fetch a checkpoint from the caller, the expert's host; `get` returns pieces of held checkpoints. It
publishes in the directory what it holds and how much space it has. It is limited by `experts.rules.kept_shelf` and by
half of the disk's free space. Needs no torch, because only hosts interpret the bytes.

A hostile peer may ask to keep a checkpoint that it did not sign, that is of another run, too large or beyond its share,
or that it never sends (such a call ends by a deadline set by its size, and their number is limited); it may ask for
pieces that are not held; or offer space and hold nothing (`fetch` checks every piece, and asks other holders). The log
names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, Refused, RemoteError, TooSlow
from peerd.core.ids import PeerId
from peerd.core.limits import (
    EXPERT_TAKING,
    STATE_GIVEN,
    STATE_GIVEN_PER_PEER,
    STATE_LEAST_BYTES_PER_S,
    STATE_PIECE_BYTES,
    STATE_PIECES_PER_DONOR,
)
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.experts.calls.kept_directory import GET, KeptDirectory, VaultPeer
from peerd.experts.calls.vault_disk import VaultDisk
from peerd.experts.calls.vault_fetch import VaultFetch
from peerd.experts.owners.owner_tree import ExpertReign
from peerd.experts.rules.host_share import HostShare
from peerd.experts.rules.kept_shelf import KeptShelf
from peerd.messages.encoding import Empty
from peerd.messages.experts import CheckpointRef, HolderOffer, Keep, Kept, Name, PieceWanted
from peerd.messages.state import Bytes, Pieces
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import RunFile, fingerprint

log = logging.getLogger("peerd.experts.calls.vault")

VAULT_BYTES: Final = 16 << 30  # of disk, by default
KEEP: Final = "vault/2/keep"
_KEPT_AT_ONCE: Final = 8  # checkpoints fetched from hosts concurrently
DECLARED: Final = {
    KEEP: Declaration(
        shows=Shows.OWNER,
        rows=None,
        memory_bytes=STATE_PIECES_PER_DONOR * STATE_PIECE_BYTES,
        device_s=0.0,
        calls_per_peer=2,
        calls=_KEPT_AT_ONCE,
        fetches=True,
    ),
    GET: Declaration(
        shows=Shows.NOTHING,
        rows=None,
        memory_bytes=STATE_PIECE_BYTES,
        device_s=0.0,
        calls_per_peer=STATE_GIVEN_PER_PEER,
        calls=STATE_GIVEN,
    ),
}
_SHAKE_S: Final = 30.0  # time for a hand-over, in addition to the transfer of its bytes
_TOGETHER_S: Final = 0.5  # checkpoints often arrive several at once
_OWNER_S: Final = 2.0  # time to call the known owner before another's checkpoint is kept


class Vault:
    """The vault of one peer. Call `open`, then `run`."""

    def __init__(
        self, run: RunFile, peer: VaultPeer, disk: VaultDisk, worker: Worker, most_bytes: int = VAULT_BYTES
    ) -> None:
        """`worker` is for files and hashes, preferably one that computes nothing else."""
        assert run.experts is not None
        self.directory = KeptDirectory(run, peer, worker)
        self.fingerprint = fingerprint(run)
        self.adopts: Callable[[], bool] = lambda: False  # whether this peer would take over experts now
        self.share: Callable[[], HostShare] = lambda: HostShare(0, 0)  # of this peer's host of experts, for publication
        self.taking: list[Uid] = []  # experts that this peer is about to take over
        self.giving: set[Uid] = set()  # experts that another host is about to take over from this peer
        self.problem: str | None = None  # why the disk rejects checkpoints
        self._announce_s = run.experts.announce_s
        self._grid = grid_of(run)
        self._peer, self._disk, self._worker = peer, disk, worker
        self._shelf = KeptShelf(peer.host.id.public_key, most_bytes)
        self._fetching = VaultFetch(peer.rpc, worker, peer.clock.rng("vault"))
        self._lent: dict[bytes, list[tuple[Bytes, memoryview]]] = {}  # by digest: checkpoints in memory
        self._coming: dict[bytes, CheckpointRef] = {}  # by signature: checkpoints being fetched from hosts
        self._free_bytes = 0
        self._changed = Signal()
        self._telling = trio.Lock()  # if two announcements overlapped, the older one could remain

    # --- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the checkpoints held from before. Raises OSError if the folder is unusable."""
        found = await self._worker.run(self._disk.open, name="list checkpoints of experts")
        gone = list[CheckpointRef]()
        for pointer in sorted(found, key=lambda p: p.rank, reverse=True):
            fits = pointer.run == self.fingerprint and self._shelf.bytes_held + pointer.size_bytes
            if fits is False or fits > self._shelf.most_bytes:
                gone.append(pointer)
            else:
                gone += self._shelf.take(pointer)
        await self._worker.run(partial(self._remove, gone), name="drop checkpoints of experts")
        for pointer in self._shelf.pointers:
            self.directory.lineages.found(pointer)
        await self._look_at_disk()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, and publish what is held, until cancelled."""
        rpc = self._peer.rpc
        rpc.serve(KEEP, Keep, self._keep, declared=DECLARED[KEEP])
        rpc.serve(GET, PieceWanted, self._give, declared=DECLARED[GET])
        try:
            task_status.started()
            while True:
                await self.announce()
                with trio.move_on_after(self._announce_s):
                    await self._changed.wait()
                    await trio.sleep(min(_TOGETHER_S, self._announce_s / 4))
        finally:
            rpc.unserve("vault/2")

    async def announce(self) -> bool:
        """Publish what is held, the free space and the intended adoptions. Returns True once others can read it.

        A failure is logged; the next announcement follows anyway.
        """
        async with self._telling:
            await self._look_at_disk()
            taking = [Name.of(uid) for uid in self.taking[:EXPERT_TAKING]]
            mine = self.share()
            offer = HolderOffer(
                room_bytes=self.room_bytes,
                adopts=self.adopts(),
                addrs=[],
                taking=taking,
                hosted=mine.hosted,
                places=mine.places,
                sample_s=mine.sample_s,
            )
            said = False
            try:
                await self.directory.announce(self._shelf.pointers, offer)
                said = True
            except* RemoteError as group:
                log.info("held checkpoints could not be announced: %s", group.exceptions[0])
            return said

    # --- held here --------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[CheckpointRef]:
        """All checkpoints held here, the newest of each expert first."""
        return self._shelf.pointers

    @property
    def room_bytes(self) -> int:
        """Bytes that are free for others' checkpoints."""
        coming = sum(pointer.size_bytes for pointer in self._coming.values())
        return max(0, min(self._shelf.room_bytes(), self._free_bytes // 2) - coming)

    def own(self, uid: Uid) -> CheckpointRef | None:
        """The newest checkpoint of an expert that this peer made itself, or None."""
        me = self._peer.host.id.public_key
        return next((p for p in self._shelf.of(uid) if p.owner == me), None)

    async def read(self, pointer: CheckpointRef) -> bytes:
        """Read a checkpoint held here. Raises ValueError if it is damaged; it is then dropped."""
        try:
            return await self._worker.run(partial(self._disk.read, pointer), name="read a checkpoint of an expert")
        except (OSError, ValueError) as error:
            await self._lose(pointer, str(error))
            raise ValueError(str(error)) from error

    async def put(self, pointer: CheckpointRef, digests: Bytes, data: Bytes) -> None:
        """Write a checkpoint of our own. Raises OSError if the disk rejects it, ValueError if our limits do."""
        why = self._shelf.objection(pointer)
        if why is not None:
            raise ValueError(why)
        write = partial(self._disk.write, pointer, digests, data)
        with self._writing():
            await self._worker.run(write, name="write a checkpoint of an expert")
        await self._settle(pointer)

    @contextmanager
    def lent(self, pointer: CheckpointRef, digests: Bytes, data: Bytes) -> Iterator[None]:
        """Serve pieces of `data` from memory during the block, before the disk has it or if the disk rejects it."""
        self._lent.setdefault(pointer.digest, []).append((digests, memoryview(data)))
        try:
            yield
        finally:
            self._lent[pointer.digest].pop()
            if not self._lent[pointer.digest]:
                del self._lent[pointer.digest]

    # --- held by others ---------------------------------------------------------------------------------------

    async def hand(self, pointer: CheckpointRef, holder: PeerId) -> None:
        """Have `holder` keep a checkpoint of ours. Raises RemoteError with the reason if it does not."""
        timeout_s = _SHAKE_S + pointer.size_bytes / STATE_LEAST_BYTES_PER_S
        answer = await self._peer.rpc.call(holder, KEEP, Keep(pointer), Kept, timeout_s=timeout_s, reply_frame_bytes=0)
        if not answer.body.held:
            raise Refused("it does not hold the checkpoint", holder)

    async def fetch(self, pointer: CheckpointRef, holders: Sequence[PeerId]) -> bytes | bytearray:
        """A checkpoint, whole and checked, from here or from `holders`. Raises RemoteError with the reason if none has
        it.
        """
        if self._has(pointer):
            try:
                return await self.read(pointer)
            except ValueError:
                pass  # already logged; others may have it undamaged
        others = [peer for peer in holders if peer != self._peer.host.id]
        data, pieces = bytearray(pointer.size_bytes), Pieces(pointer.size_bytes)

        def write(number: int, piece: memoryview) -> None:
            data[slice(*pieces.piece(number))] = piece

        await self._fetching.fetch(pointer, others, write)
        return data

    def _has(self, pointer: CheckpointRef) -> bool:
        return any(p.signature == pointer.signature for p in self._shelf.of(pointer.expert.uid))

    async def answers(self, peer: PeerId, timeout_s: float) -> bool:
        """True if a peer answers at all."""
        return await self.directory.answers(peer, timeout_s)

    # --- serving ----------------------------------------------------------------------------------------------

    async def _give(self, call: Incoming[PieceWanted]) -> Answer[Empty]:
        wanted = call.body
        lent, pointer = self._lent.get(wanted.digest), self._shelf.by_digest(wanted.digest)
        if lent is not None:
            all_digests, state = lent[-1]
            data = state[slice(*Pieces(len(state)).piece(wanted.piece))] if wanted.piece >= 0 else all_digests
        elif pointer is None or wanted.piece >= Pieces(pointer.size_bytes).pieces:
            raise Refused("this piece of a checkpoint is not held here")
        else:
            data = await self._from_disk(pointer, wanted.piece)
        if not data:
            raise Refused("no such piece")
        return Answer(Empty(), (TensorFrame("uint8", (len(data),), data),))

    async def _from_disk(self, pointer: CheckpointRef, number: int) -> bytes:
        disk = self._disk
        job = partial(disk.piece, pointer, number) if number >= 0 else partial(disk.digests, pointer)
        try:
            return await self._worker.run(job, name="read a piece of an expert")
        except (OSError, ValueError) as error:
            await self._lose(pointer, str(error))
            raise Refused("this checkpoint is no longer held here") from error

    async def _keep(self, call: Incoming[Keep]) -> Answer[Kept]:
        pointer, peer = call.body.pointer, call.peer
        why = self.fault(pointer, peer)
        if why is not None:
            text = "peer %s asks to keep a checkpoint of expert %s: %s"
            self.directory.blame(peer, text, peer, pointer.expert.uid, why)
            raise Refused(why).as_unproven()
        if self._has(pointer):
            return Answer(Kept(held=True))
        why = self._shelf.objection(pointer)
        if why is not None:
            raise Refused(why)
        if not await self._is_in_lineage(pointer):
            text = "peer %s asks to keep a checkpoint of expert %s, which it does not own"
            self.directory.blame(peer, text, peer, pointer.expert.uid)
            raise Refused("you do not own the expert, as far as this peer knows")
        if pointer.size_bytes > self.room_bytes or pointer.signature in self._coming:
            raise Overloaded("no space is left besides the checkpoints being fetched", _SHAKE_S)
        self._coming[pointer.signature] = pointer
        try:
            await self._pull(pointer, peer)
        except RemoteError as error:
            log.warning("peer %s did not hand over the checkpoint of expert %s: %s", peer, pointer.expert.uid, error)
            raise Refused(f"the checkpoint could not be fetched from you: {error.args[0]}") from error
        except OSError as error:
            raise Refused("this peer cannot write to its disk now") from error
        finally:
            del self._coming[pointer.signature]
        return Answer(Kept(held=True))

    async def _is_in_lineage(self, pointer: CheckpointRef) -> bool:
        """True if the owner of a checkpoint owns the expert. Holding the checkpoint makes this peer vouch for its
        owner.
        """
        uid, lineages = pointer.expert.uid, self.directory.lineages
        reign = ExpertReign(pointer.generation, pointer.peer)
        if lineages.owner(uid) == reign:
            return True
        for _ in range(2):
            try:
                await self.directory.look([uid.prefix], shown=pointer)
            except RemoteError as error:
                raise Refused("the directory that says who owns the expert cannot be read now") from error
            owner = lineages.owner(uid)
            if owner is None or owner == reign:
                return True
            if owner.owner == self._peer.host.id or await self.directory.answers(owner.owner, _OWNER_S):
                return False
            lineages.lost(trio.current_time(), uid)
        return False

    def fault(self, pointer: CheckpointRef, peer: PeerId) -> str | None:
        """Reason to reject a checkpoint that `peer` presents as its own, or None if it is valid."""
        if pointer.run != self.fingerprint:
            return "it is of another run"
        if not self._grid.is_expert(pointer.expert.uid):
            return "the grid has no such expert"
        if pointer.owner != peer.public_key:
            return "it is another peer's checkpoint"
        return None if pointer.is_signed() else "its owner did not sign it"

    async def _pull(self, pointer: CheckpointRef, peer: PeerId) -> None:
        """Fetch a checkpoint from its host to the disk, within the time that its size allows."""
        file = self._disk.file(pointer)
        with trio.move_on_after(_SHAKE_S + pointer.size_bytes / STATE_LEAST_BYTES_PER_S):
            try:
                with self._writing():
                    await self._worker.run(file.begin, name="make room for a checkpoint")
                    digests = await self._fetching.fetch(pointer, [peer], file.write)
                    await self._worker.run(partial(file.finish, digests), name="finish a checkpoint of an expert")
            finally:
                with trio.CancelScope(shield=True):
                    await self._worker.run(file.abandon, name="drop half a checkpoint")
            await self._settle(pointer)
            return
        raise TooSlow("it took too long", peer)

    async def _settle(self, pointer: CheckpointRef) -> None:
        """Register a written checkpoint, and delete those that it replaces."""
        why = self._shelf.objection(pointer)  # another one may have come meanwhile
        with trio.CancelScope(shield=True):
            gone = [pointer] if why is not None else self._shelf.take(pointer)
            await self._worker.run(partial(self._remove, gone), name="drop checkpoints of experts")
        if why is not None:
            raise Refused(why)
        self.problem = None
        self._changed.notify()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A block that writes to the disk: an OSError also sets `problem`."""
        try:
            yield
        except OSError as error:
            told = f"no checkpoint of an expert can be written to {self._disk.folder}: {error.strerror or error}"
            if told != self.problem:
                log.warning("%s", told)
            self.problem = told
            raise

    async def _lose(self, pointer: CheckpointRef, why: str) -> None:
        log.warning("a checkpoint of expert %s is dropped: %s", pointer.expert.uid, why)
        self._shelf.drop(pointer)
        await self._worker.run(partial(self._remove, [pointer]), name="drop a checkpoint of an expert")
        self._changed.notify()

    def _remove(self, pointers: Sequence[CheckpointRef]) -> None:
        for pointer in pointers:
            try:
                self._disk.remove(pointer)
            except OSError as error:
                log.warning("a checkpoint of expert %s could not be deleted: %s", pointer.expert.uid, error)

    async def _look_at_disk(self) -> None:
        try:
            self._free_bytes = await self._worker.run(self._disk.free_bytes, name="look at the disk")
        except OSError as error:
            self._free_bytes, self.problem = 0, f"{self._disk.folder}: {error.strerror or error}"
