"""Patience with hosts that announce that they adopt an expert, sans-IO: how long others leave the expert to them.

A host that announces this, or that claims the expert without a checkpoint of it, is waited for until it has had the
time to download the state; then its turn is over. Identities are free, so all peers of one network (in a private
network: at one address) share one turn for an expert, and the number of turns is limited until the expert has an owner.

Turns keep honest hosts from adopting one expert twice. They do not bind anybody else: a host that claims an orphan,
with a checkpoint that continues from the owner's, is its owner without a turn (`lineage`).
"""

from __future__ import annotations

from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERTS_SEEN

_SEATS: Final = 3  # networks that are waited for: the first one may fail, and the second one may be a liar
_PERIODS: Final = 4.0  # announcement periods, for an empty state: records of departed holders expire by then
_BYTES_PER_S: Final = 256 << 10  # of a line that may carry experts
_MOST_S: Final = 600.0


class AdopterTurns:
    """By expert, the networks that are waited for, and since when."""

    def __init__(self, announce_s: float) -> None:
        self._announce_s = announce_s
        self._since = BoundedDict[Uid, dict[str, float]](EXPERTS_SEEN)

    def has_turn(self, now: float, uid: Uid, peer: PeerId, seat: str | None, size_bytes: int) -> bool:
        """True while others leave an expert to `peer`.

        `seat`: its network, or None if unknown; `size_bytes`: of the expert's newest checkpoint, 0 if there is none.
        """
        since = self._since.get(uid, {})
        name = seat if seat is not None else ""
        if name not in since:
            if len(since) >= _SEATS:
                return False
            since[name] = now
            self._since[uid] = since
        return now < since[name] + self.longest_s(size_bytes)

    def longest_s(self, size_bytes: int) -> float:
        """Length of one turn, in seconds."""
        return min(_MOST_S, _PERIODS * self._announce_s + size_bytes / _BYTES_PER_S)

    def settled(self, uid: Uid) -> None:
        """Record that an expert has an owner: if this one is lost, every network has a turn again."""
        self._since.pop(uid, None)
