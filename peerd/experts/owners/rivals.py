"""Rivals for an expert, sans-IO: which of two hosts gives it up after a network partition.

While two parts of a swarm do not see each other, each may have an owner of the same expert. Afterwards a host yields at
once if it finds that more networks vouch for the other one (`OwnerTree.beats`). But peers need not see the same
networks: a relay hides those of the links that it carries. So each of two hosts may see itself ahead, for ever. Then an
order decides that both compute from signed records and from the owners that they followed: the later one yields once
the earlier one has renewed its claim beside it for four periods. Within that time the earlier one would have yielded if
it had seen more networks on the other side.

* A host yields to an owner that it followed: nobody else can make itself one.
* Of two hosts that continued from the same owner, a host whose checkpoints do not name that owner yields to one whose
  checkpoints do. If both name it, the host in the higher generation yields; in the same generation, the one with the
  lower peer id.
* A host that began an expert anew, without any checkpoint, yields to a rival that is first by generation and peer id.
  It yields at once if that rival appears within its first four periods and as many networks vouch for the rival: hosts
  often begin a free expert together. After twelve periods it also yields to a rival that is not first, because that
  rival may have a history, and then does not yield.

By this order a host yields to nobody else, whatever that peer claims and signs:

* not to a peer that claims to have continued from this host;
* while some peer vouches for this host, not to a rival for which nobody vouches. If this host continued from the rival,
  holders of this host's own checkpoints do not count for the rival. The rival sees the same vouchers, and yields;
* not to a rival that appears only when this host has owned the expert for long (`_YOUNG_PERIODS`, `_ANEW_PERIODS`):
  then the networks alone decide.

So a hostile peer that was an owner once, or that continues from an owner's old checkpoint, may win against a host that
adopted the expert recently, if another peer of its own vouches for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from peerd.core.ids import PeerId
from peerd.experts.owners.owner_tree import ExpertReign, OwnerTree

_PATIENCE_PERIODS: Final = 4.0  # longer than a claim lives without renewal
_NEW_PERIODS: Final = 4.0  # in which a host that began anew has nothing to lose, and need not wait
_LONG_PERIODS: Final = 12.0  # patience with a rival that does not come first
_YOUNG_PERIODS: Final = 256.0  # longest partition after which the order decides
_ANEW_PERIODS: Final = 64.0  # likewise for a host that began anew: it yields to anybody, and soon has much to lose

_FORGOTTEN_PERIODS: Final = 1.1  # without a sighting; as long as a claim lives without renewal
_MOST: Final = 64  # owners that are remembered


class Sightings:
    """Sightings of owners, sans-IO: when each was seen first. An owner that one look-up misses keeps its time."""

    def __init__(self) -> None:
        self._seen: dict[ExpertReign, tuple[float, float]] = {}  # first, and last

    def note(self, now: float, period_s: float, reigns: Iterable[ExpertReign]) -> None:
        """Record the owners that one look-up shows. `period_s`: announcement period."""
        lately = now - _FORGOTTEN_PERIODS * period_s
        self._seen = {reign: times for reign, times in self._seen.items() if times[1] >= lately}
        for reign in reigns:
            if reign in self._seen or len(self._seen) < _MOST:
                self._seen[reign] = self._seen.get(reign, (now, now))[0], now

    def first(self, reign: ExpertReign) -> float:
        """Time at which an owner was first seen, or infinity if it was not seen recently."""
        return self._seen[reign][0] if reign in self._seen else float("inf")


@dataclass(slots=True)
class RivalWatch:
    """The rivals of one host for one expert.

    `followed`: owners before it that it knew, latest first; `linked`: whether its checkpoints name the latest one;
    `anew`: it began the expert without a checkpoint; `began_at`: when it began to host it.
    """

    own: ExpertReign
    followed: tuple[ExpertReign, ...]
    linked: bool
    anew: bool
    began_at: float
    _seen: Sightings = field(default_factory=Sightings)

    def see(self, now: float, period_s: float, rivals: Iterable[ExpertReign]) -> None:
        """Record the rivals that renew their claims now. A single look-up that does not show a rival has no effect."""
        self._seen.note(now, period_s, (rival for rival in rivals if rival.owner != self.own.owner))

    def yields_to(self, now: float, period_s: float, rival: ExpertReign, tree: OwnerTree) -> bool:
        """True if this host gives up the expert to a rival that, as far as it can see, does not have more networks."""
        since = self._seen.first(rival)
        owned_periods = (since - self.began_at) / period_s
        if owned_periods > _YOUNG_PERIODS or not self._is_vouched(rival, tree):
            return False
        ahead = tree.voices(rival)[0] >= tree.voices(self.own)[0]
        return now >= since + self._patience_periods(rival, tree, owned_periods, ahead=ahead) * period_s

    def _patience_periods(self, rival: ExpertReign, tree: OwnerTree, owned_periods: float, *, ahead: bool) -> float:
        """Periods in which both may claim the expert until this host yields, or infinity if it does not.

        `owned_periods`: how long this host had owned the expert when the rival appeared; `ahead`: at least as many
        networks vouch for the rival, as far as this host can see.
        """
        line = {*self.followed, *tree.before(self.own)}
        if rival in line:
            return _PATIENCE_PERIODS
        if tree.below(rival, [self.own]):
            return float("inf")
        first = tree.comes_first(rival, self.own)
        if tree.below(rival, line) and (first or not self.linked):
            return _PATIENCE_PERIODS
        if self.anew and first and owned_periods <= _NEW_PERIODS and ahead:
            return 0.0
        if self.anew and owned_periods <= _ANEW_PERIODS:
            return _PATIENCE_PERIODS if first else _LONG_PERIODS
        return float("inf")

    def _is_vouched(self, rival: ExpertReign, tree: OwnerTree) -> bool:
        """True unless peers vouch for this host and none for the rival."""
        shared = tree.holders.get(self.own, set()) if tree.below(self.own, [rival]) else set[PeerId]()
        return tree.voices_without(rival, shared) > (0, 0) or tree.voices(self.own) == (0, 0)
