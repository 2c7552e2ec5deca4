"""The messages by which stage peers hand a microbatch on to each other, and a trainer relays for two that cannot.

A trainer signs a ticket for each attempt of a microbatch: which peers serve its stages, in order, and which stages are
to be done. The ticket travels with the call from the first stage to the last; each peer answers the one before it with
the gradient of its input, and with the hops from there on. What a ticket allows, its numbers and the conductor's grant
say, never the peer that brings it. The first peer of a ticket that does a lost stage again keeps that stage's input,
and the last keeps its gradient: they bring these and do nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from peerd.core.ids import is_peer_text
from peerd.core.limits import ATTEMPTS, BROKEN_CHARS, STAGES
from peerd.core.messages.encoding import Message
from peerd.core.messages.microbatches import PeerText, Seq
from peerd.core.messages.swarm import Fingerprint, Grant, Rate, Receipt, Signature, StageNumber, StepNumber

Attempt = Annotated[int, msgspec.Meta(ge=0, lt=ATTEMPTS)]
Way = Literal["", "direct", "relay", "trainer"]  # to the next stage: not taken, a link, a circuit, over the trainer


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A trainer's signed order for one attempt: stages `low` to `high` are done, by `route` from stage `first` on.

    Where `first` is the stage before `low`, its peer holds the microbatch and gives `low` its input; where the route
    goes on to the stage after `high`, that peer holds it and gives the gradient.
    """

    step: StepNumber
    seq: Seq
    attempt: Attempt  # of this microbatch; an earlier one gives way to a later one
    low: StageNumber
    high: StageNumber
    first: StageNumber
    route: Annotated[list[PeerText], msgspec.Meta(min_length=1, max_length=STAGES)]
    signature: Signature = b""

    def __post_init__(self) -> None:
        if not self.low <= self.high or self.first not in (self.low, self.low - 1):
            raise ValueError(f"a ticket from stage {self.first} for stages {self.low} to {self.high}")
        if self.last - self.high not in (0, 1):
            raise ValueError(f"a ticket to stage {self.last} for stages {self.low} to {self.high}")

    @property
    def last(self) -> int:
        """The stage of the route's last peer."""
        return self.first + len(self.route) - 1

    def is_done_at(self, stage: int) -> bool:
        """True when the stage's backward is asked for, rather than what its peer keeps."""
        return self.low <= stage <= self.high

    def peer_of(self, stage: int) -> str | None:
        """The peer that the trainer chose for `stage`; None: the route does not come there."""
        return self.route[stage - self.first] if self.first <= stage <= self.last else None

    @property
    def is_well_named(self) -> bool:
        """True when all of the route are peer ids."""
        return all(map(is_peer_text, self.route))


class TicketStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a ticket signs."""

    run: Fingerprint
    trainer: PeerText
    ticket: Ticket  # without its signature


class Pass(Message, frozen=True):
    """A microbatch's arrival at `stage`, from the trainer or from a peer of the stage before.

    Frames: the stage's input, where the stage is to be done; then the targets, where the last stage is.
    """

    run: Fingerprint
    stage: StageNumber
    trainer: PeerText
    ticket: Ticket
    grant: Grant | None  # by which the conductor admitted the microbatch
    line_bytes_per_s: Rate = 0.0  # how fast frames of the called peer arrive at the caller; 0: unknown


class Hop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stage's part in a microbatch's way: who holds the gradient, and the time that it took."""

    peer: PeerText
    receipt: Receipt
    service_s: Rate = 0.0  # of computing
    wait_s: Rate = 0.0  # in this peer's queues
    onward_s: Rate = 0.0  # until the next stage had answered
    way: Way = ""  # to the next stage
    instead_of: PeerText = ""  # the ticket's peer of the next stage, where that failed and another took its place


class Broken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A way that ended: nobody of `stage` could be had, and the trainer has to choose anew."""

    stage: StageNumber
    peer: PeerText  # that the ticket named there
    reason: Annotated[str, msgspec.Meta(max_length=BROKEN_CHARS)]


@dataclass(frozen=True, slots=True)
class NotFiniteAt:
    """A way that ended: a peer of `stage` has a usable input, and its own output or gradient is not finite.

    On the wire it is a map, which distinguishes it from `Broken`.
    """

    stage: StageNumber
    peer: PeerText  # that computed it
    reason: Annotated[str, msgspec.Meta(max_length=BROKEN_CHARS)]


class Passed(Message, frozen=True):
    """The answer to Pass; frame: the input's gradient, where the stage before is to be done as well.

    `hops`: of this stage and all after it that were to be done; none where the way is `broken`.
    """

    hops: Annotated[list[Hop], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)
    loss_sum: float = 0.0  # over the samples, of the last stage
    broken: Broken | NotFiniteAt | None = None
    arrival_bytes_per_s: Rate = 0.0  # how fast the caller's frames arrive here; 0: unknown


class CarryOn(Message, frozen=True):
    """A question to the trainer of a ticket, by a hop that cannot reach `to`: call it with `passed`, and the frames."""

    to: PeerText
    passed: Pass
