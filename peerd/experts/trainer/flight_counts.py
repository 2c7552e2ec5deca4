"""Counters of a trainer's flights, for status and log: restarts by cause, updates of experts, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from peerd.core.clock import Clock
from peerd.core.errors import NoMemory, RemoteError, TooFewExperts
from peerd.log import EventLog
from peerd.run.expert_network import ExpertReply

_SAY_S: Final = 10.0  # between two log lines of a kind, since many microbatches fail alike
_REASON_CHARS: Final = 300


class FlightCounts:
    """The counters of one trainer's flights."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self.away = 0  # flights in progress
        self.came_back = 0
        self.stale_flights = 0  # restarted because their parameters were gone
        self.began_again: Counter[str] = Counter()  # restarts by kind of failure
        self.updates = 0  # made by experts with our gradients
        self.no_answer = 0  # backward calls without a reply
        self.not_usable = 0  # replies with a wrong shape or values that are not finite
        self._stale_sum, self._stale_most = 0, 0
        self.samples = 0  # came back to an asynchronous trunk since the last `samples_since`
        self._dropped = 0  # microbatches dropped because their parameters were too old
        self._not_summed = 0  # microbatches dropped because their gradients could not be summed
        self._counted = 0  # places filled in batches of an asynchronous trunk
        self._behind_sum, self._behind_most = 0, 0  # age in steps of the oldest parameters in each place
        self.problem: str | None = None
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def failed(self, error: Exception) -> None:
        """Count a flight that restarts. Logged at most every 10 s."""
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
        """Count a flight that came back."""
        self.came_back += 1
        self.problem = None

    def cannot_be_used(self, wrong: list[str]) -> None:
        """Count and log replies that were not usable, and empty the list."""
        for reason in wrong:
            self.not_usable += 1
            self._say("expert.answered_wrong", reason)
        wrong.clear()

    def learnt(self, replies: Sequence[ExpertReply | None]) -> None:
        """Count the replies to backward calls."""
        for reply in replies:
            if reply is None:
                self.no_answer += 1
            else:
                self.updates += 1
                self._stale_sum += max(0, reply.stale)
                self._stale_most = max(self._stale_most, reply.stale)

    @contextmanager
    def one_away(self) -> Iterator[None]:
        """Context manager that counts a flight as under way until the block ends."""
        self.away += 1
        try:
            yield
        finally:
            self.away -= 1

    def too_old(self, microbatches: int, why: str = "") -> None:
        """Count microbatches that are dropped because the trunk no longer has the parameters that they began with.

        `why` is the reason with its figures, if they are known.
        """
        self._dropped += microbatches
        if microbatches:
            steps = "the trunk made more than optimizer.most_stale steps, or loaded another state, since it began"
            self._say("flight.too_old", f"a microbatch is dropped: {why or steps}")

    def cannot_be_summed(self, microbatches: int, error: Exception) -> None:
        """Count microbatches that share a place and are dropped because their gradients cannot be summed."""
        self._not_summed += microbatches
        self._say("flight.not_summed", f"{microbatches} microbatches are dropped: {error}")

    def counted(self, behind: int) -> None:
        """Count a place in the trunk's batch, filled with gradients of parameters at most `behind` steps old."""
        self._counted += 1
        self._behind_sum += behind
        self._behind_most = max(self._behind_most, behind)

    def samples_since(self) -> int:
        """Samples of microbatches that came back since the last call."""
        samples, self.samples = self.samples, 0
        return samples

    def told(self) -> dict[str, object]:
        """The counters as plain data, for `peerd status`."""
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
