"""Part of the averaging benchmark: processes that average on order, and how long a round takes them.

A round lasts from its common beginning, which is told ahead, until the last member has the sum. Sums are checked when
all have theirs: a check takes the processor from those who are still at it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._told import Start, Told

LEAD_S = 0.05  # from an order to its common beginning


class Peer(Told):
    """A peer's process."""

    def __init__(self, start: Start, *arguments: str) -> None:
        super().__init__(start, "_averager", *arguments)


def ask(members: Sequence[Peer], **order: Any) -> list[dict[str, Any]]:
    for peer in members:
        peer.tell(**order)
    return [peer.hear() for peer in members]


def met(members: Sequence[Peer]) -> list[str]:
    """The members' peer ids, in their order, when all know and reach each other."""
    found = [peer.hear() for peer in members]
    ask(members, do="meet", peers={each["peer"]: each["addr"] for each in found})
    return [each["peer"] for each in found]


def round_s(members: Sequence[Peer], code: str, lead_s: float = LEAD_S, **more: Any) -> float:
    """Seconds of one round of ours; `more` as in an order to sum."""
    begin = time.monotonic() + lead_s
    found = ask(members, do="sum", code=code, attempt=secrets.token_hex(16), at=begin, **more)
    return lasted(members, found, begin)


def group_s(members: Sequence[Peer]) -> float:
    """Seconds from the first member's decision to have a round until it knows that everybody stands in it.

    Its orders go out as in training; the vector has one element for each member, so that all have exchanged parts with
    all, and next to nothing is summed.
    """
    (answer,) = ask(members[:1], do="form", attempt=secrets.token_hex(16))
    seconds: float = answer["seconds"]
    return seconds


def gloo_s(members: Sequence[Peer], count: int) -> float:
    """Seconds of one round of gloo's."""
    found = ask(members, do="gloo", count=count)
    return lasted(members, found, max(answer["begin"] for answer in found))


def lasted(members: Sequence[Peer], found: Sequence[Mapping[str, Any]], begin: float) -> float:
    """Seconds from `begin` to the last end; everybody brought ones, so that the right sum is known."""
    if not all(answer["right"] for answer in ask(members, do="check", sum=len(members))):
        raise RuntimeError("a wrong sum")
    seconds: float = max(answer["end"] for answer in found) - begin
    return seconds
