"""Events and outputs of a download: values only.

`machine/state/download` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from peerd.machine.state.quorum import Claim

DIGESTS: Final = -1  # in place of a piece's number
MANIFEST: Final = -2


@dataclass(slots=True)
class PartialState:
    """Remains of an earlier download: the digests of its pieces, the pieces that are there, and how fast donors
    were.
    """

    root: bytes = b""  # empty: nothing of any state
    have: set[int] = field(default_factory=set)
    piece_s: dict[str, float] = field(default_factory=dict)  # by donor: what one of these pieces would have taken


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vouched:
    """The answer to a MANIFEST."""

    ask: int
    claim: Claim


@dataclass(frozen=True, slots=True)
class Arrived:
    """Digests or a piece came, and are right, and kept."""

    ask: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """The donor lies: its answer is not what it vouched for, or no answer at all."""

    ask: int
    why: str


@dataclass(frozen=True, slots=True)
class DonorFailed:
    """No answer. `gone`: the donor no longer has what it vouched for; `retry_after_s`: it is busy, no fault."""

    ask: int
    why: str
    gone: bool = False
    retry_after_s: float | None = None


Event = Vouched | Arrived | Wrong | DonorFailed


# --- outputs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskDonor:
    """Ask `donor` for a piece, or DIGESTS or MANIFEST."""

    ask: int
    donor: str
    piece: int
    timeout_s: float
    meet: int = 0  # of a MANIFEST: the step to wait for


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer is no longer wanted, and no event either."""

    ask: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """From now on this is fetched; what there is of another state is of no use."""

    claim: Claim
    donors: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class BlameDonor:
    """A donor lied."""

    donor: str
    why: str


@dataclass(frozen=True, slots=True)
class Downloaded:
    """Every piece is there."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """It cannot be done now. `moved_on`: the donors let go of the state, the swarm stands elsewhere."""

    why: str
    moved_on: bool = False


Output = AskDonor | Cancel | Chosen | BlameDonor | Downloaded | GaveUp
