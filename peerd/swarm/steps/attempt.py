"""Record of one group's attempt at a sum: its orders, the members' answers, and the next deadline.

A record only: `stage_close` orders attempts and judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.messages.swarm import Mb
from peerd.swarm.events import SendPrepare
from peerd.swarm.steps.partial_sums import MemberState, PartialSum


@dataclass(slots=True, eq=False)
class GroupAttempt:
    """One attempt of a group. `prepared` members have the sum, `waiting` ones have not answered, `helpers` only sum.

    `parts`: the sums that the members contribute; if empty, they contribute their own microbatches (`brought`).
    """

    name: bytes
    group: tuple[str, ...]
    helpers: frozenset[str]
    parts: tuple[PartialSum, ...]
    brought: frozenset[Mb]
    stands: dict[str, MemberState]  # session and position of each group member when the attempt began
    began: float
    leads: bool  # a member of the group contributes the leader's part (`PartialSum.leads`)
    last: bool  # as in SendPrepare
    copies: PartialSum | None  # the sum that members copy, or None if the attempt makes a new one
    orders: dict[str, SendPrepare] = field(default_factory=dict)  # to each member of the group and each helper
    waiting: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    late_at: float | None = None  # time at which late members are left behind, or None while too few have answered
    accused: list[tuple[str, str]] = field(default_factory=list)  # (accuser, accused)
    heard_at: float | None = None  # time at which the accusations are judged, or None without any

    def involves(self, peer: str) -> bool:
        """True if the attempt needs this peer."""
        return peer in self.group or peer in self.helpers

    def assigned(self, peer: str) -> frozenset[Mb]:
        """The peer's own microbatches that it was ordered to contribute."""
        order = self.orders.get(peer)
        return frozenset(order.assigned) if order is not None and not self.parts else frozenset()

    def summers(self) -> frozenset[str]:
        """Peers that sum a share."""
        return frozenset(peer for order in self.orders.values() for peer in order.summers)

    @property
    def due(self) -> float | None:
        """Next deadline, if no report arrives earlier, or None if there is none."""
        return min((at for at in (self.late_at, self.heard_at) if at is not None), default=None)

    def result(self) -> PartialSum:
        """The sum that all `prepared` members have."""
        own = [] if self.parts else list(self.stands.items())
        counts = [part.count for part in self.parts] or [len(self.orders[peer].assigned) for peer in self.group]
        kept = {peer: self.name for peer in self.group if peer in self.prepared and peer in self.stands}
        return PartialSum(
            contents=self.brought.union(*(part.contents for part in self.parts)),
            count=sum(counts),
            kept=kept,
            stands={peer: self.stands[peer] for peer in kept},
            bringers=(*own, *(bringer for part in self.parts for bringer in part.bringers)),
            digest=next(iter(self.digests.values()), b""),
            parts=self.parts,
            depth=1 + max((part.depth for part in self.parts), default=-1),
            leads=self.leads + sum(part.leads for part in self.parts),
            last=self.last,
            digests=dict(self.digests),
            summers=self.summers(),
        )
