"""What peers publish about a run in the DHT, and under which keys: for finding each other, and for watchers.

All values are read from strangers: bounded here, signed and expiring in the DHT.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerd.core.ids import Key
from peerd.core.messages import Message, decode, encode
from peerd.core.token import TokenData
from peerd.core.training import AddrText, PeerText

ShortText = Annotated[str, msgspec.Meta(max_length=200)]


def stage_key(run: str, stage: int) -> Key:
    """Where the peers of a stage announce themselves."""
    return Key.of(f"{run}/stage/{stage}")


def progress_key(run: str) -> Key:
    """Where trainers announce how far they are."""
    return Key.of(f"{run}/progress")


def joining_key(run: str) -> Key:
    """Where peers that are about to join announce themselves."""
    return Key.of(f"{run}/joining")


def settings_key(run: str) -> Key:
    """Where peers of a run publish the settings they share."""
    return Key.of(f"{run}/settings")


class StageProgress(Message, frozen=True):
    """One stage peer, as it announces itself."""

    stage: int
    since: float  # Unix time
    step: int
    held: int  # samples accumulated for the step under way
    samples_per_s: float
    device: ShortText
    conductor: PeerText  # whom it follows; "" while it looks for one
    waits_for: ShortText
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    token: TokenData = b""  # in a run with tokens: that the publisher is a member, and may serve a stage


class Joiner(Message, frozen=True):
    """A peer that is about to choose its stage; `since`: when it arrived, Unix time."""

    since: float
    token: TokenData = b""  # as in StageProgress


class TrainerProgress(Message, frozen=True):
    """One trainer, as it announces itself."""

    step: int
    loss: float  # mean of the last step's microbatches, nats per token
    valid_loss: float  # nan before the first evaluation
    valid_step: int
    samples_per_s: float
    tokens_per_s: float
    microbatches: int  # counted so far
    redone: int  # repeated on one stage because its peer was lost
    lost: int  # neither counted nor begun again
    waits_for: ShortText


def encode_progress(value: StageProgress | TrainerProgress) -> bytes:
    return encode(value)


def decode_stage(value: bytes) -> StageProgress:
    """Raises ProtocolViolation."""
    return decode(StageProgress, value)


def decode_trainer(value: bytes) -> TrainerProgress:
    """Raises ProtocolViolation."""
    return decode(TrainerProgress, value)
