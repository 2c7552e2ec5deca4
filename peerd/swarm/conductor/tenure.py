"""A tenure: one term of this peer as its run's conductor.

Besides the machine it has the parts of answers to reports: the member list as differences, the forecast, the text on
what a step waits for, and signed grants. It also has the map of the network between peers. All of it ends with the
tenure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import trio

from peerd.core.limits import LINE_PAIRS, WAITS_CHARS
from peerd.messages.network import PairFigures
from peerd.messages.swarm import Forecast, Grant, MemberInfo, MemberNews
from peerd.placement.network.landmarks import FilledNetwork, filled
from peerd.placement.network.network_map import NetworkMap
from peerd.swarm.batch.grants import GrantSigner
from peerd.swarm.posts import peer_of, post_name, stage_of
from peerd.swarm.steps.conductor import Conductor
from peerd.swarm.steps.member_list import MemberList
from peerd.swarm.steps.step_watch import Standstill, StepEta


class Tenure:
    """One term as conductor. `rng` draws the first version number of the member list."""

    def __init__(self, term: int, machine: Conductor, granting: GrantSigner, rng: random.Random) -> None:
        self.term, self.machine = term, machine
        self._granting = granting
        self._listed = MemberList(rng)
        self._outlook, self._standstill = StepEta(), Standstill()
        self.network = NetworkMap()
        self._limits: dict[tuple[str, str], float] = {}  # (from peer, to peer) -> bytes/s

    @property
    def step(self) -> int:
        """Number of the current step; 0 while nothing is known."""
        return self.machine.course.step

    def members_since(self, version: int) -> MemberNews | None:
        """The member list's changes since `version`, as many as fit in one answer. None if there are none."""
        self._listed.follow(self.machine.listed_version, lambda: list(map(_as_peer, self.machine.members())))
        return self._listed.news(version)

    def forecast(self) -> Forecast | None:
        """Seconds until the batch is complete and until the step is made, or None if unknown."""
        return self._outlook.look(trio.current_time(), self.machine)

    def waits_for(self) -> str:
        """What the step waits for, for the log and the user; "" if it is not stalled."""
        return (self.machine.waits_for() or self._standstill.look(trio.current_time(), self.machine))[:WAITS_CHARS]

    def post_waits_for(self, post: str) -> str:
        """As `waits_for`, for a member or helper: the reason why it is not admitted yet comes first."""
        return (self.machine.keeps_out(trio.current_time(), post) or self.waits_for())[:WAITS_CHARS]

    def trainer_waits_for(self, trainer: str) -> str:
        """As `waits_for`, for a trainer: the reason why it gets no microbatch comes first."""
        return (self.machine.holds_back(trio.current_time(), trainer) or self.waits_for())[:WAITS_CHARS]

    def take_figures(self, teller: str, figures: Iterable[PairFigures]) -> None:
        """Add a peer's measurements of its pairs to the map. Rate limits of pairs also affect the split of rounds."""
        now = trio.current_time()
        self.network.take(now, teller, figures)
        looked_at = self._limits | self.network.limits(now, teller)
        found = {pair: limit for pair in looked_at if (limit := self.network.limit(now, *pair)) is not None}
        self._limits = dict(sorted(found.items(), key=lambda item: (item[1], item[0]))[:LINE_PAIRS])
        self.machine.roster.lines.limit_pairs(dict(self._limits_of_posts()))

    def _limits_of_posts(self) -> Iterator[tuple[tuple[str, str], float]]:
        """The rate limits between posts of one stage."""
        if not self._limits:
            return
        stages: dict[str, list[int]] = {}
        for post in self.machine.roster.lines.known():
            stages.setdefault(peer_of(post), []).append(stage_of(post))
        for (source, target), limit in self._limits.items():
            for stage in stages.get(source, ()):
                if stage in stages.get(target, ()):
                    yield (post_name(source, stage), post_name(target, stage)), limit

    def network_between(self, posts: Mapping[str, str]) -> FilledNetwork:
        """Delays and rates between all pairs of peers, with estimates for pairs that were not measured.

        `posts`: peer -> one of its posts, or its own name. The network rates stated for that post bound the estimates.
        """
        now, lines = trio.current_time(), self.machine.roster.lines
        stated = {peer: lines.rates(post) for peer, post in posts.items()}
        return filled(list(posts), lambda one, other: self.network.view(now, one, other), stated)

    def grant(self, step: int, trainer: str, seqs: list[int], *, early: bool = False) -> Grant | None:
        """A grant for these microbatches in the batch of `step`, or None if there are none."""
        helped = self.machine.batches.trainers.newcomers.has_helped(trainer)
        return self._granting.grant(self.term, step, trainer, seqs, early=early, helped=helped)

    def evaluation_grant(self, step: int, trainer: str) -> Grant:
        """A grant for `trainer` to evaluate at `step`."""
        return self._granting.evaluation(self.term, step, trainer)


def _as_peer(post: MemberInfo) -> MemberInfo:
    """A post's entry with its peer id in place of the post, as it is sent."""
    return msgspec.structs.replace(post, peer=peer_of(post.peer))
