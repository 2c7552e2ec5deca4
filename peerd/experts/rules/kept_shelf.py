"""Shelf of a holder, sans-IO: which checkpoints it keeps, and which are dropped for a new one.

Invariants (`check`): never more bytes than allowed; at most the newest two checkpoints of each expert and owner, and
only those of the three highest owners of each expert; no owner other than this peer uses more than half of the space.
The newest checkpoint of another owner is never dropped for lack of space, since its owner was promised that it is held;
the second newest is.

A hostile peer may ask the holder to keep any number of checkpoints, huge ones, old ones, or ones with a made-up
generation. Such checkpoints use only that peer's share of the space, and one of the three owners' slots of an expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from peerd.core.limits import KEPT_EXPERTS
from peerd.messages.experts import CheckpointRef
from peerd.run.grid import Uid

_SPARES: Final = 2  # per expert and owner: if the newest holds NaN, the one before it may not
_OWNERS: Final = 3  # per expert: the present one, the one before, and a liar


class KeptShelf:
    """The checkpoints that a peer holds. `own`: its public key, whose checkpoints have no share limit."""

    def __init__(self, own: bytes, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes_held = 0
        self._own = own
        self._kept: dict[bytes, CheckpointRef] = {}  # by signature, oldest first: two owners may have had equal states
        self._of: dict[Uid, list[CheckpointRef]] = {}  # newest first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pointers(self) -> list[CheckpointRef]:
        """All checkpoints held, the newest of each expert first."""
        return [pointer for pointers in self._of.values() for pointer in pointers]

    def by_digest(self, digest: bytes) -> CheckpointRef | None:
        """A checkpoint with this digest, or None."""
        return next((pointer for pointer in self._kept.values() if pointer.digest == digest), None)

    def of(self, uid: Uid) -> list[CheckpointRef]:
        """Checkpoints of one expert, newest first."""
        return list(self._of.get(uid, ()))

    def objection(self, pointer: CheckpointRef) -> str | None:
        """Reason that this checkpoint is rejected, or None if there is enough space, or it can be freed."""
        uid, others = pointer.expert.uid, self._of.get(pointer.expert.uid, [])
        mine = [p for p in others if p.owner == pointer.owner]
        if mine and mine[0].rank >= pointer.rank:
            return f"a checkpoint of expert {uid} that is at least as new is held here"
        if len({p.owner for p in others if p.owner != pointer.owner and p.rank > pointer.rank}) >= _OWNERS:
            return f"checkpoints of {_OWNERS} later owners of expert {uid} are held here"
        share = self.most_bytes if pointer.owner == self._own else self.most_bytes // 2
        stays = sum(p.size_bytes for p in self._kept.values() if p.owner == pointer.owner)
        if stays - sum(p.size_bytes for p in mine[_SPARES - 1 :]) + pointer.size_bytes > share:
            return f"with {pointer.size_bytes} more bytes one peer would exceed its share of {share} bytes here"
        if len(self) >= KEPT_EXPERTS and not mine:
            return f"{len(self)} checkpoints are held here"
        newest = [p for p in self._newest() if p not in mine]
        if sum(p.size_bytes for p in newest) + pointer.size_bytes > self.most_bytes:
            return f"no space for {pointer.size_bytes} bytes"
        return None

    def take(self, pointer: CheckpointRef) -> list[CheckpointRef]:
        """Add a checkpoint to which there is no objection. Returns the checkpoints that were dropped for it."""
        self._kept[pointer.signature] = pointer
        mine = self._of.setdefault(pointer.expert.uid, [])
        mine.append(pointer)
        mine.sort(key=lambda p: p.rank, reverse=True)
        self.bytes_held += pointer.size_bytes
        gone = self._beyond_numbers(mine)
        for each in gone:
            self.drop(each)
        if self.bytes_held > self.most_bytes:
            for each in self._spares():
                if self.bytes_held > self.most_bytes:
                    self.drop(each)
                    gone.append(each)
        return gone

    def drop(self, pointer: CheckpointRef) -> None:
        """Remove a checkpoint that is damaged, or was not written."""
        if self._kept.pop(pointer.signature, None) is not None:
            self.bytes_held -= pointer.size_bytes
            left = [p for p in self._of.pop(pointer.expert.uid) if p.signature != pointer.signature]
            if left:
                self._of[pointer.expert.uid] = left

    def room_bytes(self) -> int:
        """Bytes that one other peer's checkpoints may use: the free space, but at most half of the total."""
        if len(self) >= KEPT_EXPERTS:
            return 0
        free = self.most_bytes - sum(p.size_bytes for p in self._newest())
        return max(0, min(free, self.most_bytes // 2))

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.bytes_held == sum(p.size_bytes for p in self._kept.values()) <= self.most_bytes
        assert sorted(p.signature for p in self.pointers) == sorted(self._kept)
        by_owner, by_expert = Counter[bytes](), Counter[tuple[Uid, bytes]]()
        for p in self._kept.values():
            by_owner[p.owner] += p.size_bytes
            by_expert[p.expert.uid, p.owner] += 1
        assert all(count <= self.most_bytes // 2 for owner, count in by_owner.items() if owner != self._own)
        assert all(count <= _SPARES for count in by_expert.values())
        assert all(count <= _OWNERS for count in Counter(uid for uid, _ in by_expert).values())

    def _beyond_numbers(self, pointers: list[CheckpointRef]) -> list[CheckpointRef]:
        """Those of one expert's checkpoints that exceed the number per owner, or the number of owners."""
        gone, owners = list[CheckpointRef](), dict[bytes, int]()
        for pointer in pointers:
            owners[pointer.owner] = owners.get(pointer.owner, 0) + 1
            if owners[pointer.owner] > _SPARES or list(owners).index(pointer.owner) >= _OWNERS:
                gone.append(pointer)
        return gone

    def _newest(self) -> Iterator[CheckpointRef]:
        """The newest checkpoint of each expert and owner."""
        for pointers in self._of.values():
            owners = set[bytes]()
            for pointer in pointers:
                if pointer.owner not in owners:
                    owners.add(pointer.owner)
                    yield pointer

    def _spares(self) -> list[CheckpointRef]:
        """All other checkpoints, oldest first."""
        newest = {pointer.signature for pointer in self._newest()}
        return [pointer for signature, pointer in self._kept.items() if signature not in newest]
