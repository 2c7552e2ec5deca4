"""Reservations at relays: at least two, in different networks where possible, renewed in time.

A peer that others can dial wants one, a spare: for those that lose the direct way to it. It looks for no relay, and
does without where its relays have no place to spare.

Knows candidates as it is told of them, and decides which to ask, when to renew, and when to look for more. Hostile
input: relays that refuse, or promise and vanish; one that refuses is left alone for twice as long as the time before.
One that is reached over another connection may have begun anew, without our place: it is asked again, and believed no
more if it refuses. Invariants: nothing is asked while no place is wanted; one request per relay at a time; a lost place
is replaced at the next step; candidates are bounded by the connections that there are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from multiaddr import Multiaddr

from peerd.core.ids import PeerId
from peerd.machine.connectivity.network_votes import network_of
from peerd.machine.rate.backoff import backoff_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected peer that relays for others."""

    peer: PeerId
    at: Multiaddr
    rtt_s: float | None
    preferred: bool  # one of the peers through which we joined: made to be relays


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask this relay for a place, or for more time; the outcome goes to `granted` or `refused`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Release:
    """Do without this relay."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class FindRelays:
    """Request for further peers: there are too few relays among the connected ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationsConfig:
    """Times in seconds."""

    wanted: int = 2  # one may vanish at any time
    spare: int = 1  # of a peer that can be dialed
    renew_share: float = 0.6  # of its life, after which a place is renewed
    renew_again_s: float = 10.0  # after a renewal that failed
    rest_s: float = 5.0  # a relay that refused; doubles with each further time
    longest_rest_s: float = 600.0
    search_s: float = 5.0  # between two searches; doubles, too


@dataclass(slots=True)
class _Relay:
    candidate: Candidate | None = None  # None: not connected
    asking: bool = False
    until: float = -math.inf  # our place's end
    renew_at: float = math.inf
    moved: bool = False  # it is reached over another connection since it was asked
    unsure: bool = False  # likewise since it granted the place
    not_before: float = -math.inf
    failures: int = 0

    def lose(self) -> None:
        """Our place there is lost."""
        self.until, self.renew_at = -math.inf, math.inf
        self.moved = self.unsure = False


class Reservations:
    """See the module's header. Tell it what happens, then do what `step` says."""

    def __init__(self, rng: random.Random, config: ReservationsConfig | None = None) -> None:
        self._rng = rng
        self._config = config or ReservationsConfig()
        self._relays: dict[PeerId, _Relay] = {}
        self._wanted, self._needs_them = 0, False
        self._search_at = -math.inf
        self._searches = 0

    # --- what happens ------------------------------------------------------------------------------------------

    def want(self, needs_them: bool, *, spare: bool = False) -> None:
        """Set whether others need relays to reach us; `spare`: else one is wanted besides."""
        self._needs_them = needs_them
        self._wanted = self._config.wanted if needs_them else self._config.spare * spare

    def offers(self, candidate: Candidate) -> None:
        """A connected peer relays for others."""
        self._relays.setdefault(candidate.peer, _Relay()).candidate = candidate

    def gone(self, now: float, peer: PeerId) -> None:
        """The peer is not connected, or does not relay any more: a place there is lost."""
        relay = self._relays.get(peer)
        if relay is None:
            return
        if relay.until > now:
            self._searches, self._search_at = 0, now  # soon, if the others don't do
        relay.candidate = None
        relay.lose()
        if not relay.asking and relay.not_before <= now:
            del self._relays[peer]

    def moved(self, now: float, peer: PeerId) -> bool:
        """The peer is reached over another connection than before: should it have begun anew, a place there is lost.

        True: we have one there, or have asked for one, so that it is to be asked again.
        """
        relay = self._relays.get(peer)
        if relay is None or not (relay.until > now or relay.asking):
            return False
        relay.moved = True
        return True

    def granted(self, now: float, peer: PeerId, lasts_s: float) -> None:
        """The relay keeps a place for us, for so long."""
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
        """The relay gave no place, or no answer."""
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

    # --- what to do --------------------------------------------------------------------------------------------

    def held(self, now: float) -> list[PeerId]:
        """Relays that keep a place for us."""
        return [peer for peer, relay in self._relays.items() if relay.until > now]

    def step(self, now: float) -> list[Reserve | Release | FindRelays]:
        """Actions due now."""
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
        """Time at which `step` next has something to do by the passing of time alone."""
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
        """Relays that we do without, since fewer are wanted than before; their places are ours no more."""
        surplus = self.held(now)[self._wanted :]
        for peer in surplus:
            self._relays[peer].lose()
        return surplus

    def _missing(self, now: float) -> int:
        """Places that are neither held nor asked for."""
        there = sum(relay.until > now or relay.asking for relay in self._relays.values())
        return self._wanted - there

    def _best(self, now: float) -> PeerId | None:
        """The relay to ask next: those through which we joined, then networks where we hold no place, then the
        nearest.
        """
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
        """Invariants, for tests."""
        assert all(relay.candidate is not None for relay in self._relays.values() if relay.until > now)
        assert self._wanted or not any(relay.until > now for relay in self._relays.values())


def _near(candidate: Candidate) -> float:
    return math.inf if candidate.rtt_s is None else candidate.rtt_s
