"""Quorum for state download: donors that report the same root form a camp, and the largest camp is believed.

A winning camp has as many donors as required, provided that enough donors answer, or are known at all if the conductor
names them: an attacker that silences all honest donors but one must not be believed alone. Ties are decided by the
higher position, then by the greater root, so that all newcomers decide alike. A donor that was caught lying does not
count; one that was lost after its claim does. Decisions come with a reason. Times are arguments, in seconds.

A hostile donor may report a state of its own making (it stays alone, unless it has as many accomplices as there are
honest donors), report a position far ahead (this only breaks ties), or not answer (the wait is at most GATHER_S once a
camp is large enough; in total at most PATIENCE_S plus the time in which honest donors copy the state).
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import Final, NamedTuple

from peerd.messages.swarm import Position

VOUCHERS: Final = 2  # donors that must agree, if that many answer
GATHER_S: Final = 10.0  # how long to wait for more answers once a camp has that many donors
PATIENCE_S: Final = 60.0  # how long to wait for such a camp, in addition to `copy_s`, before a smaller one is accepted
_FURTHEST: Final = 64  # most steps that donors may be asked to make before they answer


class Claim(NamedTuple):
    """A donor's claim to have a state."""

    position: Position
    root: bytes


class Camp(NamedTuple):
    """Donors with the same claim. Camps are ordered by size, then position, then root; the greatest is the best."""

    size: int
    claim: Claim
    donors: tuple[str, ...]


class QuorumVerdict(NamedTuple):
    """The decision: choose `camp`, give up (`hopeless`), ask all donors again (`again`), or wait."""

    camp: Camp | None
    why: str
    hopeless: bool = False
    again: bool = False


def camps(claims: Iterable[tuple[str, Claim]]) -> list[Camp]:
    """All camps, best first."""
    by_claim: dict[Claim, list[str]] = {}
    for donor, claim in claims:
        by_claim.setdefault(claim, []).append(donor)
    found = [Camp(len(donors), claim, tuple(sorted(donors))) for claim, donors in by_claim.items()]
    return sorted(found, reverse=True)


def meeting_step(claims: Iterable[Claim], rounds: int) -> int:
    """The step at which disagreeing donors should copy their states, after `rounds` rounds; 0 for at once.

    If steps are slow, asking all once more is enough, and faster. After that, the step is ahead of most donors, and
    farther with each round: a step that is over when they are asked is useless. The median is used so that one donor
    that names a step far ahead does not make the others wait for it.
    """
    return median_low(claim.position.step for claim in claims) + min(2**rounds, _FURTHEST) if rounds >= 2 else 0


class StateQuorum:
    """The count of one download's claims. Call `decide` whenever something has changed, and at `due`.

    `copy_s`: seconds that an honest donor needs to copy and hash its state before it can answer.
    """

    def __init__(self, now: float, copy_s: float = 0.0) -> None:
        self._patience_until = now + PATIENCE_S + copy_s
        self._gather_until: float | None = None

    @property
    def due(self) -> float:
        """Time at which waiting ends."""
        return self._patience_until if self._gather_until is None else min(self._gather_until, self._patience_until)

    def decide(self, now: float, claims: dict[str, Claim], pending: int, named: int = 0) -> QuorumVerdict:
        """Decide on these claims. `pending`: donors that may still answer; `named`: donors known to have the state."""
        ranked = camps(claims.items())
        needed = min(VOUCHERS, max(1, len(claims), named))
        best = ranked[0] if ranked else None
        stands = best is not None and best.size >= VOUCHERS
        self._gather_until = (self._gather_until or now + GATHER_S) if stands else None
        late = now >= self._patience_until
        if best is not None and best.size >= needed:
            rest = (ranked[1].size if len(ranked) > 1 else 0) + pending
            if not pending or late or (stands and (best.size > rest or now >= self.due)):
                why = f"{best.size} of {len(claims)} donors vouch for step {best.claim.position.step}"
                return QuorumVerdict(best, why)
            return QuorumVerdict(None, f"{pending} donors have not answered yet")
        if pending and not late:
            return QuorumVerdict(None, f"{pending} donors have not answered yet")
        if best is None:
            return QuorumVerdict(None, "no donor has answered", hopeless=True)
        moving = len({claim.position for claim in claims.values()}) > 1  # they make steps while they are asked
        why = f"no {needed} donors agree: " + "; ".join(
            f"{', '.join(d[-6:] for d in c.donors)} at step {c.claim.position.step}, {c.claim.root.hex()[:8]}"
            for c in ranked[:4]
        )
        return QuorumVerdict(None, why, hopeless=late or not moving, again=moving)
