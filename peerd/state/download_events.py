"""Events and outputs of a download, as plain values; the rules are in `state/download`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from peerd.state.quorum import Claim

DIGESTS: Final = -1  # used instead of a piece's number
MANIFEST: Final = -2


@dataclass(slots=True)
class PartialState:
    """Remains of an earlier download: the root of its state, the pieces received, and the donors' speeds."""

    root: bytes = b""  # empty: no state
    have: set[int] = field(default_factory=set)
    piece_s: dict[str, float] = field(default_factory=dict)  # by donor: seconds per piece


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimReceived:
    """The answer to a MANIFEST request."""

    ask: int
    claim: Claim


@dataclass(frozen=True, slots=True)
class Arrived:
    """Digests or a piece have arrived, are correct, and are stored."""

    ask: int


@dataclass(frozen=True, slots=True)
class Wrong:
    """The donor lied: its answer contradicts its claim, or is no valid answer."""

    ask: int
    why: str


@dataclass(frozen=True, slots=True)
class DonorFailed:
    """No answer. `gone`: the donor no longer has its claimed state; `retry_after_s`: it is busy, not at fault."""

    ask: int
    why: str
    gone: bool = False
    retry_after_s: float | None = None


Event = ClaimReceived | Arrived | Wrong | DonorFailed


# --- outputs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskDonor:
    """Ask `donor` for a piece, DIGESTS or MANIFEST."""

    ask: int
    donor: str
    piece: int
    timeout_s: float
    meet: int = 0  # for MANIFEST: the step that the donor should wait for


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer to a request is no longer needed; report no event for it."""

    ask: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """This state is downloaded from now on; data of another state is useless."""

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
    """All pieces have arrived: the download is complete."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The download is impossible for now. `moved_on`: donors have dropped the state, since the swarm is past it."""

    why: str
    moved_on: bool = False


Output = AskDonor | Cancel | Chosen | BlameDonor | Downloaded | GaveUp
