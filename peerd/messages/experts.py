"""The messages of experts: calls, announcements, and checkpoints that outlive their host.

- `expert/1`: `forward` has the samples as its one frame; the answer has the outputs. `backward` has the samples and the
  gradients of the outputs; the expert makes an update, and the answer has the gradients of the samples. The first axis
  of the frames is the samples; the run file fixes the shape of a sample.
- `vault/2` transfers checkpoints: `keep` asks a peer to fetch and store one, `get` returns a piece of one, by digest.
- `sharing/2`: `take` asks another host to take over an expert of the caller.

DHT records are signed by their publishers. A `CheckpointRef` is signed by the host that made the checkpoint, so any
peer may forward it.

A hostile peer may send: experts outside the grid, bitmaps of the wrong length, claims without experts, pointers with an
invalid signature, pieces that do not match the digest. Decoding bounds sizes; the code that uses the message checks the
rest. A signed pointer proves who made a checkpoint, but not that this owner may host the expert: that follows from the
chain of owners (`PreviousOwner`), see `experts.owners.lineage`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec

from peerd.core.ids import PeerId
from peerd.core.keys import SIGNATURE_BYTES, verify
from peerd.core.limits import (
    EXPERT_PIECES,
    EXPERT_PLACES,
    EXPERT_SIDE,
    EXPERT_STATE_BYTES,
    EXPERT_TAKING,
    KEPT_EXPERTS_PER_RECORD,
)
from peerd.core.record import Signer
from peerd.messages.encoding import Message, encode
from peerd.messages.state import DIGEST_BYTES, Bytes
from peerd.messages.swarm import AddrText, Fingerprint, Moment
from peerd.messages.token import TokenData
from peerd.run.grid import Uid

_DOMAIN: Final = b"peerd expert checkpoint 1\0"

Coordinate = Annotated[int, msgspec.Meta(ge=0, lt=EXPERT_SIDE)]
Coordinates = Annotated[list[Coordinate], msgspec.Meta(max_length=3)]
LayerNumber = Annotated[int, msgspec.Meta(ge=0, lt=1024)]
Generation = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Updates = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
RequestId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Sha256 = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Signed = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Heir = Annotated[bytes, msgspec.Meta(max_length=32)]  # a public key, or empty
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Places = Annotated[int, msgspec.Meta(ge=0, le=EXPERT_PLACES)]
Addrs = Annotated[list[AddrText], msgspec.Meta(max_length=16)]


class Name(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name of an expert or a prefix on the wire."""

    layer: LayerNumber
    at: Coordinates

    @property
    def uid(self) -> Uid:
        return Uid(self.layer, tuple(self.at))

    @classmethod
    def of(cls, uid: Uid) -> Name:
        return cls(uid.layer, list(uid.at))


# --- calls ------------------------------------------------------------------------------------------------------


class Forward(Message, frozen=True):
    """A request for an expert's outputs; its frame has the samples."""

    run: Fingerprint
    expert: Name


class Output(Message, frozen=True):
    """Answer to a forward; its frame has the outputs, computed with the weights of (`generation`, `version`)."""

    generation: Generation
    version: Updates
    waited_s: Seconds = 0.0  # in the host's queue


class Backward(Message, frozen=True):
    """A request for an update and the gradients of the samples. A repeat with the same id makes no second update."""

    run: Fingerprint
    expert: Name
    request: RequestId
    generation: Generation  # of the forward's weights
    version: Updates
    most_stale: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)] = -1  # refuse after more updates than this; -1: never


class Gradient(Message, frozen=True):
    """Answer to a backward; its frame has the gradients of the samples, by the weights before this update."""

    generation: Generation
    version: Updates  # updates made, including this one
    waited_s: Seconds = 0.0


# --- announcements ----------------------------------------------------------------------------------------------


