"""One peer's evidence on its run: positions seen, the members at that time, and commit proofs. Survives restarts.

A position is seen when the peer itself stepped there. A newcomer that has not stepped yet also counts the position that
its conductor reports. Proofs are of checkpoints: at most COMMIT_PROOFS. A conductor collects signatures of the last
commits, from which others obtain their proofs. Sans-IO. Hostile input: proofs; the caller verifies their signatures
before `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import msgspec

from peerd.core.bounded_dict import BoundedDict
from peerd.core.decoders import from_json
from peerd.core.limits import COMMIT_PROOFS, MEMBERS, SEEN_POSITIONS
from peerd.messages.commits import CommitProof, Committed
from peerd.messages.swarm import Moved, Position
from peerd.swarm.posts import peer_of, stage_of

_COLLECTED: Final = 64  # most recent commits whose signatures a conductor collects,
_SIGNATURES: Final = 8 * MEMBERS  # and the most signatures of all of them
FORMAT: Final = 1


class _Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    lineage: str


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: str
    stage: int
    digest: str
    signature: str


class _Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    position: _Seen
    committed: list[_Signed]


class EvidenceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The evidence on disk: JSON, with bytes as hexadecimal."""

    format: int
    seen: list[_Seen]
    established: dict[str, int]
    proofs: list[_Proof]


class Evidence:
    """The evidence of one peer. `version` increases with each change."""

    def __init__(self) -> None:
        self.version = 0
        self.established: dict[str, int] = {}  # member's post -> stage, when this peer last saw a step
        self._seen = BoundedDict[Position, None](SEEN_POSITIONS)
        self._proofs = BoundedDict[Position, CommitProof](COMMIT_PROOFS)
        self._collected = BoundedDict[Position, dict[str, Committed]](_COLLECTED)
        self._has_stepped = False

    @property
    def seen(self) -> list[Position]:
        """Positions of the swarm that this peer saw, newest last."""
        return list(self._seen)

    def stepped(self, position: Position, established: Mapping[str, int]) -> None:
        """Record that this peer stepped to `position`. `established`: members that the conductor names as ready."""
        self._has_stepped = True
        self._see(position, established)

    def told(self, position: Position, established: Mapping[str, int], *, rests: bool = False) -> None:
        """Record that the conductor reports the swarm at `position`.

        It counts until this peer has made a step itself, and while it `rests`, since it makes none then.
        """
        if (rests or not self._has_stepped) and position.step:
            self._see(position, established)

    def _see(self, position: Position, established: Mapping[str, int]) -> None:
        if position in self._seen and self.established == established:
            return
        self._seen[position] = None
        self.established = dict(established)
        self.version += 1

    # --- proofs -----------------------------------------------------------------------------------------------

    def collect(self, post: str, target: Position, moved: Moved) -> None:
        """As conductor, store the signature with which a member confirmed a commit to `target`."""
        if moved.position == target and moved.signature:
            if target not in self._collected:
                self._collected[target] = {}
                while sum(map(len, self._collected.values())) > _SIGNATURES:
                    self._collected.popitem(last=False)
            signed = self._collected[target]
            if len(signed) < MEMBERS:
                signed[post] = Committed(peer_of(post), stage_of(post), moved.digest, moved.signature)

    def proof(self, position: Position) -> CommitProof | None:
        """The proof of `position`, or None if this peer has none."""
        if signed := self._collected.get(position):
            return CommitProof(position, [signed[post] for post in sorted(signed)])
        return self._proofs.get(position)

    def take(self, proof: CommitProof) -> None:
        """Store a proof whose signatures are verified."""
        self._proofs[proof.position] = proof
        self.version += 1

    def has_proof(self, position: Position) -> bool:
        """True if a proof of `position` is stored."""
        return position in self._proofs

    def signers(self, position: Position) -> frozenset[str]:
        """The peers whose verified signatures prove `position`."""
        proof = self._proofs.get(position)
        return frozenset(one.peer for one in proof.committed) if proof is not None else frozenset()

    # --- disk -------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The evidence as a JSON file."""
        return self.encoder()()

    def encoder(self) -> Callable[[], bytes]:
        """A function that encodes the present evidence as `to_bytes` does; it may run in another thread."""
        return partial(_encode, list(self._seen), dict(self.established), list(self._proofs.items()))

    def load(self, data: bytes) -> None:
        """Load what `to_bytes` wrote. Raises ValueError if the file is damaged or of another format."""
        try:
            found = from_json(data, EvidenceFile)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        if found.format != FORMAT:
            raise ValueError(f"format {found.format}; this peerd reads format {FORMAT}")
        for one in found.seen:
            self._seen[_position(one)] = None
        self._has_stepped = bool(found.seen)
        self.established = dict(found.established)
        for proof in found.proofs:
            self._proofs[_position(proof.position)] = _proof(proof)


def _position(seen: _Seen) -> Position:
    return Position(seen.step, bytes.fromhex(seen.lineage))


def _proof(proof: _Proof) -> CommitProof:
    return CommitProof(_position(proof.position), list(_committed(proof.committed)))


def _committed(signed: Iterable[_Signed]) -> Iterable[Committed]:
    for one in signed:
        yield Committed(one.peer, one.stage, bytes.fromhex(one.digest), bytes.fromhex(one.signature))


def _encode(seen: list[Position], established: dict[str, int], proofs: list[tuple[Position, CommitProof]]) -> bytes:
    stored = [
        _Proof(
            _Seen(p.step, p.lineage.hex()),
            [_Signed(one.peer, one.stage, one.digest.hex(), one.signature.hex()) for one in proof.committed],
        )
        for p, proof in proofs
    ]
    return msgspec.json.encode(
        EvidenceFile(FORMAT, [_Seen(p.step, p.lineage.hex()) for p in seen], established, stored)
    )
