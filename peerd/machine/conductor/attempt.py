"""Record of one stage's averaging of a step: the attempt under way, the members' answers, and the next deadline.

A record only: `stage_close` orders attempts and judges them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from peerd.core.messages.swarm import Mb
from peerd.machine.swarm.events import SendPrepare


@dataclass(slots=True)
class StageClose:
    """Averaging in one stage: one attempt at a time, until one succeeds.

    `prepared` have the mean, `waiting` have not answered yet, `helpers` only sum for them.
    """

    attempt: bytes = b""  # empty: none under way
    group: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    orders: dict[str, SendPrepare] = field(default_factory=dict)  # to each of the group, and to helpers
    waiting: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    began: float = 0.0
    late_at: float | None = None  # when late members are left behind; None: too few have answered
    accused: list[tuple[str, str]] = field(default_factory=list)  # (accuser, accused)
    heard_at: float | None = None  # when the accusations are judged; None: there are none
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made

    def involves(self, peer: str) -> bool:
        """True when the attempt under way needs this peer."""
        return bool(self.attempt) and (peer in self.group or peer in self.helpers)

    def met(self, peer: str) -> Collection[str]:
        """The members that this member averages with directly: those of its grid rounds, else all of the group."""
        order = self.orders.get(peer)
        return order.meets if order is not None else self.group

    def assigned(self, peer: str) -> frozenset[Mb]:
        """The microbatches that the peer was to contribute."""
        order = self.orders.get(peer)
        return frozenset(order.assigned) if order is not None else frozenset()

    def summers(self) -> frozenset[str]:
        """All that sum a share in any of the rounds."""
        return frozenset(peer for order in self.orders.values() for peer in order.summers)

    @property
    def due(self) -> float | None:
        """The next deadline of this stage, where nothing is reported before; None: there is none."""
        if self.settled:
            return None
        if not self.attempt:
            return self.not_before
        return min((at for at in (self.late_at, self.heard_at) if at is not None), default=None)
