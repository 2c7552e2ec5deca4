"""One member's part in a conductor's averaging order.

A hostile conductor may send an inconsistent order, or one in which our gradient would not count: ValueError is raised.
This member cannot see the orders sent to others; if they differ, rounds fail and report the members at fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.swarm import Prepare
from peerd.machine.averaging.allreduce import AveragingPlan


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """Averaging settings of a run file. `align`: elements per block of the codec (`AveragingPlan.align`)."""

    part_bytes: int
    patience_s: float
    align: int = 1


def plan_of(order: Prepare, own: str, terms: MemberTerms) -> AveragingPlan:
    """The round that the order defines for `own`. Raises ValueError for an inconsistent order."""
    if own not in order.group:
        raise ValueError("the order's group does not include this member")
    if own in order.listeners and order.second:
        raise ValueError("a listener cannot contribute second factors")
    if order.second and (order.brings is None or order.further):
        raise ValueError("a second sum needs a first one and cannot be followed by a third")
    return AveragingPlan.of(order, terms.part_bytes, terms.patience_s, terms.align)
