"""A tenure: one term of this peer as its run's conductor, and what it tells those who report.

Holds the machine that decides, and beside it what is made from the machine for answers: the list of members by
differences, the forecast, what a step waits for, signed grants. With the tenure all of that goes.
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
    """See the module's header. `rng`: where the list's version numbers begin."""

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
        """What has changed in the list of members since `version`, as much as one answer holds; None: nothing."""
        self._listed.follow(self.machine.members_version, lambda: list(map(_as_peer, self.machine.members())))
        return self._listed.news(version)

    def forecast(self) -> Forecast | None:
        """When the batch is whole, and when the step is done; None: nobody knows."""
        return self._outlook.look(trio.current_time(), self.machine)

    def waits_for(self) -> str:
        """What the step waits for, for people; "" while things move."""
        return (self.machine.waits_for() or self._standstill.look(trio.current_time(), self.machine))[:WAITS_CHARS]

    def grant(self, step: int, trainer: str, seqs: list[int], *, early: bool = False) -> Grant | None:
        """Signed word that these microbatches are admitted to the batch of `step`; None: there are none."""
        return self._granting.grant(self.term, step, trainer, seqs, early=early)


def _as_peer(post: MemberInfo) -> MemberInfo:
    """A post as members are told of it."""
    return msgspec.structs.replace(post, peer=peer_of(post.peer))
