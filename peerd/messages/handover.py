"""The messages by which stage peers pass a microbatch to each other; the trainer relays for two that cannot connect.

A trainer signs a ticket for each attempt of a microbatch: the peers of its stages, in order, and the stages that must
compute. The ticket is sent with the call from the first stage to the last. Each peer answers the previous one with the
gradient of its input and the list of hops from there on. The ticket and the conductor's grant decide which calls are
allowed, not the identity of the caller. If a ticket repeats lost stages only, its first peer may be the stage before
them, which has kept their input, and its last peer the stage after them, which has kept their gradient; these two send
what they have kept and compute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from peerd.core.ids import is_peer_text
from peerd.core.limits import ATTEMPTS, BROKEN_CHARS, STAGES
from peerd.messages.encoding import Message
from peerd.messages.microbatches import PeerText, Seq
from peerd.messages.swarm import Fingerprint, Grant, Rate, Receipt, Signature, StageNumber, StepNumber

Attempt = Annotated[int, msgspec.Meta(ge=0, lt=ATTEMPTS)]
Way = Literal["", "direct", "relay", "trainer"]  # path to the next stage: unused, a link, a circuit, via the trainer


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A trainer's signed order for one attempt: stages `low` to `high` compute; `route` has the peers from `first` on.

    If `first` is the stage before `low`, its peer has kept the microbatch and sends `low` its input. If the route
    includes the stage after `high`, that peer has kept the microbatch and returns the gradient.
    """

    step: StepNumber
    seq: Seq
    attempt: Attempt  # of this microbatch; a later attempt replaces an earlier one
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
        """True if the stage must compute, rather than send what its peer has kept."""
        return self.low <= stage <= self.high

    def peer_of(self, stage: int) -> str | None:
        """The peer that the trainer chose for `stage`, or None if the route does not include the stage."""
        return self.route[stage - self.first] if self.first <= stage <= self.last else None

    @property
    def is_well_named(self) -> bool:
        """True if the whole route consists of valid peer ids."""
        return all(map(is_peer_text, self.route))


class TicketStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a ticket's signature covers."""

    run: Fingerprint
    trainer: PeerText
    ticket: Ticket  # without its signature


class PassRequest(Message, frozen=True):
    """A microbatch for `stage`, sent by the trainer or by a peer of the previous stage.

    Frames: the stage's input, if the stage must compute; then the targets, if the last stage must compute.
    """

    run: Fingerprint
    stage: StageNumber
    trainer: PeerText
    ticket: Ticket
    grant: Grant | None  # the conductor's, which admits the microbatch
    line_bytes_per_s: Rate = 0.0  # rate at which frames of the called peer arrive at the caller; 0: unknown


class Hop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stage of a microbatch's route: the peer that holds the gradient, and the times that it took."""

    peer: PeerText
    receipt: Receipt
    service_s: Rate = 0.0  # of computing
    wait_s: Rate = 0.0  # in this peer's queues
    onward_s: Rate = 0.0  # until the next stage answered
    way: Way = ""  # to the next stage
    instead_of: PeerText = ""  # the ticket's peer of the next stage, if it failed and another peer replaced it


class Broken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A failed route: no peer of `stage` could be reached, so the trainer has to choose another route."""

    stage: StageNumber
    peer: PeerText  # of the ticket at that stage
    reason: Annotated[str, msgspec.Meta(max_length=BROKEN_CHARS)]


@dataclass(frozen=True, slots=True)
class NotFiniteAt:
    """A failed route: a peer of `stage` computed a non-finite output or gradient from a finite input.

    It is encoded as a map, which distinguishes it from `Broken`.
    """

    stage: StageNumber
    peer: PeerText  # that computed it
    reason: Annotated[str, msgspec.Meta(max_length=BROKEN_CHARS)]


class PassAnswer(Message, frozen=True):
    """The answer to Pass. Frame: the gradient of the input, if the previous stage must compute, too.

    `hops`: this stage and the later ones that had to compute; empty if the route failed (`broken`).
    """

    hops: Annotated[list[Hop], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)
    loss_sum: float = 0.0  # over the samples, of the last stage
    broken: Broken | NotFiniteAt | None = None
    arrival_bytes_per_s: Rate = 0.0  # rate at which the caller's frames arrive here; 0: unknown


class RelayRequest(Message, frozen=True):
    """A request to the ticket's trainer by a peer that cannot reach `to`: call `to` with `passed` and these frames."""

    to: PeerText
    passed: PassRequest
