"""Records that peers publish about a run in the DHT, and their keys: for finding each other, and for watchers.

All values are read from strangers: bounded here, signed and expiring in the DHT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from peerd.core.ids import Key
from peerd.core.limits import FORESEEABLE_S, JOINER_STAGES, KEPT_SETS, MICROBATCHES, STAGES
from peerd.core.messages.encoding import Message, decode, encode
from peerd.core.messages.swarm import AddrText, Moment, PeerText, Position, StageNumber
from peerd.core.messages.token import TokenData

OVERDUE_S: Final = 15.0  # so long a forecast that was wrong still says that the step may end at any moment
ShortText = Annotated[str, msgspec.Meta(max_length=200)]


def stage_key(run: str, stage: int) -> Key:
    """DHT key under which the peers of a stage announce themselves."""
    return Key.of(f"{run}/stage/{stage}")


def progress_key(run: str) -> Key:
    """DHT key under which trainers announce their progress."""
    return Key.of(f"{run}/progress")


def joining_key(run: str) -> Key:
    """DHT key under which joining peers announce themselves."""
    return Key.of(f"{run}/joining")


def settings_key(run: str) -> Key:
    """DHT key under which peers of a run publish its shared settings."""
    return Key.of(f"{run}/settings")


def kept_key(run: str) -> Key:
    """DHT key under which backbones announce the checkpoints that they keep."""
    return Key.of(f"{run}/kept")


class StageProgress(Message, frozen=True):
    """One stage peer, as it announces itself."""

    stage: int
    since: Moment  # when it joined the stage
    step: int
    held: int  # samples accumulated for the step under way
    samples_per_s: float
    device: ShortText
    conductor: PeerText  # the conductor that it follows; "" while it looks for one
    waits_for: ShortText
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    token: TokenData = b""  # in a run with tokens: that the publisher is a member, and may serve a stage
    step_at: Moment = 0.0  # when the step under way should be done, as the conductor foretells it; 0: nobody knows
    client: bool = False  # it can dial, and not be dialed
    # The other stages that this peer serves now: what it announced of any further one, earlier, is over.
    also: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # as in PostLoad
    queue: Annotated[float, msgspec.Meta(ge=0, le=MICROBATCHES)] = 0.0  # likewise
    ends: bool = False  # it leaves with this step, and the run may end with it: backbones keep what is final


class Joiner(Message, frozen=True):
    """A peer that is about to serve a stage; `since`: when it arrived, Unix time."""

    since: Moment
    token: TokenData = b""  # as in StageProgress
    # Stages that it has a checkpoint of, the newest first.
    has: Annotated[list[StageNumber], msgspec.Meta(max_length=JOINER_STAGES)] = msgspec.field(default_factory=list)
    takes: StageNumber | None = None  # the stage that it has chosen; None: not yet


class KeptCheckpoints(Message, frozen=True):
    """Checkpoints that a backbone keeps: positions at which it has those of all stages, oldest first."""

    positions: Annotated[list[Position], msgspec.Meta(max_length=KEPT_SETS)]
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    token: TokenData = b""  # as in StageProgress, but to be a backbone


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
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)
    client: bool = False  # it can dial, and not be dialed


def followed_most(told: Iterable[tuple[str, str]]) -> str | None:
    """The conductor that most of a run's stage peers follow, or None if they follow nobody that conducts.

    `told`: each peer's id, and the conductor that it follows, by its record. A peer that conducts in its own eyes alone
    does not count.
    """
    rows = list(told)
    followed = Counter(conductor for _, conductor in rows if conductor)
    first = max(followed, key=lambda peer: (followed[peer], peer), default=None)
    return first if (first, first) in rows else None


def foretold_in_s(told: Iterable[tuple[str, str, float]], wall: float) -> float | None:
    """Seconds until the step under way should be done, by the records of a run's stage peers; None: nobody knows.

    `told`: each peer's id, the conductor that it follows, and its `step_at`. Only the conductor that most follow
    counts; not if the time is over for longer than records take to be renewed.
    """
    rows = list(told)
    first = followed_most((peer, conductor) for peer, conductor, _ in rows)
    for peer, conductor, step_at in rows:
        if peer == first == conductor and step_at and -OVERDUE_S <= step_at - wall <= FORESEEABLE_S:
            return max(0.0, step_at - wall)
    return None


def sum_told(values: Iterable[float]) -> float:
    """Sum of the finite values; 0 when the sum itself is too large for a float, which no training's figure is."""
    total = sum(value for value in values if math.isfinite(value))
    return total if math.isfinite(total) else 0.0


def pause_s(due_in_s: float | None, usual_s: float, longest_s: float) -> float:
    """Pause before the next look at a step, or word about it, when it is due in `due_in_s` seconds.

    Unknown, near or past: `usual_s`, the shortest there is. Otherwise one look comes shortly before the step is due
    and one shortly after it, and before that one every `longest_s`, since forecasts change.
    """
    near_s = usual_s / 2
    if due_in_s is None or not due_in_s > 0:
        return usual_s
    if due_in_s <= usual_s + near_s:
        return max(usual_s, due_in_s + near_s)
    return max(usual_s, min(due_in_s - near_s, longest_s))


def encode_progress(value: StageProgress | TrainerProgress) -> bytes:
    return encode(value)


def decode_stage(value: bytes) -> StageProgress:
    """The announcement in a record's value. Raises ProtocolViolation."""
    return decode(StageProgress, value)


def decode_trainer(value: bytes) -> TrainerProgress:
    """The announcement in a record's value. Raises ProtocolViolation."""
    return decode(TrainerProgress, value)
