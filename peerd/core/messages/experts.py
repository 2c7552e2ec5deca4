"""The messages of experts: calls, announcements, and checkpoints that outlive their host.

`expert/1`: `forward` has the samples as its one frame and is answered with outputs; `backward` has the samples and the
gradients of the outputs, and is answered with gradients of the samples after the expert has made an update. The frames'
first axis is the samples, whose shape the run file fixes. `vault/2` moves checkpoints: `keep` asks a peer to fetch and
hold one, `get` gives a piece of one, by digest. `sharing/2`: `take` asks a host to go on with an expert of the
caller's. Records in the DHT are signed by their publishers; a `Pointer` is signed by the host that made the checkpoint
and means the same whoever shows it.

A hostile peer may send: experts outside the grid, bitmaps of another length, claims without experts, pointers that
nobody signed, pieces that are not those of the digest. Decoding bounds sizes; the rest is checked where it is used.
A signed pointer proves who made a checkpoint, not that its owner may host the expert: that follows from the chain of
owners (`Former`), see `machine.owners.lineage`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from peerd.core.experts.grid import Uid
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
from peerd.core.messages.encoding import Message, encode
from peerd.core.messages.swarm import AddrText, Fingerprint, Moment
from peerd.core.messages.token import TokenData
from peerd.core.record import Signer

DIGEST_BYTES: Final = 32
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
    """Name of an expert, or of a prefix, as it travels."""

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
    """A request for outputs; its frame holds the samples."""

    run: Fingerprint
    expert: Name


class Output(Message, frozen=True):
    """Answer to a forward; its frame holds the outputs, computed with the weights of (`generation`, `version`)."""

    generation: Generation
    version: Updates
    waited_s: Seconds = 0.0  # in the host's queue


class Backward(Message, frozen=True):
    """A request for an update and the gradients of the samples; repeated under the same id it counts once."""

    run: Fingerprint
    expert: Name
    request: RequestId
    generation: Generation  # of the weights that the forward was computed with
    version: Updates
    most_stale: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)] = -1  # updates since then, beyond which it is refused


class Gradient(Message, frozen=True):
    """Answer to a backward; its frame holds the gradients of the samples, by the weights before this update."""

    generation: Generation
    version: Updates  # updates made, this one included
    waited_s: Seconds = 0.0


# --- announcements ----------------------------------------------------------------------------------------------


class Announced(Message, frozen=True):
    """Announcement of the experts that one host has below one prefix.

    `below` is a bitmap of the next coordinates. Below the last prefix these are experts, and `generations` and
    `versions` hold one number for each of them, in the order of their coordinates; above it both are empty.
    """

    prefix: Name
    below: Annotated[bytes, msgspec.Meta(max_length=EXPERT_SIDE // 8)]
    generations: Annotated[list[Generation], msgspec.Meta(max_length=EXPERT_SIDE)]
    versions: Annotated[list[Updates], msgspec.Meta(max_length=EXPERT_SIDE)]
    queue_s: Seconds  # how long a request waits there now
    addrs: Addrs
    token: TokenData = b""  # in a run with tokens: that the publisher may host experts
    client: bool = False  # it can dial, and not be dialed


class HolderOffer(Message, frozen=True):
    """A peer that has room for checkpoints of experts."""

    room_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    adopts: bool  # it hosts experts, and would take over some
    addrs: Addrs
    token: TokenData = b""  # that it may host experts, or be a backbone
    client: bool = False
    # Orphans that it is fetching now: others leave them to it, since a large state takes longer than their patience.
    taking: Annotated[list[Name], msgspec.Meta(max_length=EXPERT_TAKING)] = msgspec.field(default_factory=list)
    hosted: Places = 0  # experts, by which hosts share them
    places: Places = 0  # experts that it has memory for, besides
    sample_s: Seconds = 0.0  # its device's time for a sample of an expert, as measured there; 0: none served yet


# --- checkpoints ------------------------------------------------------------------------------------------------


class Former(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed checkpoint of an earlier owner from which a later owner went on, as the later owner names it.

    All fields but `origin` are those of the earlier owner's `Pointer`, so that its signature can be checked here.
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


class Pointer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host's signed word that an expert's state, after so many updates, has this digest."""

    run: Fingerprint
    expert: Name
    generation: Generation
    version: Updates
    digest: Sha256  # of the digests of all pieces, joined
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=EXPERT_STATE_BYTES)]
    owner: PublicKey
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""
    began: Updates = 0  # updates that it had when this generation began: of others' later ones, it has none
    former: Former | None = None  # what this generation began from; None: from the run's seed
    heir: Heir = b""  # whom the owner hands the expert to with this state; empty: nobody

    def signed(self, signer: Signer) -> Pointer:
        """This pointer with its owner's signature."""
        return msgspec.structs.replace(self, signature=signer.sign(self._statement(self._origin())))

    def is_signed(self) -> bool:
        """True if its owner signed it, and the former owner signed what it began from. Takes some 0.1 ms for each of
        the two: off the loop where there are many.
        """
        if not verify(self.peer, self._statement(self._origin()), self.signature):
            return False
        former = self.former
        if former is None:
            return True
        facts = (former.generation, former.version, former.digest, former.size_bytes, former.owner)
        bare = Pointer(self.run, self.expert, *facts, began=former.began, heir=former.heir)
        return verify(former.peer, bare._statement(former.origin), former.signature)

    def continues(self) -> bool:
        """True if this generation goes on from what `former` says: from exactly that state, or anew from the seed."""
        former = self.former
        if former is None or self.generation <= former.generation or self.version < self.began:
            return False
        first = self.version == self.began
        return self.began == 0 or (self.began == former.version and (not first or self.digest == former.digest))

    def as_former(self) -> Former:
        """This checkpoint, as the pointers of the next owner name it."""
        facts = (self.generation, self.version, self.digest, self.size_bytes, self.owner, self.signature, self.began)
        return Former(*facts, self.heir, self._origin())

    @property
    def peer(self) -> PeerId:
        """The host that made the checkpoint."""
        return PeerId.from_public_key(self.owner)

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """Order of checkpoints of one expert: the highest is the newest."""
        return self.generation, self.version, self.owner

    def _origin(self) -> bytes:
        return hashlib.sha256(encode(self.former)).digest() if self.former is not None else b""

    def _statement(self, origin: bytes) -> bytes:
        """What the owner signs. A pointer without `former` and `heir` is signed as it was before there were these."""
        told = (*msgspec.structs.astuple(self)[:7], b"", self.began)
        linked = (origin, self.heir) if origin or self.heir else ()
        return _DOMAIN + msgspec.msgpack.encode((*told, *linked))


