"""Reservations at relays: at least two, in different networks if possible, renewed in time.

A peer that others can dial directly keeps one spare reservation, for peers that lose the direct path to it. It does not
search for relays, and continues without one if its relays have no free slot.

The candidates are the connected peers that relay. This module decides which to ask, when to renew, and when to search
for more. Hostile input: relays that refuse, or grant and then vanish; after each refusal a relay is left alone for
twice as long. A relay that is reached over a new connection may have restarted without our reservation: it is asked
again, and the reservation counts as lost if it refuses. Invariants: no request is sent while no reservation is wanted;
one request per relay at a time; a lost reservation is replaced at the next step; candidates are bounded by the open
connections.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from multiaddr import Multiaddr

from peerd.core.ids import PeerId
from peerd.reach.network_votes import network_of
from peerd.wire.rate.backoff import backoff_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected peer that relays for others."""

    peer: PeerId
    at: Multiaddr
    rtt_s: float | None
    preferred: bool  # one of our bootstrap peers, which are meant to be relays


@dataclass(frozen=True, slots=True)
class Reserve:
    """Action: request or renew a reservation at this relay; report the result to `granted` or `refused`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Release:
    """Action: give up the reservation at this relay."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class FindRelays:
    """Action: search for further peers, because too few of the connected ones are relays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationsConfig:
    """Settings of `Reservations`; times in seconds."""

    wanted: int = 2  # one relay may vanish at any time
    spare: int = 1  # reservations of a peer that can be dialed directly
    renew_share: float = 0.6  # fraction of its life after which a reservation is renewed
    renew_again_s: float = 10.0  # pause after a failed renewal
    rest_s: float = 5.0  # pause after a refusal; doubles with each further one
    longest_rest_s: float = 600.0
    search_s: float = 5.0  # interval between two searches; doubles as well


@dataclass(slots=True)
class _Relay:
    candidate: Candidate | None = None  # None: not connected
    asking: bool = False
    until: float = -math.inf  # expiry of our reservation
    renew_at: float = math.inf
    moved: bool = False  # its connection has changed since the last request
    unsure: bool = False  # its connection has changed since it granted the reservation
    not_before: float = -math.inf
    failures: int = 0

    def lose(self) -> None:
        """Mark our reservation as lost."""
        self.until, self.renew_at = -math.inf, math.inf
        self.moved = self.unsure = False


class Reservations:
    """Keeps this peer's reservations at relays: call a method for each event, then perform the actions of `step`."""

    def __init__(self, rng: random.Random, config: ReservationsConfig | None = None) -> None:
        self._rng = rng
        self._config = config or ReservationsConfig()
        self._relays: dict[PeerId, _Relay] = {}
        self._wanted, self._needs_them = 0, False
        self._search_at = -math.inf
        self._searches = 0

    # --- events ------------------------------------------------------------------------------------------------

    def want(self, needs_them: bool, *, spare: bool = False) -> None:
        """Set whether others need relays to reach us; if not, `spare` requests one spare reservation."""
        self._needs_them = needs_them
        self._wanted = self._config.wanted if needs_them else self._config.spare * spare

    def offers(self, candidate: Candidate) -> None:
        """Record that a connected peer relays for others."""
        self._relays.setdefault(candidate.peer, _Relay()).candidate = candidate

    def gone(self, now: float, peer: PeerId) -> None:
        """Record that the peer has disconnected or no longer relays; a reservation there is lost."""
        relay = self._relays.get(peer)
        if relay is None:
            return
        if relay.until > now:
            self._searches, self._search_at = 0, now  # search soon if the other relays are not enough
        relay.candidate = None
        relay.lose()
        if not relay.asking and relay.not_before <= now:
            del self._relays[peer]

    def moved(self, now: float, peer: PeerId) -> bool:
        """Record that the connection to the peer was replaced; if the peer has restarted, a reservation there is lost.

        Returns True if we have or have requested a reservation there, so that the peer must be asked again.
        """
        relay = self._relays.get(peer)
        if relay is None or not (relay.until > now or relay.asking):
            return False
        relay.moved = True
        return True

    def granted(self, now: float, peer: PeerId, lasts_s: float) -> None:
        """Record a reservation that lasts for `lasts_s` seconds."""
        relay = self._relays.get(peer)
        if relay is None:
            return
        relay.asking = False
        if relay.candidate is None:
            return
        relay.failures, self._searches = 0, 0
        relay.unsure = False
        relay.until = now + lasts_s
        relay.renew_at = now + max(lasts_s * self._config.renew_share, self._config.renew_again_s)

    def refused(self, now: float, peer: PeerId) -> None:
        """Record that the relay refused or did not answer."""
        relay = self._relays.get(peer)
        if relay is None:
            return
        relay.asking = False
        relay.failures += 1
        config = self._config
        if relay.until > now and not (relay.unsure or relay.moved):
            relay.renew_at = now + config.renew_again_s
        else:
            relay.lose()
            relay.not_before = now + backoff_s(relay.failures, config.rest_s, config.longest_rest_s)

    # --- actions -----------------------------------------------------------------------------------------------

    def held(self, now: float) -> list[PeerId]:
        """Relays where we hold a reservation."""
        return [peer for peer, relay in self._relays.items() if relay.until > now]

    def step(self, now: float) -> list[Reserve | Release | FindRelays]:
        """The actions due now."""
        for peer, relay in list(self._relays.items()):
            if relay.candidate is None and not relay.asking and relay.not_before <= now:
                del self._relays[peer]
        outputs: list[Reserve | Release | FindRelays] = [Release(peer) for peer in self._too_many(now)]
        for peer, relay in self._relays.items():
            if relay.until > now and (relay.renew_at <= now or relay.moved) and not relay.asking:
                relay.asking, relay.unsure, relay.moved = True, relay.unsure or relay.moved, False
                outputs.append(Reserve(peer))
        while self._missing(now) > 0 and (peer_ := self._best(now)) is not None:
            self._relays[peer_].asking, self._relays[peer_].moved = True, False
            outputs.append(Reserve(peer_))
        if self._needs_them and self._missing(now) > 0 and self._search_at <= now:
            self._search_at = now + self._config.search_s * 2 ** min(self._searches, 6)
            self._searches += 1
            outputs.append(FindRelays())
        return outputs

    def wake_at(self, now: float) -> float:
        """Time at which `step` next has something to do if no event happens."""
        if not self._wanted:
            return math.inf
        times = [math.inf]
        for relay in self._relays.values():
            if not relay.asking:
                times += [min(relay.renew_at, relay.until)] if relay.until > now else []
                times += [relay.not_before] if relay.not_before > now else []
        if self._needs_them and self._missing(now) > 0:
            times.append(max(self._search_at, now))
        return min(times)

    def _too_many(self, now: float) -> list[PeerId]:
        """Give up reservations beyond the wanted number; returns their relays."""
        surplus = self.held(now)[self._wanted :]
        for peer in surplus:
            self._relays[peer].lose()
        return surplus

    def _missing(self, now: float) -> int:
        """Number of wanted reservations that are neither held nor requested."""
        there = sum(relay.until > now or relay.asking for relay in self._relays.values())
        return self._wanted - there

    def _best(self, now: float) -> PeerId | None:
        """The relay to ask next: bootstrap peers first, then networks without a reservation, then the nearest."""
        used = {
            network_of(relay.candidate.at)
            for relay in self._relays.values()
            if relay.candidate is not None and (relay.until > now or relay.asking)
        }
        free = [
            relay.candidate
            for relay in self._relays.values()
            if relay.candidate is not None and not relay.asking and relay.until <= now and relay.not_before <= now
        ]
        self._rng.shuffle(free)
        best = min(free, key=lambda one: (not one.preferred, network_of(one.at) in used, _near(one)), default=None)
        return None if best is None else best.peer

    def check(self, now: float) -> None:
        """Assert the invariants, for tests."""
        assert all(relay.candidate is not None for relay in self._relays.values() if relay.until > now)
        assert self._wanted or not any(relay.until > now for relay in self._relays.values())


def _near(candidate: Candidate) -> float:
    return math.inf if candidate.rtt_s is None else candidate.rtt_s
