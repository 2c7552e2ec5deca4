"""Commit proofs: signatures of members that stepped to one position, as peers show them to each other.

Each member signs that it made the commit to a position, and with which mean. The conductor collects the signatures;
members and keepers store them beside their checkpoints. A proof needs no living witness: a peer that
knows the members of that time can check it. Hostile input: signatures of any content, which do not count.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerd.core.limits import MEMBERS
from peerd.core.messages.encoding import Message
from peerd.core.messages.swarm import Digest, Fingerprint, PeerText, Position, Signature, StageNumber


class CommitStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a commit signature signs."""

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
    """The members that stepped to a position, by their own signatures."""

    position: Position
    committed: Annotated[list[Committed], msgspec.Meta(max_length=MEMBERS)]


class ShowProof(Message, frozen=True):
    """Ask for the commit proof of a position."""

    run: Fingerprint
    position: Position


class ProofShown(Message, frozen=True):
    """The proof; None: the answering peer has none."""

    proof: CommitProof | None