class KeptExperts(Message, frozen=True):
    """Checkpoints of experts below one prefix that the publisher holds; several records under suffixes where many."""

    pointers: Annotated[list[Pointer], msgspec.Meta(max_length=KEPT_EXPERTS_PER_RECORD)]
    addrs: Addrs
    token: TokenData = b""
    since: Moment = 0.0


class Keep(Message, frozen=True):
    """A request to fetch this checkpoint from the caller, and to hold it until a newer one of the expert comes."""

    pointer: Pointer


class Kept(Message, frozen=True):
    """Answer to `keep`: it is held now, whole and checked."""

    held: bool


class TakeOver(Message, frozen=True):
    """A request to fetch this state from the caller, and to host the expert from now on in the next generation."""

    pointer: Pointer  # of the caller's own, after its last update
    hosted: Places  # the caller's figures, as in its offer
    sample_s: Seconds
    leaves: bool = False  # it hosts none from now on: whoever has room may take it


class TakenOver(Message, frozen=True):
    """Answer to `take`: the expert is hosted and announced in this generation."""

    generation: Generation


class PieceWanted(Message, frozen=True):
    """A request for a piece of a checkpoint; piece -1: the digests of all pieces. Answered with one uint8 frame."""

    digest: Sha256
    piece: Annotated[int, msgspec.Meta(ge=-1, lt=EXPERT_PIECES)]


def state_root(digests: Iterable[bytes]) -> bytes:
    """The digest of a checkpoint, of the SHA-256 digests of its pieces in order."""
    return hashlib.sha256(b"".join(digests)).digest()
