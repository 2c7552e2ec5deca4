"""The check of tickets at one stage peer, sans-IO: who may send a microbatch, on whose order, and for which attempt.

A ticket is valid with its trainer's signature, if it comes from the trainer itself or from a peer of the previous
stage. The accompanying grant of the conductor is checked elsewhere. A later attempt of a microbatch replaces an earlier
one; an earlier one is refused. Hostile input: tickets with any content from anybody: forged, of other runs and
trainers, for other stages and peers, and replayed ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, PeerdError, Refused
from peerd.core.ids import PeerId, is_peer_text
from peerd.core.limits import MICROBATCHES
from peerd.messages.handover import PassRequest
from peerd.messages.microbatches import Mb
from peerd.messages.proof import is_ticket_of

_AGAIN_S: Final = 0.3  # by then the member list usually contains a peer that has just joined


class Tickets:
    """Checks the tickets at a peer of `stage`, one of `stages` stages. `own`: the peer's id as text."""

    def __init__(self, run: bytes, own: str, stage: int, stages: int) -> None:
        self._run, self._own, self._stage, self._stages = run, own, stage, stages
        self._newest = BoundedDict[tuple[int, Mb], int](2 * MICROBATCHES)  # latest attempt, by step and microbatch

    def objection(self, caller: str, body: PassRequest, before: Collection[str]) -> PeerdError | None:
        """Reason to refuse `body` from `caller`, or None if it is valid. `before`: the peers of the previous stage."""
        ticket, stage = body.ticket, self._stage
        if ticket.last >= self._stages:
            return Refused(f"the ticket goes to stage {ticket.last}; this run has {self._stages} stages")
        if (ticket.first, ticket.last) != (max(0, ticket.low - 1), min(self._stages - 1, ticket.high + 1)):
            return Refused(
                f"the ticket's route lacks a stage beside {ticket.low} to {ticket.high}, the ones that must compute"
            )
        if not ticket.first <= stage <= ticket.last:
            return Refused(f"the ticket leads through stages {ticket.first} to {ticket.last}, the call is for {stage}")
        if caller == body.trainer:
            if stage == ticket.first and ticket.peer_of(stage) != self._own:
                return Refused("the ticket names another peer for this stage")
        elif stage == ticket.first:
            return Refused("only the trainer of a ticket may call its first peer")
        elif caller not in before:
            return Overloaded(f"you are not known to serve stage {stage - 1}", _AGAIN_S)
        if self._is_overtaken(body):
            return _overtaken()
        if not is_peer_text(body.trainer) or not ticket.is_well_named:
            return Refused("the ticket contains a name that is no peer id")
        is_signed = is_ticket_of(PeerId.parse(body.trainer), self._run, ticket)
        return None if is_signed else Refused("the ticket is not signed by its trainer").as_unproven()

    def begin(self, body: PassRequest) -> None:
        """Record an attempt after it was checked. Raises Refused if a later attempt began while its frames arrived."""
        if self._is_overtaken(body):
            raise _overtaken()
        self._newest[body.ticket.step, _mb_of(body)] = body.ticket.attempt

    def arrive(self, step: int) -> None:
        """Forget the attempts of steps before `step`."""
        for key in [key for key in self._newest if key[0] < step]:
            del self._newest[key]

    def _is_overtaken(self, body: PassRequest) -> bool:
        return body.ticket.attempt < self._newest.get((body.ticket.step, _mb_of(body)), 0)


def _overtaken() -> Refused:
    return Refused("a later attempt of this microbatch is under way")


def _mb_of(body: PassRequest) -> Mb:
    return Mb(body.trainer, body.ticket.seq)
