"""Commit proofs: the signatures of members that stepped to one position.

Each member signs its commit to a position and the digest of its mean. The conductor collects the signatures; members
and backbones store them beside their checkpoints. Any peer that knows the members of that time can verify a proof, even
if all of them are gone. Hostile input: invalid signatures, which are not counted.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerd.core.limits import MEMBERS
from peerd.messages.encoding import Message
from peerd.messages.swarm import Digest, Fingerprint, PeerText, Position, Signature, StageNumber


class CommitStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a commit's signature covers."""

    run: Fingerprint
    stage: StageNumber
    position: Position
    digest: Digest  # SHA-256 of the mean that the member stepped with


class Committed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member's signature of its commit."""

    peer: PeerText
    stage: StageNumber
    digest: Digest
    signature: Signature


class CommitProof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signatures of the members that stepped to a position."""

    position: Position
    committed: Annotated[list[Committed], msgspec.Meta(max_length=MEMBERS)]


class ShowProof(Message, frozen=True):
    """A request for the commit proof of a position."""

    run: Fingerprint
    position: Position


class ProofShown(Message, frozen=True):
    """Answer to ShowProof; `proof` is None if the answering peer has none."""

    proof: CommitProof | None
