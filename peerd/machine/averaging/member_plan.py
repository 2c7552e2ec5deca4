"""One member's part in a conductor's averaging order: the rounds that it has to make, one after the other.

Each round's attempt id is derived from the order's and the round's number, so nobody can take a frame of one round for
one of another. A hostile conductor may send an order that does not fit together, or in which our gradient would not
count: refused with ValueError. What others are told we cannot see; where it differs, rounds fail, and name somebody.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from peerd.core.messages.swarm import GridRound, Prepare
from peerd.machine.averaging.allreduce import AveragingPlan

_SLACK = 4.0  # a line that is used by others, too, carries less than it says
_AT_LEAST_S = 30.0  # of one round: machines compute, too, and other things beside it


@dataclass(frozen=True, slots=True)
class Terms:
    """Averaging settings of a run file; `align`: elements of the code's blocks (`AveragingPlan.align`)."""

    part_bytes: int
    patience_s: float
    align: int = 1


def attempt_of(attempt: bytes, number: int) -> bytes:
    """The id, 16 bytes, of one of the rounds or sums that make up an attempt."""
    return hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16, key=attempt, person=b"averaging round").digest()


def plans_of(order: Prepare, own: str, terms: Terms) -> tuple[AveragingPlan, ...]:
    """The rounds that `own` has to make; ValueError for an order that does not fit together."""
    if not order.rounds:
        return (AveragingPlan.of(order, terms.part_bytes, terms.patience_s),)
    if order.split:
        raise ValueError("an order of several rounds divides each of them")
    if own not in order.rounds[0].senders:
        raise ValueError("the first round does not count what we bring")
    return tuple(_plan(order, number, own, terms) for number in range(len(order.rounds)))


def _plan(order: Prepare, number: int, own: str, terms: Terms) -> AveragingPlan:
    round_ = order.rounds[number]
    _check(round_, own, set(order.group))
    named = {*round_.senders, *round_.listeners}
    return AveragingPlan(
        attempt=attempt_of(order.attempt, number),
        group=tuple(party.peer for party in round_.split) or (*round_.senders, *round_.listeners),
        part_bytes=min(terms.part_bytes, round_.part_bytes or terms.part_bytes),
        patience_s=terms.patience_s,
        senders=tuple(round_.senders),
        shares=tuple(party.share for party in round_.split) if round_.split else None,
        listeners=tuple(round_.listeners),
        mates=tuple(peer for peer in order.group if peer not in named),
        copy=round_.copy,
        copies=round_.copies,
        align=terms.align,
        timeout_s=order.timeout_s,
        coming_s=_coming_s(order, number, terms.patience_s),
        s_per_byte=round_.s_per_byte,
    )


def _coming_s(order: Prepare, number: int, patience_s: float) -> float:
    """Seconds that others may be in a round before this one: their part of the attempt's time, or less where lines are
    known. Whoever claims it longer holds everyone up.
    """
    share_s, earlier_s = order.timeout_s * number / len(order.rounds), order.rounds[number].earlier_s
    if earlier_s <= 0:
        return share_s
    return min(share_s, _SLACK * earlier_s + number * (2 * patience_s + _AT_LEAST_S))


def _check(round_: GridRound, own: str, group: set[str]) -> None:
    named = [*round_.senders, *round_.listeners]
    if own not in named or not group.issuperset(named):
        raise ValueError("a round is not of this member and its group")
    if len(set(named)) != len(named):
        raise ValueError("a peer is twice in a round")
    if round_.copy >= round_.copies:
        raise ValueError("a group is beyond the last that makes the same sum")
    if not round_.split:
        return
    if sorted(party.peer for party in round_.split) != sorted(named):
        raise ValueError("the parties of a round must be its senders and listeners")
    if any(party.mode == "aux" or (party.mode == "client" and party.share) for party in round_.split):
        raise ValueError("a round of a grid has no helpers, and a client no share")
