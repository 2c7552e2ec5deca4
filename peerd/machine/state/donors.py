"""The donors of one download: what each vouches for and owes, how fast it gives, when it may be asked again.

Books only; `machine/state/download` decides. Speed is measured from arrival to arrival while anything is under way, so
that several pieces in flight do not count against each other. A donor that is silent for much longer than its pieces
used to take is quiet: it gets no more until something arrives. Failures in a row (strikes) end with the donor gone.
Times are arguments, in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from peerd.machine.state.quorum import Claim

UNKNOWN_PIECE_S = 3.0  # what a piece may take from a donor that has given none yet, before it counts as late
FIRST_PIECES = 2  # asked at once of a donor that has given none yet
LEAST_PIECE_S = 0.2  # below this, lateness says nothing: schedulers and bursts
_LATE_FACTOR = 3.0
_MEMORY = 0.7  # share of the old estimate of speed when a new sample comes
_HORIZON_S = 2.0  # how much work to have in flight at a donor


class DonorStanding(enum.Enum):
    """Standing of a donor."""

    NEW = "to be asked for its claim"
    ASKED = "asked for its claim"
    CLAIMS = "vouches for a state"
    GONE = "lost, or no use"
    LIAR = "was caught lying"


@dataclass(slots=True)
class PieceInFlight:
    """A piece that was asked of a donor."""

    ask: int
    piece: int
    donor: Donor
    asked_at: float
    expected: float  # when it should be here
    due: float  # later than that it is late


@dataclass(slots=True)
class Donor:
    """See the module's header."""

    name: str
    standing: DonorStanding = DonorStanding.NEW
    claim: Claim | None = None
    flights: list[PieceInFlight] = field(default_factory=list)
    piece_s: float | None = None  # seconds between the pieces that it gives
    heard_at: float = 0.0  # last sign of life that pieces under way are measured from
    not_before: float = 0.0
    strikes: int = 0
    asked: int = 0  # how often, for its claim
    why: str = ""  # it is of no use

    @property
    def usable(self) -> bool:
        return self.standing not in (DonorStanding.GONE, DonorStanding.LIAR)

    def takes_s(self, pieces: int) -> float:
        """Expected seconds for so many pieces, as far as known."""
        return pieces * (UNKNOWN_PIECE_S if self.piece_s is None else self.piece_s)

    def window(self, most: int) -> int:
        """Number of pieces to have in flight: work for some seconds, and never none."""
        if self.piece_s is None or self.strikes:
            return 1 if self.strikes else min(FIRST_PIECES, most)
        return max(1, min(most, round(_HORIZON_S / max(self.piece_s, 1e-6))))

    def quiet_at(self) -> float:
        """Time at which the donor counts as quiet if nothing arrives before; only while something is under way."""
        return self.heard_at + max(LEAST_PIECE_S, _LATE_FACTOR * self.takes_s(1))

    def depart(self, now: float, ask: int, piece: int) -> PieceInFlight:
        """A piece is asked of it."""
        if not self.flights:
            self.heard_at = now
        takes_s = self.takes_s(len(self.flights) + 1)
        flight = PieceInFlight(ask, piece, self, now, now + takes_s, now + max(LEAST_PIECE_S, _LATE_FACTOR * takes_s))
        self.flights.append(flight)
        return flight

    def arrived(self, now: float, flight: PieceInFlight) -> None:
        """The piece is here."""
        self.flights.remove(flight)
        sample = now - self.heard_at
        self.piece_s = sample if self.piece_s is None else _MEMORY * self.piece_s + (1 - _MEMORY) * sample
        self.heard_at = now
        self.strikes = 0

    def failed(self, now: float, most_strikes: int, pause_s: float, why: str) -> None:
        """It did not answer: wait a while, or give it up."""
        self.strikes += 1
        self.why = why
        self.not_before = now + pause_s * 2 ** (self.strikes - 1)
        if self.strikes >= most_strikes:
            self.standing = DonorStanding.GONE
