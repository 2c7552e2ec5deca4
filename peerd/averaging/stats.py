"""Statistics of this peer's averaging rounds: their durations, the peers that they waited for, and what was lost.

A round is as slow as its slowest member, and only the owner of a part sees whose version of it arrived last: the time
between the last two versions is how long that sender delayed the others. Counts start when the peer starts; the number
of peers remembered is bounded.
"""

from __future__ import annotations

from peerd.averaging.allreduce_round import AllReduceRound, RoundFailed

_REMEMBERED = 64  # members with the longest waits
_TOLD = 5  # of these, in the status


def explained(failure: RoundFailed) -> str:
    """One-line description of the failure: its reason, the peers at fault, and the fraction lost."""
    who = f" by {', '.join('…' + peer[-8:] for peer in failure.lost)}" if failure.lost else ""
    return f"{failure}{who}; {failure.lost_share:.0%} of the vector has no sum"


class RoundStats:
    """Statistics over all rounds of this peer. `now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failed = 0
        self.last_s = 0.0
        self.waited_s: dict[str, float] = {}
        self.last_failure: str | None = None

    def ended(self, now: float, round_: AllReduceRound) -> None:
        """Record a successful round."""
        self.rounds += 1
        self._count(now, round_)

    def broke(self, now: float, round_: AllReduceRound, failure: RoundFailed) -> None:
        """Record a failed round and set `failure.lost_share`, the fraction of the vector without a sum."""
        self.failed += 1
        self._count(now, round_)
        failure.lost_share = round_.missing_share()
        self.last_failure = explained(failure)

    def told(self) -> dict[str, object]:
        """Values for the status: duration of the last round, and total waits of the slowest peers, in seconds."""
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
