"""One stage's averaging of a step: who takes part in the attempt under way, who has answered what, when to look again.

A record only: `stage_close` orders attempts and judges them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from peerd.core.messages.swarm import Mb


@dataclass(slots=True)
class StageClose:
    """Averaging in one stage: one attempt at a time, until one succeeds.

    `prepared` have the mean, `waiting` are to say whether they have it, `helpers` only sum for them.
    """

    attempt: bytes = b""  # empty: none under way
    group: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    assigned: dict[str, frozenset[Mb]] = field(default_factory=dict)
    meets: dict[str, frozenset[str]] = field(default_factory=dict)  # whom each meets, in a grid; else all meet all
    summers: frozenset[str] = frozenset()
    waiting: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    began: float = 0.0
    late_at: float | None = None  # when who has not answered is left behind; None: too few have
    accused: list[tuple[str, str]] = field(default_factory=list)  # by whom, who
    heard_at: float | None = None  # when that is judged; None: nobody is accused
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made

    def involves(self, peer: str) -> bool:
        """Does the attempt under way need this peer?"""
        return bool(self.attempt) and (peer in self.group or peer in self.helpers)

    def met(self, peer: str) -> Collection[str]:
        """Whom of the members a member meets."""
        return self.meets.get(peer, self.group)

    @property
    def due(self) -> float | None:
        """When to look at it without being told anything."""
        if self.settled:
            return None
        if not self.attempt:
            return self.not_before
        return min((at for at in (self.late_at, self.heard_at) if at is not None), default=None)