class Announced(Message, frozen=True):
    """Announcement of the experts that one host serves below one prefix.

    `below` is a bitmap of the next coordinates. If only the last coordinate follows, each bit is an expert, and
    `generations` and `versions` have one number for each expert, in the order of coordinates; otherwise both are empty.
    """

    prefix: Name
    below: Annotated[bytes, msgspec.Meta(max_length=EXPERT_SIDE // 8)]
    generations: Annotated[list[Generation], msgspec.Meta(max_length=EXPERT_SIDE)]
    versions: Annotated[list[Updates], msgspec.Meta(max_length=EXPERT_SIDE)]
    queue_s: Seconds  # current waiting time of a request
    addrs: Addrs
    token: TokenData = b""  # in a run with tokens: proves that the publisher may host experts
    client: bool = False  # it can dial, but not be dialed


class HolderOffer(Message, frozen=True):
    """Announcement of a peer that can store checkpoints of experts."""

    room_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    adopts: bool  # it hosts experts, and may take over further ones
    addrs: Addrs
    token: TokenData = b""  # proves that it may host experts, or be a backbone
    client: bool = False
    # Orphans that it is fetching now, so that others do not adopt them: a large state takes longer than others wait.
    taking: Annotated[list[Name], msgspec.Meta(max_length=EXPERT_TAKING)] = msgspec.field(default_factory=list)
    hosted: Places = 0  # number of experts that it hosts, for balancing them among hosts
    places: Places = 0  # number of further experts that its memory has room for
    sample_s: Seconds = 0.0  # measured time of its device per sample of an expert; 0: none served yet


# --- checkpoints ------------------------------------------------------------------------------------------------


class PreviousOwner(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The earlier owner's checkpoint from which an expert's next owner continued, as part of the next owner's pointer.

    All fields but `origin` are copied from the earlier owner's `CheckpointRef`, so that its signature can be verified.
    """

    generation: Generation
    version: Updates
    digest: Sha256
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=EXPERT_STATE_BYTES)]
    owner: PublicKey
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]
    began: Updates
    heir: Heir = b""
    origin: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""  # SHA-256 of the earlier owner's own `former`

    @property
    def peer(self) -> PeerId:
        """The earlier owner."""
        return PeerId.from_public_key(self.owner)


class CheckpointRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host's signed statement of the digest of an expert's state after `version` updates."""

    run: Fingerprint
    expert: Name
    generation: Generation
    version: Updates
    digest: Sha256  # of the digests of all pieces, joined
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=EXPERT_STATE_BYTES)]
    owner: PublicKey
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""
    began: Updates = 0  # updates when this generation began; it lacks later updates of other generations
    former: PreviousOwner | None = None  # checkpoint that this generation began from, or None for the run's seed
    heir: Heir = b""  # public key of the peer that the owner hands the expert to; empty: none

    def signed(self, signer: Signer) -> CheckpointRef:
        """A copy of this pointer with its owner's signature."""
        return msgspec.structs.replace(self, signature=signer.sign(self._statement(self._origin())))

    def is_signed(self) -> bool:
        """True if the owner signed this pointer and the former owner signed `former`.

        Each of the two checks takes some 0.1 ms; run many of them in a worker.
        """
        if not verify(self.peer, self._statement(self._origin()), self.signature):
            return False
        former = self.former
        if former is None:
            return True
        facts = (former.generation, former.version, former.digest, former.size_bytes, former.owner)
        bare = CheckpointRef(self.run, self.expert, *facts, began=former.began, heir=former.heir)
        return verify(former.peer, bare._statement(former.origin), former.signature)

    def continues(self) -> bool:
        """True if this generation continues from `former`: from exactly that state, or again from the seed."""
        former = self.former
        if former is None or self.generation <= former.generation or self.version < self.began:
            return False
        first = self.version == self.began
        return self.began == 0 or (self.began == former.version and (not first or self.digest == former.digest))

    def as_former(self) -> PreviousOwner:
        """This checkpoint as `PreviousOwner`, for the pointers of the next owner."""
        facts = (self.generation, self.version, self.digest, self.size_bytes, self.owner, self.signature, self.began)
        return PreviousOwner(*facts, self.heir, self._origin())

    @property
    def peer(self) -> PeerId:
        """The host that made the checkpoint."""
        return PeerId.from_public_key(self.owner)

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """Sort key among checkpoints of one expert: the highest is the newest."""
        return self.generation, self.version, self.owner

    def _origin(self) -> bytes:
        return hashlib.sha256(encode(self.former)).digest() if self.former is not None else b""

    def _statement(self, origin: bytes) -> bytes:
        """The bytes that the owner signs. Without `former` and `heir`, they are as in versions without these fields."""
        told = (*msgspec.structs.astuple(self)[:7], b"", self.began)
        linked = (origin, self.heir) if origin or self.heir else ()
        return _DOMAIN + msgspec.msgpack.encode((*told, *linked))


class KeptExperts(Message, frozen=True):
    """The checkpoints of experts below one prefix that the publisher stores; several records, by suffix, if many."""

    pointers: Annotated[list[CheckpointRef], msgspec.Meta(max_length=KEPT_EXPERTS_PER_RECORD)]
    addrs: Addrs
    token: TokenData = b""
    since: Moment = 0.0


class Keep(Message, frozen=True):
    """A request to fetch this checkpoint from the caller, and to store it until there is a newer one of the expert."""

    pointer: CheckpointRef


class Kept(Message, frozen=True):
    """Answer to `keep`: whether the checkpoint is now stored, complete and verified."""

    held: bool


class TransferRequest(Message, frozen=True):
    """A request to fetch this state from the caller, and to host the expert in the next generation."""

    pointer: CheckpointRef  # the caller's, after its last update
    hosted: Places  # of the caller, as in HolderOffer
    sample_s: Seconds
    leaves: bool = False  # the caller stops hosting experts, so any peer with memory may accept


class TransferAnswer(Message, frozen=True):
    """Answer to `take`: the expert is now hosted and announced in this generation."""

    generation: Generation


class PieceWanted(Message, frozen=True):
    """A request for a piece of a checkpoint, or, with piece -1, for the digests of all pieces. The answer has one uint8
    frame.
    """

    digest: Sha256
    piece: Annotated[int, msgspec.Meta(ge=-1, lt=EXPERT_PIECES)]


def state_root(digests: Bytes) -> bytes:
    """The digest of a checkpoint: the SHA-256 of its pieces' digests, joined."""
    return hashlib.sha256(digests).digest()
