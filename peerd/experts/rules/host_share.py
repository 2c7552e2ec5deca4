"""Sharing of experts among the hosts that are present: how many of its experts a host hands to another, and which.

Sans-IO. Hosts hold experts in proportion to their speed, measured as the time per sample on each; the load-balancing
loss gives all experts equal work. A host of unknown speed gets a few experts, which serve to measure it. Small
differences are ignored, because an expert does not answer backward calls while it moves.

A hostile host may claim any speed and any space: it attracts experts, which it could also claim without being asked. It
loses an expert that it does not announce, and in a run with tokens only hosts with a token are asked.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_TAKING
from peerd.experts.rules.orphan_watch import draw
from peerd.run.grid import Uid

_FASTER_AT_MOST: Final = 32.0  # largest ratio of two hosts' speeds that counts
_SMALL: Final = 4  # a difference below 1 / _SMALL of its experts is ignored, since measured speeds vary
_UNKNOWN: Final = 8  # at most 1 / _UNKNOWN of its experts go at once to a host of unknown speed


@dataclass(frozen=True, slots=True)
class HostShare:
    """A host's part in the run. `sample_s`: its device's time per sample; 0: unknown."""

    hosted: int
    places: int  # room for more experts
    sample_s: float = 0.0


def experts_to_give(own: HostShare, other: HostShare) -> int:
    """Number of experts that `own` hands to `other`, so that both have shares by speed. `own` keeps at least one."""
    if own.hosted < 2 or other.places < 1:
        return 0
    if other.hosted and not own.sample_s:
        return 0  # with unknown speed, experts could circulate for ever
    known = own.sample_s > 0 and other.sample_s > 0
    pace = own.sample_s / other.sample_s if known else 1.0
    pace = min(_FASTER_AT_MOST, max(1 / _FASTER_AT_MOST, pace))
    fair = (own.hosted + other.hosted) / (1.0 + pace)
    surplus = math.floor(own.hosted - fair + 1e-9)
    if other.hosted and surplus < max(1, own.hosted // _SMALL):
        return 0
    count = min(surplus, own.hosted - 1, other.places, EXPERT_TAKING)
    if not other.sample_s:
        count = min(count, max(1, own.hosted // _UNKNOWN) - other.hosted)
    return max(0, count)


def best_taker(own: HostShare, others: Mapping[PeerId, HostShare]) -> tuple[PeerId, int] | None:
    """The host that should get most of our experts, and how many, or None if nothing should move."""
    wanted = [(experts_to_give(own, other), peer) for peer, other in others.items()]
    count, peer = max(wanted, default=(0, None), key=lambda one: (one[0], one[1]))
    return (peer, count) if peer is not None and count else None


def parts_of_all(uids: Iterable[Uid], others: Mapping[PeerId, HostShare]) -> dict[PeerId, list[Uid]]:
    """Experts that each other host gets from one that leaves: one by one, to the host with the least work so far."""
    known = [share.sample_s for share in others.values() if share.sample_s]
    usual = sum(known) / len(known) if known else 1.0
    work = [(share.hosted * (share.sample_s or usual), peer) for peer, share in others.items() if share.places]
    heapq.heapify(work)
    parts = dict[PeerId, list[Uid]]()
    for uid in sorted(uids):
        if not work:
            break
        _, taker = heapq.heappop(work)
        part, share = parts.setdefault(taker, []), others[taker]
        part.append(uid)
        if len(part) < share.places:
            heapq.heappush(work, ((share.hosted + len(part)) * (share.sample_s or usual), taker))
    return parts


def given_first(uids: Iterable[Uid], taker: PeerId) -> list[Uid]:
    """Experts in the order in which a host gets them: pseudo-random, so that no layer is handed over as a whole."""
    return sorted(uids, key=lambda uid: draw(uid, taker))
