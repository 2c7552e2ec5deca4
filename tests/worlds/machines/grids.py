"""The rounds of a grid in which nobody fails, and each member's orders, as a conductor makes them."""

from __future__ import annotations

from peerd.averaging.topology import GroupTopology, OrderedGroup
from peerd.messages.swarm import Mbs, Prepare


def rounds_of(grouping: GroupTopology, names: tuple[str, ...]) -> list[tuple[OrderedGroup, ...]]:
    """The groups of each round; of a flat stage one round of one group."""
    how = grouping.order(0, names)
    found, clusters = [how.groups], [sorted(one.meeting.peers) for one in how.groups]
    for side in how.sides:
        runs = [clusters[at : at + side] for at in range(0, len(clusters), side)]
        found.append(tuple(one for run in runs for one in grouping.meet(0, run)))
        clusters = [sorted(peer for cluster in run for peer in cluster) for run in runs]
    return found


def order_of(one: OrderedGroup, attempt: bytes, brings: bytes | None, timeout_s: float, *, last: bool) -> Prepare:
    """The order to a sender of this group."""
    meeting, split = one.meeting, one.split
    return Prepare(
        bytes(16),
        1,
        0,
        attempt,
        b"",
        list(meeting.peers),
        Mbs(),
        8,
        timeout_s,
        split=list(split.parties) if split is not None else [],
        part_bytes=split.part_bytes if split is not None else 0,
        elements=split.elements if split is not None else 0,
        dtype=split.dtype if split is not None else "",
        s_per_byte=split.s_per_byte if split is not None else 0.0,
        listeners=list(meeting.listeners),
        copy=meeting.copy,
        copies=meeting.copies,
        brings=brings,
        last=last,
    )


def attempt_name(number: int, group: int) -> bytes:
    """The id of one group's attempt in a round."""
    return bytes([1, number]) + group.to_bytes(14, "big")
