"""Records about a run that peers publish in the DHT, and their keys: for discovery, and for `peerd status`.

All values come from strangers: they are bounded here, and signed and expiring in the DHT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from peerd.core.ids import Key
from peerd.core.limits import FORESEEABLE_S, JOINER_STAGES, KEPT_SETS, MICROBATCHES, STAGES
from peerd.messages.encoding import Message, decode, encode
from peerd.messages.swarm import AddrText, Moment, PeerText, Position, StageNumber
from peerd.messages.token import TokenData

OVERDUE_S: Final = 15.0  # a missed forecast means "any moment" for this long; later it is ignored
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
    """DHT key under which backbones announce their stored checkpoints."""
    return Key.of(f"{run}/kept")


class StageProgress(Message, frozen=True):
    """Announcement of a stage peer."""

    stage: int
    since: Moment  # when it joined the stage
    step: int
    held: int  # samples accumulated for the current step
    samples_per_s: float
    device: ShortText
    conductor: PeerText  # the conductor that it follows; "" while it has none
    waits_for: ShortText
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    token: TokenData = b""  # in a run with tokens: proves that the publisher may serve a stage
    step_at: Moment = 0.0  # Unix time of the current step's end by the conductor's forecast; 0: unknown
    client: bool = False  # it can dial, but not be dialed
    # The other stages that this peer serves now; its earlier announcements of any other stage are outdated.
    also: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # as in PostLoad
    queue: Annotated[float, msgspec.Meta(ge=0, le=MICROBATCHES)] = 0.0  # as in PostLoad
    ends: bool = False  # it leaves after this step, and the run may end with it: backbones keep the state of this step


class Joiner(Message, frozen=True):
    """Announcement of a peer that is about to serve a stage; `since` is the Unix time of its arrival."""

    since: Moment
    token: TokenData = b""  # as in StageProgress
    # Stages that it has checkpoints of, the newest first.
    has: Annotated[list[StageNumber], msgspec.Meta(max_length=JOINER_STAGES)] = msgspec.field(default_factory=list)
    takes: StageNumber | None = None  # the stage that it has chosen, or None


class KeptCheckpoints(Message, frozen=True):
    """Announcement of a backbone's checkpoints: the positions for which it has those of all stages, oldest first."""

    positions: Annotated[list[Position], msgspec.Meta(max_length=KEPT_SETS)]
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    token: TokenData = b""  # in a run with tokens: proves that the publisher may be a backbone


class TrainerProgress(Message, frozen=True):
    """Announcement of a trainer."""

    step: int
    loss: float  # mean of the last step's microbatches, nats per token
    valid_loss: float  # nan before the first evaluation
    valid_step: int
    samples_per_s: float
    tokens_per_s: float
    microbatches: int  # counted in steps so far
    redone: int  # repeated on one stage because its peer was lost
    lost: int  # neither counted nor restarted
    waits_for: ShortText
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=list)
    client: bool = False  # it can dial, but not be dialed


def followed_most(told: Iterable[tuple[str, str]]) -> str | None:
    """The conductor that most stage peers of a run follow, or None if that peer does not follow itself.

    `told`: (peer id, followed conductor) of each record. A conductor follows itself.
    """
    rows = list(told)
    followed = Counter(conductor for _, conductor in rows if conductor)
    first = max(followed, key=lambda peer: (followed[peer], peer), default=None)
    return first if (first, first) in rows else None


def foretold_in_s(told: Iterable[tuple[str, str, float]], wall: float) -> float | None:
    """Seconds until the current step should end, by the records of a run's stage peers; None if unknown.

    `told`: (peer id, followed conductor, `step_at`) of each record. Only the forecast of the conductor that most peers
    follow counts. It is ignored once it is overdue for longer than records take to be renewed (OVERDUE_S).
    """
    rows = list(told)
    first = followed_most((peer, conductor) for peer, conductor, _ in rows)
    for peer, conductor, step_at in rows:
        if peer == first == conductor and step_at and -OVERDUE_S <= step_at - wall <= FORESEEABLE_S:
            return max(0.0, step_at - wall)
    return None


def sum_told(values: Iterable[float]) -> float:
    """Sum of the finite values, or 0 if the sum overflows a float, which no honest figures do."""
    total = sum(value for value in values if math.isfinite(value))
    return total if math.isfinite(total) else 0.0


def pause_s(due_in_s: float | None, usual_s: float, longest_s: float) -> float:
    """Seconds until the next poll or announcement of a step that is due in `due_in_s` seconds.

    Returns `usual_s`, the shortest pause, if the due time is unknown or past. Otherwise the pauses are chosen so that
    one poll is shortly before the step is due and one shortly after, with at most `longest_s` between polls, since
    forecasts change.
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
    """Decode a stage peer's announcement from a record's value. Raises ProtocolViolation."""
    return decode(StageProgress, value)


def decode_trainer(value: bytes) -> TrainerProgress:
    """Decode a trainer's announcement from a record's value. Raises ProtocolViolation."""
    return decode(TrainerProgress, value)
