"""Rates of a run's posts as its conductor believes them: what each states, as far as the batches bear it out.

The batches of the last steps show how many microbatches each post did, by the word of the trainers that were answered.
A post can surely do that much; where it states more, since it was idle part of the time, it is believed up to HEADROOM
times as much (of few microbatches: as many as it might have got, had chance not been against it), and one that states
to have done far more in those steps than it did is believed only that. So one that overstates, for its stage to seem
strong, and one that understates, for others to come and help, gain little. One that has not yet served a whole step is
not believed at all: it counts as a usual device. Hostile input: any claim; trainers that credit the wrong posts, as far
as the ledger lets them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.messages.swarm import PostLoad
from peerd.machine.swarm.posts import stage_of

HEADROOM: Final = 4.0
_STATED: Final = 2.0  # times what it did: repeats and evaluations are work, too
_STEPS: Final = 8  # that are looked back on


def by_chance(done: int) -> float:
    """The most microbatches that somebody expects who gets `done` (the upper end of a Poisson mean, at 95 %)."""
    return done + 1.0 + 2.0 * math.sqrt(done + 1.0)


@dataclass(slots=True)
class _Stated:
    """A post's last claim, and the work that it states since the last step."""

    claim: PostLoad
    at: float  # when it was told, or counted last
    work: float = 0.0  # microbatches

    def count(self, now: float) -> None:
        self.work += self.claim.rate * self.claim.busy * max(0.0, now - self.at)
        self.at = now


@dataclass(frozen=True, slots=True)
class _Step:
    """A step: how long it took, and the microbatches of each post, done and stated."""

    seconds: float
    done: Mapping[str, int]
    stated: Mapping[str, float]


class Beliefs:
    """See the module's header. `work`: of a microbatch in each stage, relative to each other."""

    def __init__(self, work: Sequence[float]) -> None:
        self._work = tuple(work)
        self._claims: dict[str, _Stated] = {}
        self._served: dict[str, int] = {}  # post -> whole steps since it came
        self._steps = deque[_Step](maxlen=_STEPS)
        self._stepped_at: float | None = None

    def told(self, now: float, post: str, claim: PostLoad) -> None:
        """A post states its load."""
        if (known := self._claims.get(post)) is None:
            self._claims[post] = _Stated(claim, now)
        else:
            known.count(now)
            known.claim = claim

    def keep_only(self, posts: Mapping[str, object]) -> None:
        """Forget all other posts."""
        self._claims = {post: claim for post, claim in self._claims.items() if post in posts}
        self._served = {post: steps for post, steps in self._served.items() if post in posts}

    def claim(self, post: str) -> PostLoad:
        """The last load that the post stated."""
        known = self._claims.get(post)
        return PostLoad() if known is None else known.claim

    def step_made(self, now: float, done: Mapping[str, int], ready: Sequence[str]) -> None:
        """A step was made with so many microbatches of each post; `ready`: the posts that serve the next one."""
        stated = self._stated(now)
        if self._stepped_at is not None:
            self._steps.append(_Step(now - self._stepped_at, dict(done), stated))
            self._served = {post: steps + 1 for post, steps in self._served.items()}
        self._stepped_at = now
        for post in ready:
            self._served.setdefault(post, 0)

    def _stated(self, now: float) -> dict[str, float]:
        """The work that each post states since the last step; from now on that since now."""
        found = {}
        for post, known in self._claims.items():
            known.count(now)
            found[post], known.work = known.work, 0.0
        return found

    def restart(self) -> None:
        """The steps before are not to be compared with those to come: the swarm went on from elsewhere."""
        self._steps.clear()
        self._served.clear()
        self._stepped_at = None

    def measured(self, post: str) -> float | None:
        """The rate that is believed, in microbatches a second; None: it has not served a whole step yet."""
        since = max(0, len(self._steps) - self._served.get(post, 0))
        recent = list(itertools.islice(self._steps, since, None))
        seconds = sum(step.seconds for step in recent)
        if seconds <= 0.0:
            return None
        done = sum(step.done.get(post, 0) for step in recent)
        if sum(step.stated.get(post, 0.0) for step in recent) > _STATED * (done + 1):
            return done / seconds
        return min(max(self.claim(post).rate, done / seconds), HEADROOM * by_chance(done) / seconds)

    def borne_out(self, posts: Iterable[str]) -> dict[str, float]:
        """The rates of the posts that are measured."""
        return {post: rate for post in posts if (rate := self.measured(post))}

    def rates(self, posts: Sequence[str]) -> dict[str, float]:
        """The rate of each post; of those that are not measured yet, that of a usual device in their stage."""
        found = {post: self.measured(post) for post in posts}
        speeds = [rate * self._work[stage_of(post)] for post, rate in found.items() if rate]
        usual = statistics.median(speeds) if speeds else 0.0
        return {p: usual / self._work[stage_of(p)] if rate is None else rate for p, rate in found.items()}
