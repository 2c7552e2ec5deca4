"""Custody of checkpoints, sans-IO: which peers hold an expert's checkpoints, and who adopts an orphan.

All peers compute the same order from the names alone, a hash of expert and peer (rendezvous hashing), so that they
agree without a message, and that the experts of a lost host spread over all others. An expert is an orphan if nobody
claims it, or if its claim was not renewed for longer than a period and its host does not answer: either alone may be a
short outage, or a broken connection between two peers. A hostile peer may offer checkpoints or space that it does not
have: then the next peer in the order is used.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.run.grid import Uid

_RENEWED: Final = 1.1  # periods that a claim stands without renewal
_UNCLAIMED: Final = 0.5  # periods without any claim, if the last owner does not answer
_LET_GO: Final = 2.0  # likewise if it answers: it may be starting
_TURN: Final = 0.25  # periods between the turns of two adopters
_TURNS_PER_PLACE: Final = 4  # most turns of one place's adopters; more than these watch each other's announcements
_TURNS: Final = 16  # most turns of all adopters
_WATCHED: Final = 1 << 16  # experts: more than a peer reads of in many look-ups
_PREFIXES: Final = 4096  # whose claims are remembered


@dataclass(frozen=True, slots=True)
class HolderRoom:
    """A peer that offers disk space. `place`: its claimed location, such as an address without its port."""

    peer: PeerId
    room_bytes: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class SeenClaim:
    """A host's claim of an expert, from its record. `until`: the record's expiry, later in each renewal."""

    peer: PeerId
    generation: int
    version: int
    until: float

    @property
    def rank(self) -> tuple[int, PeerId]:
        """Order of claims of one expert: the highest wins."""
        return self.generation, self.peer


def draw(uid: Uid, peer: PeerId) -> bytes:
    """Pseudo-random rank of a peer for an expert; the lowest comes first."""
    return hashlib.sha256(f"{uid} ".encode() + peer.raw).digest()


def in_turn(uid: Uid, peers: Iterable[PeerId]) -> list[PeerId]:
    """The peers in the order in which they hold or adopt an expert: pseudo-random, the same on every peer."""
    return sorted(set(peers), key=lambda peer: draw(uid, peer))


def choose_holders(uid: Uid, own: HolderRoom, offers: Sequence[HolderRoom], size_bytes: int) -> list[PeerId]:
    """Other peers with space for a checkpoint, best first.

    They are ordered as by `in_turn`, but each place is used once before any is used again, and our own place last.
    """
    rooms = {offer.peer: offer for offer in offers if offer.peer != own.peer and offer.room_bytes >= size_bytes}
    used, ordered = {own.place: 1}, list[tuple[int, PeerId]]()
    for peer in in_turn(uid, rooms):
        place = rooms[peer].place
        ordered.append((used.get(place, 0), peer))
        used[place] = used.get(place, 0) + 1
    return [peer for _, peer in sorted(ordered, key=lambda item: item[0])]


class OrphanWatch:
    """The claims to experts that this peer saw, and since when they are unchanged."""

    def __init__(self, announce_s: float) -> None:
        self._announce_s = announce_s
        self._seen = BoundedDict[Uid, tuple[SeenClaim | None, float]](_WATCHED)  # and since when it is unchanged
        self._last = BoundedDict[Uid, dict[Uid, SeenClaim]](_PREFIXES)  # by prefix

    def known(self, prefixes: Iterable[Uid]) -> list[Uid]:
        """Experts below these prefixes that somebody has claimed."""
        return [uid for prefix in prefixes for uid in self._last.get(prefix, ())]

    def last(self, uid: Uid) -> SeenClaim | None:
        """The highest claim to an expert ever seen, or None."""
        return self._last.get(uid.prefix, {}).get(uid)

    def forget(self, uid: Uid) -> None:
        """Forget since when the claim to an expert is unchanged, because this peer hosts it, or has hosted it."""
        self._seen.pop(uid, None)

    def is_doubtful(self, now: float, uid: Uid, claim: SeenClaim | None) -> bool:
        """Record the present claim; True if it is time to check whether its host answers."""
        seen = self._seen.get(uid)
        if seen is None or seen[0] != claim:
            self._seen[uid] = (claim, now)
        last = self.last(uid)
        if claim is not None and (last is None or claim.rank >= last.rank):
            below = self._last.get(uid.prefix, {})
            below[uid] = claim
            self._last[uid.prefix] = below
        return now >= self.doubtful_at(uid)

    def doubtful_at(self, uid: Uid) -> float:
        """Time at which an expert becomes doubtful if nothing changes, or infinity if it was never seen."""
        claim, since = self._seen.get(uid, (None, float("inf")))
        return since + self._announce_s * (_UNCLAIMED if claim is None else _RENEWED)

    def orphan_since(self, uid: Uid, answers: bool) -> float:
        """Time at which a doubtful expert became an orphan, or will. `answers`: does its last owner answer?"""
        claim, since = self._seen[uid]
        if claim is not None:
            return float("inf") if answers else since + _RENEWED * self._announce_s
        return since + self._announce_s * (_LET_GO if answers else _UNCLAIMED)

    def may_adopt(self, now: float, uid: Uid, since: float, own: PeerId, others: Mapping[PeerId, str]) -> bool:
        """True if it is our turn to adopt the expert: each of `others` before us in the order has had its turn.

        `others` maps peers to their places. Identities are free, so each place has at most a few turns, regardless of
        the number of its peers.
        """
        order = in_turn(uid, [own, *others])
        places = Counter(others[peer] for peer in order[: order.index(own)])
        turn = min(_TURNS, sum(min(_TURNS_PER_PLACE, count) for count in places.values()))
        return now >= since + turn * _TURN * self._announce_s
