"""Counts of a trainer's flights, for status and log: what began again and why, what experts learnt and how stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from peerd.core.clock import Clock
from peerd.core.errors import NoMemory, RemoteError, TooFewExperts
from peerd.core.experts.contract import ExpertReply
from peerd.log import EventLog

_SAY_S: Final = 10.0  # between two lines of a kind: many microbatches fail alike
_REASON_CHARS: Final = 300


class FlightCounts:
    """See the module's header."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self.away = 0  # flights under way
        self.came_back = 0
        self.stale_flights = 0  # begun again since their parameters were gone
        self.began_again: Counter[str] = Counter()  # by kind of failure
        self.updates = 0  # that experts made with our gradients
        self.no_answer = 0  # backward calls without one: constants
        self.not_usable = 0  # replies of wrong shape, or not finite
        self._stale_sum, self._stale_most = 0, 0
        self.samples = 0  # of microbatches that came back to an asynchronous trunk, since `samples_since`
        self._dropped = 0  # microbatches whose parameters were too old for the trunk,
        self._not_summed = 0  # or whose gradients could not be summed
        self._counted = 0  # places in batches of an asynchronous trunk,
        self._behind_sum, self._behind_most = 0, 0  # and steps that the oldest parameters in each were behind
        self.problem: str | None = None
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def failed(self, error: Exception) -> None:
        """A flight begins again; the log says so, at most once in a while."""
        kind = (
            "too_few_experts"
            if isinstance(error, TooFewExperts)
            else "network"
            if isinstance(error, RemoteError)
            else "no_memory"
            if isinstance(error, NoMemory)
            else "not_finite"
        )
        self.began_again[kind] += 1
        self.problem = f"a microbatch begins again: {error}"[:_REASON_CHARS]
        self._say("flight.began_again", str(error))

    def succeeded(self) -> None:
        """A flight has come back."""
        self.came_back += 1
        self.problem = None

    def cannot_be_used(self, wrong: list[str]) -> None:
        """Take note of replies that did not count, and empty the list."""
        for reason in wrong:
            self.not_usable += 1
            self._say("expert.answered_wrong", reason)
        wrong.clear()

    def learnt(self, replies: Sequence[ExpertReply | None]) -> None:
        """The replies to backward calls."""
        for reply in replies:
            if reply is None:
                self.no_answer += 1
            else:
                self.updates += 1
                self._stale_sum += max(0, reply.stale)
                self._stale_most = max(self._stale_most, reply.stale)

    @contextmanager
    def one_away(self) -> Iterator[None]:
        """The scope of a flight that is under way."""
        self.away += 1
        try:
            yield
        finally:
            self.away -= 1

    def too_old(self, microbatches: int, why: str = "") -> None:
        """Microbatches are dropped: the trunk no longer has the parameters that they began with. `why`: in figures,
        where they are known.
        """
        self._dropped += microbatches
        if microbatches:
            steps = "the trunk made more than optimizer.most_stale steps, or took over another state, since it began"
            self._say("flight.too_old", f"a microbatch is dropped: {why or steps}")

    def cannot_be_summed(self, microbatches: int, error: Exception) -> None:
        """Microbatches that share a place are dropped: the trunk's sum does not take their gradients."""
        self._not_summed += microbatches
        self._say("flight.not_summed", f"{microbatches} microbatches are dropped: {error}")

    def counted(self, behind: int) -> None:
        """A place in the trunk's batch is taken, with gradients of parameters that are `behind` steps old at most."""
        self._counted += 1
        self._behind_sum += behind
        self._behind_most = max(self._behind_most, behind)

    def samples_since(self) -> int:
        """Samples of microbatches that came back since the last call."""
        samples, self.samples = self.samples, 0
        return samples

    def told(self) -> dict[str, object]:
        """Plain data, for status."""
        return {
            "in_flight": self.away,
            "came_back": self.came_back,
            "began_again": dict(self.began_again),
            "stale_flights": self.stale_flights,
            "updates": self.updates,
            "no_answer": self.no_answer,
            "not_usable": self.not_usable,
            "staleness": {"mean": self._stale_sum / self.updates if self.updates else 0.0, "most": self._stale_most},
            "too_old": self._dropped,
            "not_summed": self._not_summed,
            "trunk_staleness": {
                "mean": self._behind_sum / self._counted if self._counted else 0.0,
                "most": self._behind_most,
            },
        }

    def _say(self, event: str, reason: str) -> None:
        now = self._clock.now()
        if now < self._said_at.get(event, -_SAY_S) + _SAY_S:
            self._unsaid[event] += 1
            return
        self._said_at[event] = now
        more = self._unsaid.pop(event, 0)
        self._log.event(event, level="warning", reason=reason[:_REASON_CHARS], more=more)
