"""Plan of one download, sans-IO: which donor to ask for what, so that a state is downloaded from several at once.

First each donor is asked for its claim, then the best camp is chosen (state/quorum). Both are left out if the
caller knows the root of what it wants, as of an expert's checkpoint, which its owner signed. Then one donor sends the
digests of all pieces, then all of them send pieces. Each has a few in flight, by its speed, and a donor that finishes
early takes over pieces that slower ones owe. A donor with a wrong answer is a liar: it is reported, and never asked
again; one that fails is asked again a few times, after pauses. Received pieces are kept: only a change of camp (a
larger one at the same position appears) restarts the download.

The driver performs each `AskDonor` and reports one event for it, unless it was cancelled by `Cancel`; it checks digests
and pieces itself and reports whether they were correct. Invariants (`check`): a received piece is not requested again;
a piece is requested from at most two donors, and from the second only if the first is late or much slower; the windows
are kept; after `Downloaded` or `GaveUp` nothing follows. Every wait ends: without a new piece for about `_STALL_S` the
download gives up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from random import Random

from peerd.core.limits import (
    RPC_LEAST_BYTES_PER_S,
    STATE_DONORS,
    STATE_PIECE_BYTES,
    STATE_PIECES_IN_FLIGHT,
    STATE_PIECES_PER_DONOR,
)
from peerd.state import download_events as dl
from peerd.state.donors import (
    FIRST_PIECES,
    LATE_FACTOR,
    LEAST_PIECE_S,
    UNKNOWN_PIECE_S,
    Donor,
    DonorStanding,
    PieceInFlight,
)
from peerd.state.quorum import VOUCHERS, Claim, StateQuorum, camps, meeting_step
from peerd.wire.rate.backoff import backoff_s

_MANIFEST_TIMEOUT_S = 120.0  # includes the time in which a donor copies and hashes its state
_COPY_PIECE_S = 0.05  # time to copy and hash one piece on a slow machine
_PIECE_TIMEOUT_S = 30.0  # in addition to the time of the pieces in flight on a slow line
_STALL_S = 120.0  # time without a new piece before giving up, in addition to the same
_DIGEST_BYTES = 32  # size of the digest of one piece
_SLOW_PIECE_S = STATE_PIECE_BYTES / RPC_LEAST_BYTES_PER_S  # one piece alone on a slow line
_PAUSE_S = 0.5  # after the first failure of a donor; doubles each time
_AGAIN_S = 0.05  # before donors at different steps are asked again; doubles each time
_MOST_PAUSE_S = 10.0  # even if a donor asks for a longer one
_STRIKES = 3
_KNOWN_STRIKES = 2  # of donors that need not copy a state before they answer
_UNHEARD_S = 0.5  # delay before others take over the last pieces of a donor that has never sent one


class Download:
    """The plan of one download; the driver passes events to `handle` and carries out the outputs."""

    def __init__(
        self,
        now: float,
        pieces: int,
        rng: Random,
        donors: Iterable[str],
        kept: dl.PartialState | None = None,
        *,
        all_have_it: bool = False,
        known: Claim | None = None,
    ) -> None:
        """`all_have_it`: each of the donors is known to have the state, whether it answers or not.

        `known`: the state to download, if the caller can verify its root itself. The donors are not asked for claims.
        """
        donors = list(donors)
        self._all_have_it, self._named = all_have_it, len(donors)
        self._pieces = pieces
        self._rng = rng
        self._kept = kept or dl.PartialState()
        self._known = known
        self._donors = {name: self._donor(name) for name in donors}
        self._poll = StateQuorum(now, self._copy_s)
        self._meet = 0  # the step that donors wait for before they report their claim
        self.undecided = ""  # why no state is chosen yet
        self._now = now
        self._moved_at = now  # last progress
        self._asks: dict[int, tuple[Donor, int, PieceInFlight | None]] = {}
        self.unanswered = False  # some requests had no answer yet when the download ended
        self._next_ask = 1
        self._pending = 0  # donors that may still report their claim
        self._digests_due = now
        self._replaced = 0  # since a piece arrived, requests that were made anew because the donors asked were quiet
        self._gone = 0  # donors that have dropped the chosen state
        self._over = False
        self._wakes: list[float] = []
        self.chosen: Claim | None = None
        self.knows_digests = False
        self.have: set[int] = set()
        self._missing: deque[int] = deque()
        self._flying: dict[int, list[PieceInFlight]] = {}

    # --- for the driver ---------------------------------------------------------------------------------------

    def add(self, now: float, donors: Iterable[str]) -> list[dl.Output]:
        """Add donors; those that were dropped are not tried again."""
        donors = list(donors)
        self._named = len(donors)
        for name in donors:
            self._donors.setdefault(name, self._donor(name))
        return self.wake(now)

    def handle(self, now: float, event: dl.Event) -> list[dl.Output]:
        """Process the end of a request; events of requests that are no longer in flight are ignored."""
        under_way = self._asks.pop(event.ask, None)
        if under_way is None or self._over:
            return []
        donor, piece, flight = under_way
        out: list[dl.Output] = []
        if flight is not None and not isinstance(event, dl.Arrived):
            self._lost(flight)
        match event:
            case dl.ClaimReceived(_, claim):
                self._vouched(donor, claim)
            case dl.Arrived():
                self._arrived(now, piece, flight, out)
            case dl.Wrong(_, why):
                self._lied(donor, why, out)
            case dl.DonorFailed():
                self._failed(now, donor, piece, event)
        return out + self.wake(now)

    def wake(self, now: float) -> list[dl.Output]:
        """Decide what to do now; call it at `wake_at` and at the start."""
        out: list[dl.Output] = []
        self._now = now
        self._wakes = [self._stalls_at]
        if not self._over:
            self._ask_claims(now, out)
            self._choose(now, out)
        if not self._over and self.chosen is not None:
            self._plan(now, out)
        if not self._over:
            self._give_up_when_hopeless(now, out)
        return out

    def piece_s(self) -> dict[str, float]:
        """Seconds per piece by donor, if known."""
        return {name: donor.piece_s for name, donor in self._donors.items() if donor.piece_s is not None}

    def claims(self) -> dict[str, Claim]:
        """Claims of the donors that were not caught lying."""
        return {d.name: d.claim for d in self._donors.values() if d.claim and d.standing is not DonorStanding.LIAR}

    def _donor(self, name: str) -> Donor:
        standing = DonorStanding.NEW if self._known is None else DonorStanding.CLAIMS
        return Donor(name, standing, self._known, piece_s=self._kept.piece_s.get(name))

    def wake_at(self) -> float:
        """Time at which `wake` is due; infinity if only after an event."""
        return math.inf if self._over else min((t for t in self._wakes if t > self._now), default=math.inf)

    # --- claims -----------------------------------------------------------------------------------------------

    def _ask_claims(self, now: float, out: list[dl.Output]) -> None:
        donors = self._donors.values()
        self._pending = sum(d.standing is DonorStanding.ASKED for d in donors)
        useful = sum(d.standing is DonorStanding.CLAIMS and self.chosen in (None, d.claim) for d in donors)
        for donor in donors:
            if donor.standing is DonorStanding.NEW and useful + self._pending < STATE_DONORS:
                self._pending += 1
                if self._may_ask(now, donor):
                    donor.asked += 1
                    donor.standing = DonorStanding.ASKED
                    self._ask(donor, dl.MANIFEST, _MANIFEST_TIMEOUT_S + self._copy_s, out)

    def _vouched(self, donor: Donor, claim: Claim) -> None:
        if donor.usable:
            donor.standing, donor.claim, donor.strikes = DonorStanding.CLAIMS, claim, 0

    def _choose(self, now: float, out: list[dl.Output]) -> None:
        if self._known is not None:
            if self.chosen is None:
                self._begin(self._known, tuple(self._donors), "its root is known", out)
            return
        claims = self.claims()
        if self.chosen is None:
            verdict = self._poll.decide(now, claims, self._pending, self._named if self._all_have_it else 0)
            self.undecided = verdict.why
            self._wakes.append(self._poll.due)
            if verdict.camp is not None:
                self._begin(verdict.camp.claim, verdict.camp.donors, verdict.why, out)
            elif verdict.hopeless or (verdict.again and not self._ask_again(now, claims, out)):
                self._end(dl.GaveUp(self._reason(verdict.why)), out)
            return
        rivals = camps((name, claim) for name, claim in claims.items() if claim.position == self.chosen.position)
        size = next((camp.size for camp in rivals if camp.claim == self.chosen), 0)
        if rivals and rivals[0].size >= max(size + 1, VOUCHERS):
            self._begin(rivals[0].claim, rivals[0].donors, "more donors have it than the first choice", out)

    def _ask_again(self, now: float, names: Iterable[str], out: list[dl.Output]) -> bool:
        """Ask these donors for their claims again, at the same moment or for the same step; returns False if none is
        left.
        """
        again = [self._donors[name] for name in names if self._donors[name].standing is DonorStanding.CLAIMS]
        rounds = min((donor.asked for donor in again), default=1)
        if again and self.chosen is None:
            self._meet = meeting_step((donor.claim for donor in again if donor.claim), rounds)
        pause_s = backoff_s(rounds, _AGAIN_S, _MOST_PAUSE_S)
        for donor in again:
            donor.standing, donor.not_before = DonorStanding.NEW, now + pause_s
        self._ask_claims(now, out)
        return bool(again)

    def _begin(self, claim: Claim, donors: tuple[str, ...], why: str, out: list[dl.Output]) -> None:
        for ask, (_, piece, _) in list(self._asks.items()):
            if piece != dl.MANIFEST:
                self._call_off(ask, out)
        self.chosen, self._meet = claim, claim.position.step
        kept = self._kept if self._kept.root == claim.root else None
        self.knows_digests = kept is not None
        self.have = set(kept.have) if kept is not None else set()
        self._missing = deque(i for i in range(self._pieces) if i not in self.have)
        self._replaced = 0
        self._moved_at = self._now
        self._wakes.append(self._stalls_at)
        out.append(dl.Chosen(claim, donors, why))
        older = [d.name for d in self._donors.values() if d.claim and d.claim.position < claim.position]
        self._ask_again(self._now, older, out)

    # --- pieces -----------------------------------------------------------------------------------------------

    def _plan(self, now: float, out: list[dl.Output]) -> None:
        givers = self._givers(now)
        if not self.knows_digests:
            self._send_for_digests(now, givers, out)
            return
        if len(self.have) == self._pieces:
            self._end(dl.Downloaded(), out)
            return
        while self._missing and (giver := self._next_giver(givers)):
            self._send_for(now, giver, self._missing.popleft(), out)
        if not self._missing:
            self._help_out(now, givers, out)

    def _send_for_digests(self, now: float, givers: list[Donor], out: list[dl.Output]) -> None:
        """Ask one donor for the digests, and one more whenever those asked are late."""
        asked = [donor for donor, piece, _ in self._asks.values() if piece == dl.DIGESTS]
        others = [donor for donor in givers if donor not in asked]
        if others and (not asked or now >= self._digests_due):
            self._digests_due = now + UNKNOWN_PIECE_S
            donor = others[0] if self._known is not None else self._rng.choice(others)  # the caller sorted them
            self._ask(donor, dl.DIGESTS, _PIECE_TIMEOUT_S + self._digests_s, out)
        if others:
            self._wakes.append(self._digests_due)

    def _givers(self, now: float) -> list[Donor]:
        """Donors that can be asked for a piece now, fastest first."""
        found = []
        for donor in self._donors.values():
            if donor.standing is DonorStanding.CLAIMS and donor.claim == self.chosen and self._may_ask(now, donor):
                if donor.flights and now >= donor.quiet_at():
                    continue
                found.append(donor)
                if donor.flights:
                    self._wakes.append(donor.quiet_at())
        return sorted(found, key=lambda d: (d.is_late, d.takes_s(1)))

    def _next_giver(self, givers: list[Donor]) -> Donor | None:
        """The donor with room that would finish one more piece first."""
        if self._in_flight >= STATE_PIECES_IN_FLIGHT:
            return None
        free = [d for d in givers if len(d.flights) < d.window(STATE_PIECES_PER_DONOR)]
        return min(free, key=lambda d: (d.is_late, d.takes_s(len(d.flights) + 1), len(d.flights)), default=None)

    def _help_out(self, now: float, givers: list[Donor], out: list[dl.Output]) -> None:
        """Request the last pieces, which all are in flight, from a second donor if that is likely to be faster."""
        for flights in [f for f in self._flying.values() if len(f) > 1]:
            self._replace_quiet(now, givers, flights, out)
        owed = sorted((f[0] for f in self._flying.values() if len(f) == 1), key=lambda flight: flight.due)
        for flight in owed:
            giver = self._next_giver([d for d in givers if d is not flight.donor])
            if giver is None:
                continue
            mine_s = giver.takes_s(len(giver.flights) + 1)
            late_at = flight.due
            if giver.piece_s is None:
                pass  # no evidence that it would be faster: our own line may be the slow one
            elif flight.donor.piece_s is None:
                late_at = min(late_at, flight.asked_at + max(_UNHEARD_S, 4 * mine_s))
            elif flight.expected - now > 2 * mine_s + LEAST_PIECE_S:
                late_at = now
            if now >= late_at:
                self._send_for(now, giver, flight.piece, out)
            else:
                self._wakes.append(late_at)

    def _replace_quiet(
        self, now: float, givers: list[Donor], flights: list[PieceInFlight], out: list[dl.Output]
    ) -> None:
        """Once all donors that were asked for a piece are quiet, ask another one in place of the first.

        If one of them has sent no piece yet, our own line may be the slow one: then wait twice as long before each
        further replacement until a piece arrives, so that one under way can.
        """
        quiet_at = max(flight.donor.quiet_at() for flight in flights)
        asked = [flight.donor for flight in flights]
        giver = self._next_giver([donor for donor in givers if donor not in asked])
        if giver is None:
            return
        if any(flight.donor.piece_s is None for flight in flights):
            patience_s = LATE_FACTOR * UNKNOWN_PIECE_S * 2**self._replaced
            quiet_at = max(quiet_at, max(flight.asked_at for flight in flights) + patience_s)
        if now < quiet_at:
            self._wakes.append(quiet_at)
            return
        self._replaced += 1
        first = flights[0]
        first.donor.is_late = True
        self._call_off(first.ask, out)
        self._send_for(now, giver, first.piece, out)

    def _send_for(self, now: float, donor: Donor, piece: int, out: list[dl.Output]) -> None:
        flight = donor.depart(now, self._next_ask, piece)
        self._flying.setdefault(piece, []).append(flight)
        self._wakes.append(donor.quiet_at())
        self._ask(donor, piece, _PIECE_TIMEOUT_S + self._sharing * _SLOW_PIECE_S, out, flight)

    def _arrived(self, now: float, piece: int, flight: PieceInFlight | None, out: list[dl.Output]) -> None:
        self._moved_at = now
        if flight is None:
            self.knows_digests = True
            for ask in [a for a, (_, asked, _) in self._asks.items() if asked == dl.DIGESTS]:
                self._asks[ask][0].is_late = True  # others have answered before it
                self._call_off(ask, out)
            return
        self._replaced = 0
        flight.donor.arrived(now, flight)
        self.have.add(piece)
        for other in self._flying.pop(piece):
            if other is not flight:
                self._call_off(other.ask, out)

    def _lost(self, flight: PieceInFlight) -> None:
        """Record that this request will not be answered: another donor must send the piece."""
        flight.donor.flights.remove(flight)
        left = self._flying.get(flight.piece, [])
        left.remove(flight)
        if not left:
            del self._flying[flight.piece]
            self._missing.appendleft(flight.piece)

    def _call_off(self, ask: int, out: list[dl.Output]) -> None:
        _, _, flight = self._asks.pop(ask)
        if flight is not None:
            flight.donor.flights.remove(flight)
            flights = self._flying.get(flight.piece, [])
            if flight in flights:
                flights.remove(flight)
                if not flights:
                    del self._flying[flight.piece]
        out.append(dl.Cancel(ask))

    # --- failures ---------------------------------------------------------------------------------------------

    def _lied(self, donor: Donor, why: str, out: list[dl.Output]) -> None:
        donor.standing, donor.why = DonorStanding.LIAR, why
        out.append(dl.BlameDonor(donor.name, why))
        for flight in list(donor.flights):
            self._asks.pop(flight.ask)
            self._lost(flight)
            out.append(dl.Cancel(flight.ask))

    def _failed(self, now: float, donor: Donor, piece: int, event: dl.DonorFailed) -> None:
        if not donor.usable:
            return
        if piece == dl.MANIFEST:
            donor.standing = DonorStanding.NEW
        if event.retry_after_s is not None:
            pause_s = min(max(event.retry_after_s, 0.02), _MOST_PAUSE_S)
            donor.not_before = now + pause_s * (1.0 + 0.25 * self._rng.random())
            donor.why = event.why
        elif event.gone:
            donor.standing, donor.why = DonorStanding.GONE, event.why
            self._gone += piece != dl.MANIFEST and self._known is None  # what is known does not move on
        elif now >= donor.not_before:  # concurrent failures count once
            donor.failed(now, _STRIKES if self._known is None else _KNOWN_STRIKES, _PAUSE_S, event.why)
        if piece == dl.MANIFEST and not donor.usable and donor.claim != self.chosen:
            donor.claim = None

    def _give_up_when_hopeless(self, now: float, out: list[dl.Output]) -> None:
        if now >= self._stalls_at:
            self._end(dl.GaveUp(self._reason(f"nothing has arrived for {now - self._moved_at:.0f} s")), out)
        elif self.chosen is not None and not self._pending:
            givers = [d for d in self._donors.values() if d.standing is DonorStanding.CLAIMS and d.claim == self.chosen]
            if not givers:
                self._end(dl.GaveUp(self._reason("no donor is left"), moved_on=self._gone > 0), out)

    def _reason(self, why: str) -> str:
        told = [f"{d.name[-6:]}: {d.why}" for d in self._donors.values() if d.why]
        return "; ".join([why, *told[:4]])

    def _end(self, last: dl.Downloaded | dl.GaveUp, out: list[dl.Output]) -> None:
        self.unanswered = bool(self._asks)
        for ask in list(self._asks):
            self._call_off(ask, out)
        self._over = True
        out.append(last)

    # --- helpers ----------------------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> int:
        """Number of pieces requested, counting those requested from two donors twice."""
        return sum(map(len, self._flying.values()))

    @property
    def _sharing(self) -> int:
        """Number of pieces that may share our line at any time: those requested, or the first ones of all donors."""
        donors = sum(donor.usable for donor in self._donors.values())
        return max(self._in_flight, min(STATE_PIECES_IN_FLIGHT, FIRST_PIECES * donors))

    @property
    def _stalls_at(self) -> float:
        """Time at which the download gives up if no piece arrives before; pieces in flight may share a slow line."""
        silent_s = _STALL_S + self._sharing * _SLOW_PIECE_S
        return self._moved_at + silent_s + (self._copy_s if self.chosen is None else 0.0)

    @property
    def _copy_s(self) -> float:
        return self._pieces * _COPY_PIECE_S

    @property
    def _digests_s(self) -> float:
        return self._pieces * _DIGEST_BYTES / RPC_LEAST_BYTES_PER_S

    def _ask(
        self, donor: Donor, piece: int, timeout_s: float, out: list[dl.Output], flight: PieceInFlight | None = None
    ) -> None:
        ask, self._next_ask = self._next_ask, self._next_ask + 1
        self._asks[ask] = (donor, piece, flight)
        out.append(dl.AskDonor(ask, donor.name, piece, timeout_s, self._meet if piece == dl.MANIFEST else 0))

    def _may_ask(self, now: float, donor: Donor) -> bool:
        if now < donor.not_before:
            self._wakes.append(donor.not_before)
            return False
        return True

    def check(self) -> None:
        """Assert the invariants of the module's header."""
        flying = self._flying
        assert not self.have & flying.keys(), "a received piece is in flight"
        assert all(1 <= len(flights) <= 2 for flights in flying.values()), "a piece is requested from more than two"
        assert all(len({f.donor.name for f in flights}) == len(flights) for flights in flying.values())
        assert sum(map(len, flying.values())) <= STATE_PIECES_IN_FLIGHT, "too much in flight"
        assert all(len(d.flights) <= STATE_PIECES_PER_DONOR for d in self._donors.values()), "a window is exceeded"
        assert all(not d.flights for d in self._donors.values() if d.standing is DonorStanding.LIAR), "a liar is asked"
        if self.chosen is not None and not self._over:
            whole = sorted([*self.have, *flying, *self._missing])
            assert whole == list(range(self._pieces)), "a piece is missing or counted twice"
