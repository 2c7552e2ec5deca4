"""Statistics of this peer's averaging rounds: how long they took, which peer was waited for, and what was lost.

A round is as slow as its slowest member, and nobody but the owner of a part sees whose version of it came last: the
time from the last but one to the last is what that sender made the others wait. Counts since the peer was started; the
number of peers remembered is bounded.
"""

from __future__ import annotations

from peerd.machine.averaging.allreduce import AllReduceRound, RoundFailed

_REMEMBERED = 64  # members, those that were waited for longest
_TOLD = 5


def explained(failure: RoundFailed) -> str:
    """The failure in a line: why, by which peers, how much is lost."""
    who = f" by {', '.join('…' + peer[-8:] for peer in failure.lost)}" if failure.lost else ""
    return f"{failure}{who}; {failure.lost_share:.0%} of the vector has no sum"


class RoundStats:
    """Told of every round when it ends; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failed = 0
        self.last_s = 0.0
        self.waited_s: dict[str, float] = {}
        self.last_failure: str | None = None

    def ended(self, now: float, round_: AllReduceRound) -> None:
        """Record a round that gave a sum."""
        self.rounds += 1
        self._count(now, round_)

    def broke(self, now: float, round_: AllReduceRound, failure: RoundFailed) -> None:
        """Record a round that gave none; `failure` is told how much of the vector has no sum."""
        self.failed += 1
        self._count(now, round_)
        failure.lost_share = round_.missing_share()
        self.last_failure = explained(failure)

    def told(self) -> dict[str, object]:
        """For status: seconds of the last round; the peers that it waited for longest, in seconds over all rounds."""
        longest = sorted(self.waited_s.items(), key=lambda item: -item[1])[:_TOLD]
        return {
            "rounds": self.rounds,
            "failed": self.failed,
            "last_s": round(self.last_s, 4),
            "waited_s": {peer: round(seconds, 3) for peer, seconds in longest},
            "last_failure": self.last_failure,
        }

    def _count(self, now: float, round_: AllReduceRound) -> None:
        self.last_s = now - round_.began
        for peer, seconds in round_.waited_s.items():
            self.waited_s[peer] = self.waited_s.get(peer, 0.0) + seconds
        if len(self.waited_s) > _REMEMBERED:
            longest = sorted(self.waited_s, key=lambda peer: -self.waited_s[peer])
            self.waited_s = {peer: self.waited_s[peer] for peer in longest[:_REMEMBERED]}
