"""Admission check at a stage peer: the grants that trainers show for their microbatches, verified once each.

A grant counts when a conductor signed it that this peer follows, or has followed since it came to the position before
this one: so a change of conductor in the middle of a step costs nothing. A grant without microbatches lets a trainer
evaluate, until the next evaluation is due. Hostile input: grants of any content; those of peers other than the
conductor, for other trainers or steps, do not count. A trainer that merely follows another conductor than we do at the
moment gets Overloaded, to try again soon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, PeerdError, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import BATCH_TRAINERS, GRANTS_VERIFIED, HELD_CONDUCTORS
from peerd.core.messages.proof import is_granted
from peerd.core.messages.swarm import Grant

_AGAIN_S = 0.3  # by then, a peer that follows the wrong conductor has usually found the right one


class Admissions:
    """The admissions of one stage peer. `conductor`: the one that it follows now. `evaluated_every`: so many steps."""

    def __init__(self, run: bytes, conductor: Callable[[], PeerId | None], evaluated_every: int = 0) -> None:
        self._run, self._conductor, self._evaluated_every = run, conductor, evaluated_every
        self._followed: dict[PeerId, None] = {}  # at this position
        self._followed_before: dict[PeerId, None] = {}
        self._verified: dict[bytes, tuple[str, Grant]] = {}  # signature -> (trainer, grant), oldest first
        # Signature of a grant that did not count -> (trainer, grant, the conductors that it is not of).
        self._failed = BoundedDict[bytes, tuple[str, Grant, tuple[PeerId, ...]]](GRANTS_VERIFIED)
        self._helpers: OrderedDict[str, None] = OrderedDict()  # trainers that helped to make a step; the latest last

    def follow(self, conductor: PeerId | None) -> None:
        """Note a conductor that has answered this peer: its grants count."""
        if conductor is not None and conductor not in self._followed:
            self._followed[conductor] = None
            if len(self._followed) > HELD_CONDUCTORS:
                del self._followed[next(iter(self._followed))]

    def has_helped(self, peer: str) -> bool:
        """True when a grant of a conductor that we followed says that this trainer has helped to make a step.

        A grant alone makes nobody a member: it costs one wish.
        """
        return peer in self._helpers

    def arrive(self) -> None:
        """Note a new position: conductors followed at it and at the one before it count, earlier ones no longer."""
        self._followed_before, self._followed = self._followed, {}
        self.follow(self._conductor())

    def objection(self, trainer: PeerId, step: int, seq: int, shown: Grant | None) -> PeerdError | None:
        """The reason that microbatch `seq` of `trainer` does not count in `step` here; None: it is admitted."""
        if shown is None:
            return Refused("the call shows no grant of the conductor")
        if shown.step != step:
            return Refused(f"the grant is for step {shown.step}, the call for {step}")
        if seq not in shown.seqs:
            return Refused(f"the grant does not name microbatch {seq}")
        return self._validity(trainer, shown)

    def evaluation_objection(self, trainer: PeerId, step: int, shown: Grant | None) -> PeerdError | None:
        """The reason that `trainer` does not evaluate here at `step`; None: it does."""
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
        """The reason that a conductor's grant does not count; None: it does. One that failed costs nothing again."""
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
        """Those whose grants count, the latest last."""
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
