"""Estimated rates of a run's posts: what each one claims, as far as the batches confirm it.

The batches of the last steps show how many microbatches each post did, as reported by the trainers that it answered. A
post can surely do that much. If it claims more, since it was idle part of the time, the claim counts up to HEADROOM
times what it did (of few microbatches: of what it might have got with better luck). If it claims to have done far more
in those steps than it did, only what it did counts. So a post that overstates, for its stage to seem strong, or
understates, to attract help, gains little. A post that has not yet served a whole step counts as a typical device.
Hostile input: any claim; trainers that credit the wrong posts, as far as the ledger lets them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.messages.swarm import PostLoad
from peerd.swarm.posts import stage_of

HEADROOM: Final = 4.0
_STATED: Final = 2.0  # claimed work may be this many times the counted work: repeats and evaluations are work, too
_STEPS: Final = 8  # most recent ones that count


def by_chance(done: int) -> float:
    """Upper bound of the expected number of microbatches of a post that got `done` (Poisson mean, at 95 %)."""
    return done + 1.0 + 2.0 * math.sqrt(done + 1.0)


@dataclass(slots=True)
class _Stated:
    """A post's last claim, and the work that it claims since the last step."""

    claim: PostLoad
    at: float  # time of the claim, or of the last count
    work: float = 0.0  # microbatches

    def count(self, now: float) -> None:
        self.work += self.claim.rate * self.claim.busy * max(0.0, now - self.at)
        self.at = now


@dataclass(frozen=True, slots=True)
class _Step:
    """The duration of a step, and the microbatches of each post, counted and claimed."""

    seconds: float
    done: Mapping[str, int]
    stated: Mapping[str, float]


class EstimatedRates:
    """Estimated rates of one run's posts. `work`: relative cost of a microbatch in each stage."""

    def __init__(self, work: Sequence[float]) -> None:
        self._work = tuple(work)
        self._claims: dict[str, _Stated] = {}
        self._served: dict[str, int] = {}  # post -> whole steps since it joined
        self._steps = deque[_Step](maxlen=_STEPS)
        self._stepped_at: float | None = None

    def told(self, now: float, post: str, claim: PostLoad) -> None:
        """Record the load that a post claims."""
        if (known := self._claims.get(post)) is None:
            self._claims[post] = _Stated(claim, now)
        else:
            known.count(now)
            known.claim = claim

    def keep_only(self, posts: Mapping[str, object]) -> None:
        """Forget all posts but these."""
        self._claims = {post: claim for post, claim in self._claims.items() if post in posts}
        self._served = {post: steps for post, steps in self._served.items() if post in posts}

    def claim(self, post: str) -> PostLoad:
        """The last load that the post claimed."""
        known = self._claims.get(post)
        return PostLoad() if known is None else known.claim

    def step_made(self, now: float, done: Mapping[str, int], ready: Sequence[str]) -> None:
        """Record a step with the microbatches of each post (`done`). `ready`: the posts that serve the next step."""
        stated = self._stated(now)
        if self._stepped_at is not None:
            self._steps.append(_Step(now - self._stepped_at, dict(done), stated))
            self._served = {post: steps + 1 for post, steps in self._served.items()}
        self._stepped_at = now
        for post in ready:
            self._served.setdefault(post, 0)

    def _stated(self, now: float) -> dict[str, float]:
        """The work that each post claims since the last step. Counting starts again now."""
        found = {}
        for post, known in self._claims.items():
            known.count(now)
            found[post], known.work = known.work, 0.0
        return found

    def restart(self) -> None:
        """Forget the past steps: the swarm resumed from another position, so later steps are not comparable."""
        self._steps.clear()
        self._served.clear()
        self._stepped_at = None

    def measured(self, post: str) -> float | None:
        """Estimated microbatches per second, or None if the post has not served a whole step yet."""
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
        """The rate of each post. Posts that are not measured yet get that of a typical device in their stage."""
        found = {post: self.measured(post) for post in posts}
        speeds = [rate * self._work[stage_of(post)] for post, rate in found.items() if rate]
        usual = statistics.median(speeds) if speeds else 0.0
        return {p: usual / self._work[stage_of(p)] if rate is None else rate for p, rate in found.items()}
