"""Choice among several connections to one peer: a pure function of their properties that also returns its reason as
text.

The kind of path counts first, then the round trip. A relay serves others, has limits and adds a detour, so any other
path is better. Of two connections of the same kind the newer one wins, because the older may be the dead one of a peer
that has restarted. But if both sides dialed at the same time, both use the connection that the smaller peer id dialed.
The connection in use stays unless another one is clearly better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class PathKind(IntEnum):
    """Kind of path to a peer; a smaller value is better."""

    LOCAL = 0  # this machine, or the same network
    DIRECT = 1  # one side dialed the other's public address
    PUNCHED = 2  # both sides dialed at once, through their routers
    RELAYED = 3  # through a third peer

    @property
    def word(self) -> str:
        return self.name.lower()


# Penalty of each kind, in seconds of round trip. A local path may still be a detour, such as a slow tunnel; a punched
# one ends when the routers forget it; a relayed one is the last resort.
_COST_S: Final = {PathKind.LOCAL: 0.0, PathKind.DIRECT: 0.02, PathKind.PUNCHED: 0.04, PathKind.RELAYED: 1e3}
_STICKY_S: Final = 0.01  # another path must be better by at least this much
_STICKY_SHARE: Final = 0.2  # and by at least this fraction of the round trip
_TOGETHER_S: Final = 3.0  # dials from both ends within this time count as simultaneous; longer than a handshake


@dataclass(frozen=True, slots=True)
class Path:
    """The properties of one connection that the choice depends on."""

    way: PathKind
    rtt_s: float | None  # None if not measured yet
    opened_at: float
    ours: bool  # dialed by this side

    def __str__(self) -> str:
        return self.way.word if self.rtt_s is None else f"{self.way.word}, {self.rtt_s * 1000:.0f} ms"


def choose(paths: Sequence[Path], current: int | None, *, prefer_ours: bool) -> tuple[int, str]:
    """Index in `paths` (not empty) of the connection to use, and the reason. `current`: the one in use, if any.

    `prefer_ours`: True if this side's peer id is the smaller one; the other side passes the opposite.
    """
    best, why = 0, "the only one"
    if current is not None and len(paths) > 1:
        best, why = current, f"{paths[current]}: in use, and nothing is clearly better"
    for number, path in enumerate(paths):
        other = paths[best]
        if number == best:
            continue
        if path.way != other.way:
            reason = _better(path, other, sticky=best == current)
        else:
            later = (path.opened_at, number) > (other.opened_at, best)
            reason = _newer(path, other, prefer_ours, later)
        if reason:
            best, why = number, reason
    return best, why


def _better(path: Path, other: Path, *, sticky: bool) -> str:
    """Reason to use `path` instead of `other`, which is of another kind, or "" to keep `other`."""
    rtt_s, other_s = path.rtt_s, other.rtt_s
    if rtt_s is None or other_s is None:
        rtt_s = other_s = 0.0  # if either is not measured yet, both count as equal
    gain_s = _COST_S[other.way] + other_s - _COST_S[path.way] - rtt_s
    margin_s = max(_STICKY_S, _STICKY_SHARE * other_s) if sticky else 0.0
    return f"{path}: better than {other}" if gain_s > margin_s else ""


def _newer(path: Path, other: Path, prefer_ours: bool, later: bool) -> str:
    """Like `_better`, for two of the same kind; `later`: `path` was opened after `other`."""
    if path.ours != other.ours and abs(path.opened_at - other.opened_at) < _TOGETHER_S:
        return f"{path}: dialed by the smaller peer id, at the same time" if path.ours is prefer_ours else ""
    return f"{path}: newer, the older one may be dead" if later else ""
