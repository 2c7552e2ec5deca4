"""Part of the averaging benchmark: runs averaging rounds in other processes, and measures their duration.

A round lasts from its common start time, which is sent in advance, until the last member has the sum. Sums are checked
after all members have finished, since a check would slow down the others.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks._remote_process import RemoteProcess, Start, module

LEAD_S = 0.05  # from an order to the common start time


class Peer(RemoteProcess):
    """The process of one peer."""

    def __init__(self, start: Start, *arguments: str) -> None:
        super().__init__(start, module("_averager", *arguments))


def ask(members: Sequence[Peer], **order: Any) -> list[dict[str, Any]]:
    for peer in members:
        peer.order(**order)
    return [peer.answer() for peer in members]


def met(members: Sequence[Peer]) -> list[str]:
    """Connect all members with each other. Returns their peer ids, in the same order."""
    found = [peer.answer() for peer in members]
    ask(members, do="meet", peers={each["peer"]: each["addr"] for each in found})
    return [each["peer"] for each in found]


def round_s(members: Sequence[Peer], code: str, lead_s: float = LEAD_S, **more: Any) -> float:
    """Seconds of one round of peerd. `more` are fields of the order, see `Averager.sum`."""
    begin = time.monotonic() + lead_s
    found = ask(members, do="sum", code=code, attempt=secrets.token_hex(16), at=begin, **more)
    return lasted(members, found, begin)


def group_s(members: Sequence[Peer]) -> float:
    """Seconds from the first member's decision to start a round until it knows that all members take part.

    Its orders are sent as in training. The vector has one element per member, so that all exchange parts with all, but
    hardly anything is summed.
    """
    (answer,) = ask(members[:1], do="form", attempt=secrets.token_hex(16))
    seconds: float = answer["seconds"]
    return seconds


def gloo_s(members: Sequence[Peer], count: int) -> float:
    """Seconds of one round of gloo."""
    found = ask(members, do="gloo", count=count)
    return lasted(members, found, max(answer["begin"] for answer in found))


def lasted(members: Sequence[Peer], found: Sequence[Mapping[str, Any]], begin: float) -> float:
    """Seconds from `begin` to the last end. Checks the sum, which is known, since all members contribute ones."""
    if not all(answer["right"] for answer in ask(members, do="check", sum=len(members))):
        raise RuntimeError("a wrong sum")
    seconds: float = max(answer["end"] for answer in found) - begin
    return seconds
