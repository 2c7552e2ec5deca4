"""Sharing of experts among hosts that are there: how many of its experts a host hands to another, and which.

Sans-IO. Hosts hold experts in proportion to their speed, as the time of a sample measured on each says; the
load-balancing loss sees to it that experts have equal work. A host whose speed nobody knows yet gets a few, and is
measured by these. Small differences are let be: an expert that moves answers no backward meanwhile.

A hostile host may state any speed and any room: it attracts experts, which it might claim without being asked, too. It
keeps none that it does not announce, and in a run with tokens only hosts by token are asked.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_TAKING
from peerd.machine.experts.custody import draw

_FASTER_AT_MOST: Final = 32.0  # that one host counts for so many of another
_SMALL: Final = 4  # a difference of less than one in so many of its experts is let be: measured speeds vary
_UNKNOWN: Final = 8  # one in so many goes at once to a host whose speed nobody knows


@dataclass(frozen=True, slots=True)
class HostShare:
    """A host's part in the run. `sample_s`: its device's time for a sample; 0: not known yet."""

    hosted: int
    places: int  # for more
    sample_s: float = 0.0


def experts_to_give(own: HostShare, other: HostShare) -> int:
    """Number of experts that `own` hands to `other`, so that both have their part by speed; it keeps one at least."""
    if own.hosted < 2 or other.places < 1:
        return 0
    if other.hosted and not own.sample_s:
        return 0  # else experts could go round in circles, for nobody knows which way is better
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
    """The host that should get most of our experts, and how many; None: all is well as it is."""
    wanted = [(experts_to_give(own, other), peer) for peer, other in others.items()]
    count, peer = max(wanted, default=(0, None), key=lambda one: (one[0], one[1]))
    return (peer, count) if peer is not None and count else None


def parts_of_all(uids: Iterable[Uid], others: Mapping[PeerId, HostShare]) -> dict[PeerId, list[Uid]]:
    """The experts that each other host gets of one that leaves: one by one, to the host with the least work by then."""
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
    """Experts in the order in which they go to a host: by lot, so that no layer goes whole."""
    return sorted(uids, key=lambda uid: draw(uid, taker))
