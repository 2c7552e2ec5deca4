"""The donors of one download: each one's claim, requested pieces and speed, and when it may be asked again.

Bookkeeping only; `state/download` decides. Speed is measured from arrival to arrival while anything is in
flight, so that several pieces in flight do not count against each other. A donor that is silent for much longer than
its pieces usually take is quiet: it is asked for nothing until something arrives. After several failures in a row
(strikes) a donor is dropped. Times are arguments, in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from peerd.state.quorum import Claim

UNKNOWN_PIECE_S = 3.0  # assumed time of a piece from a donor that has sent none yet
FIRST_PIECES = 2  # pieces in flight from a donor that has sent none yet
LEAST_PIECE_S = 0.2  # shorter delays are not late: schedulers and bursts cause them
LATE_FACTOR = 3.0
_MEMORY = 0.7  # weight of the old estimate of speed against a new sample
_HORIZON_S = 2.0  # seconds of work to have in flight at a donor


class DonorStanding(enum.Enum):
    """Standing of a donor in one download: whether it must still be asked, vouches for a state, or is excluded."""

    NEW = "to be asked for its claim"
    ASKED = "asked for its claim"
    CLAIMS = "vouches for a state"
    GONE = "lost or useless"
    LIAR = "was caught lying"


@dataclass(slots=True)
class PieceInFlight:
    """A piece that was requested from a donor."""

    ask: int
    piece: int
    donor: Donor
    asked_at: float
    expected: float  # expected time of arrival
    due: float  # after this time it is late


@dataclass(slots=True)
class Donor:
    """One donor of a download."""

    name: str
    standing: DonorStanding = DonorStanding.NEW
    claim: Claim | None = None
    flights: list[PieceInFlight] = field(default_factory=list)
    piece_s: float | None = None  # seconds between its pieces
    heard_at: float = 0.0  # last arrival, from which pieces in flight are measured
    not_before: float = 0.0
    strikes: int = 0
    asked: int = 0  # number of requests for its claim
    why: str = ""  # reason of its last failure
    is_late: bool = False  # others have answered a request before it, and nothing has arrived from it since

    @property
    def usable(self) -> bool:
        return self.standing not in (DonorStanding.GONE, DonorStanding.LIAR)

    def takes_s(self, pieces: int) -> float:
        """Expected seconds for `pieces` pieces."""
        return pieces * (UNKNOWN_PIECE_S if self.piece_s is None else self.piece_s)

    def window(self, most: int) -> int:
        """Number of pieces to have in flight: work for some seconds, at least one."""
        if self.piece_s is None or self.strikes:
            return 1 if self.strikes else min(FIRST_PIECES, most)
        return max(1, min(most, round(_HORIZON_S / max(self.piece_s, 1e-6))))

    def quiet_at(self) -> float:
        """Time at which the donor counts as quiet if nothing arrives before; valid while something is in flight."""
        return self.heard_at + max(LEAST_PIECE_S, LATE_FACTOR * self.takes_s(1))

    def depart(self, now: float, ask: int, piece: int) -> PieceInFlight:
        """Record that a piece is requested from it."""
        if not self.flights:
            self.heard_at = now
        takes_s = self.takes_s(len(self.flights) + 1)
        flight = PieceInFlight(ask, piece, self, now, now + takes_s, now + max(LEAST_PIECE_S, LATE_FACTOR * takes_s))
        self.flights.append(flight)
        return flight

    def arrived(self, now: float, flight: PieceInFlight) -> None:
        """Record that the piece has arrived."""
        self.flights.remove(flight)
        sample = now - self.heard_at
        self.piece_s = sample if self.piece_s is None else _MEMORY * self.piece_s + (1 - _MEMORY) * sample
        self.heard_at = now
        self.strikes, self.is_late = 0, False

    def failed(self, now: float, most_strikes: int, pause_s: float, why: str) -> None:
        """Record that it did not answer: pause it, or drop it."""
        self.strikes += 1
        self.why = why
        self.not_before = now + pause_s * 2 ** (self.strikes - 1)
        if self.strikes >= most_strikes:
            self.standing = DonorStanding.GONE
