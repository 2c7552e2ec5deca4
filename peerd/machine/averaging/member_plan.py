"""One member's part in a conductor's averaging order.

A hostile conductor may send an order that does not fit together, or in which our gradient would not count: refused with
ValueError. What others are told we cannot see; where it differs, rounds fail, and name somebody.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.swarm import Prepare
from peerd.machine.averaging.allreduce import AveragingPlan


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """Averaging settings of a run file; `align`: elements of the code's blocks (`AveragingPlan.align`)."""

    part_bytes: int
    patience_s: float
    align: int = 1


def plan_of(order: Prepare, own: str, terms: MemberTerms) -> AveragingPlan:
    """The round that the order has `own` make; ValueError for an order that does not fit together."""
    if own not in order.group:
        raise ValueError("a round is not of this member and its group")
    if own in order.listeners and order.second:
        raise ValueError("a listener brings no second factors")
    if order.second and (order.brings is None or order.further):
        raise ValueError("a second sum needs the first, and has none after it")
    return AveragingPlan.of(order, terms.part_bytes, terms.patience_s, terms.align)
