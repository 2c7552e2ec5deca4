"""A tenure: one term of this peer as its run's conductor, with the machine and the sources of its answers.

Beside the machine it holds what answers to reports are made of: the member list by differences, the forecast, the text
on what a step waits for, signed grants. All of that ends with the tenure.
"""

from __future__ import annotations

import random

import msgspec
import trio

from peerd.core.limits import WAITS_CHARS
from peerd.core.messages.swarm import Forecast, Grant, MemberInfo, MemberNews
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.conductor.member_list import MemberList
from peerd.machine.conductor.standstill import Standstill
from peerd.machine.conductor.step_eta import Outlook
from peerd.machine.swarm.posts import peer_of
from peerd.service.conductor.grants import Granting


class Tenure:
    """See the module's header. `rng` draws the list's first version number."""

    def __init__(self, term: int, machine: Conductor, granting: Granting, rng: random.Random) -> None:
        self.term, self.machine = term, machine
        self._granting = granting
        self._listed = MemberList(rng)
        self._outlook, self._standstill = Outlook(), Standstill()

    @property
    def step(self) -> int:
        """The step under way; 0 while nothing is known."""
        return self.machine.course.step

    def members_since(self, version: int) -> MemberNews | None:
        """The member list's changes since `version`, as many as one answer holds; None: none."""
        self._listed.follow(self.machine.members_version, lambda: list(map(_as_peer, self.machine.members())))
        return self._listed.news(version)

    def forecast(self) -> Forecast | None:
        """Seconds until the batch is whole, and until the step is made; None: unknown."""
        return self._outlook.look(trio.current_time(), self.machine)

    def waits_for(self) -> str:
        """Text on what the step waits for, for the log and the user; "" while things move."""
        return (self.machine.waits_for() or self._standstill.look(trio.current_time(), self.machine))[:WAITS_CHARS]

    def grant(self, step: int, trainer: str, seqs: list[int], *, early: bool = False) -> Grant | None:
        """A grant for these microbatches in the batch of `step`; None: there are none."""
        return self._granting.grant(self.term, step, trainer, seqs, early=early)


def _as_peer(post: MemberInfo) -> MemberInfo:
    """A post's entry with its peer in place of the post, as it travels."""
    return msgspec.structs.replace(post, peer=peer_of(post.peer))
