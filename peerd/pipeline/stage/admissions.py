"""Admission check of a stage peer: verifies, once each, the grants that trainers send with their microbatches.

A grant counts if its signer is a conductor that this peer follows, or has followed since it reached the previous
position, so a change of conductor in the middle of a step costs nothing. A grant without microbatches allows a trainer
to evaluate until the next evaluation is due. Hostile input: grants of any content; those signed by others than the
conductor, or for other trainers or steps, are rejected. A trainer that follows another conductor than this peer at the
moment gets Overloaded and retries soon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, PeerdError, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import BATCH_TRAINERS, GRANTS_VERIFIED, HELD_CONDUCTORS
from peerd.messages.proof import is_granted
from peerd.messages.swarm import Grant

_AGAIN_S = 0.3  # usually enough for a peer that follows the wrong conductor to find the right one


class Admissions:
    """Grant checks of one stage peer. `conductor` returns the conductor that it follows now.

    `evaluated_every` is the number of steps between evaluations; 0 if the run has none.
    """

    def __init__(self, run: bytes, conductor: Callable[[], PeerId | None], evaluated_every: int = 0) -> None:
        self._run, self._conductor, self._evaluated_every = run, conductor, evaluated_every
        self._followed: dict[PeerId, None] = {}  # conductors at this position
        self._followed_before: dict[PeerId, None] = {}
        self._verified: dict[bytes, tuple[str, Grant]] = {}  # signature -> (trainer, grant), oldest first
        # Signature of a rejected grant -> (trainer, grant, conductors that did not sign it).
        self._failed = BoundedDict[bytes, tuple[str, Grant, tuple[PeerId, ...]]](GRANTS_VERIFIED)
        self._helpers: OrderedDict[str, None] = OrderedDict()  # trainers that helped to make a step; the latest last

    def follow(self, conductor: PeerId | None) -> None:
        """Record a conductor that has answered this peer, so that its grants count."""
        if conductor is not None and conductor not in self._followed:
            self._followed[conductor] = None
            if len(self._followed) > HELD_CONDUCTORS:
                del self._followed[next(iter(self._followed))]

    def has_helped(self, peer: str) -> bool:
        """True if a grant of a conductor that we followed states that this trainer has helped to make a step.

        A grant alone does not make a trainer a member, because any trainer can get one.
        """
        return peer in self._helpers

    def arrive(self) -> None:
        """Record a new position. Conductors followed at it and at the previous one count; earlier ones no longer do."""
        self._followed_before, self._followed = self._followed, {}
        self.follow(self._conductor())

    def objection(self, trainer: PeerId, step: int, seq: int, shown: Grant | None) -> PeerdError | None:
        """Reason to reject microbatch `seq` of `trainer` in `step`, or None if it is admitted."""
        if shown is None:
            return Refused("the call shows no grant of the conductor")
        if shown.step != step:
            return Refused(f"the grant is for step {shown.step}, the call for {step}")
        if seq not in shown.seqs:
            return Refused(f"the grant does not name microbatch {seq}")
        return self._validity(trainer, shown)

    def evaluation_objection(self, trainer: PeerId, step: int, shown: Grant | None) -> PeerdError | None:
        """Reason why `trainer` may not evaluate here at `step`, or None if it may."""
        if not self._evaluated_every:
            return Refused("this run has no evaluations (evaluate.every_steps)")
        if shown is None:
            return Refused("the call shows no grant of the conductor to evaluate")
        if shown.seqs:
            return Refused("the grant is for microbatches, not for an evaluation")
        if shown.step + self._evaluated_every < step:
            return Overloaded(f"the grant to evaluate is of step {shown.step}, the stage at {step}", _AGAIN_S)
        return self._validity(trainer, shown)

    def _validity(self, trainer: PeerId, shown: Grant) -> PeerdError | None:
        """Reason to reject a grant's signature, or None if it is valid. A failed signature is not verified again."""
        if self._verified.get(shown.signature) == (trainer.text, shown):
            return None
        error = Overloaded("the grant is not of a conductor that this peer follows", _AGAIN_S)
        conductors = self._conductors()
        if self._failed.get(shown.signature) == (trainer.text, shown, conductors):
            return error
        if self._is_valid(trainer, shown, conductors):
            return None
        self._failed[shown.signature] = trainer.text, shown, conductors
        return error.as_unproven()

    def _conductors(self) -> tuple[PeerId, ...]:
        """The conductors whose grants count, the latest last."""
        conductors = {**self._followed_before, **self._followed}
        if (now := self._conductor()) is not None:
            conductors[now] = None
        return tuple(conductors)

    def _is_valid(self, trainer: PeerId, shown: Grant, conductors: tuple[PeerId, ...]) -> bool:
        if not any(is_granted(conductor, self._run, trainer.text, shown) for conductor in reversed(conductors)):
            return False
        self._verified[shown.signature] = trainer.text, shown
        if shown.helped:
            self._helpers[trainer.text] = None
            self._helpers.move_to_end(trainer.text)
            if len(self._helpers) > BATCH_TRAINERS:
                self._helpers.popitem(last=False)
        if len(self._verified) > GRANTS_VERIFIED:
            del self._verified[next(iter(self._verified))]
        return True
