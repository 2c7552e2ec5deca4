"""Limits of a relay: which peers hold a reservation, and which circuits are allowed.

Sans-IO: `reach.relay.relay` carries out the decisions. Every refusal has a status and a reason as text.
Invariants: the bounds of RelayConfig always hold; the tables contain nothing of departed peers; an expired reservation
is invalid at once. Hostile input: a peer may ask under many identities, from one address or a whole network; ask again
and again; or open circuits to one peer until nobody else can. Identities are free, addresses are not: so use is bounded
per place as well as per peer, and one place cannot occupy all circuits to a peer. Source: libp2p specs
`relay/circuit-v2.md`; the bounds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.addr import Ip, place_of
from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.reach.messages.circuit_message import Status

_PLACES = 4096  # places whose requests of the last minute are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Bounds of what a relay provides.

    Bytes and durations are generous, so that training over a relay is possible; the bounds per place are strict.
    """

    spare_share: float = 0.5  # fraction of reservations for peers that can be dialed; they yield to those that cannot
    reservations: int = 256  # each keeps a connection open; a third of the inbound connections remains for others
    reservations_per_place: int = 16  # one household or office; a place is an IPv4 address or an IPv6 /64
    reservations_per_region: int = 64  # IPv4 /24 or IPv6 /48: what one customer of a provider can occupy
    reservation_s: float = 3600.0  # as in go-libp2p; renewed long before
    circuits: int = 256  # each costs two streams and two tasks; `held_bytes` bounds their buffers
    circuits_per_source: int = 32
    circuits_per_place: int = 64
    circuits_per_destination: int = 64
    circuits_per_place_and_destination: int = 16  # so that no place occupies all circuits to a peer
    circuits_per_pair: int = 4  # same as connections to one peer (limits.LINKS_PER_PEER)
    requests_per_place_min: int = 240  # reservations and circuits requested; enough for several restarts of a household
    circuit_s: float = 7200.0  # longest life of a circuit, so that others get a turn
    circuit_bytes: int = 64 << 30  # in each direction: two hours at 70 Mb/s
    circuit_idle_s: float = 90.0  # without data in either direction; our links ping every 10 s, go-libp2p's every 30 s
    circuit_stall_s: float = 60.0  # longest time for which the receiver accepts no data
    held_bytes: int = 256 << 20  # unread bytes of all circuits: three 100 ms round trips at 7 Gb/s, or stalls
    circuit_bytes_per_s: float = math.inf  # one circuit, each direction
    bytes_per_s: float = math.inf  # all circuits, both directions; shared equally among places


@dataclass(frozen=True, slots=True)
class Granted:
    """A granted reservation. `expires`: the time until which it is valid, on the same clock as `now`."""

    expires: float
    renewed: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admitted circuit, which counts until `ended` is called with its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request, with its reason."""

    status: Status
    why: str


@dataclass(slots=True)
class _Reservation:
    place: str
    region: str
    expires: float
    spare: bool = False


@dataclass(frozen=True, slots=True)
class _Circuit:
    source: PeerId
    place: str
    destination: PeerId


@dataclass(slots=True)
class _Allowance:
    """A token bucket with `left` tokens at time `at`."""

    left: float
    at: float


@dataclass(slots=True)
class RelayServer:
    """The reservations and circuits of one relay."""

    config: RelayConfig = field(default_factory=RelayConfig)
    _reservations: dict[PeerId, _Reservation] = field(default_factory=dict)  # earliest expiry first
    _circuits: dict[int, _Circuit] = field(default_factory=dict)
    _requests: BoundedDict[str, _Allowance] = field(default_factory=lambda: BoundedDict(_PLACES))  # by place
    _next: int = 0

    # --- reservations --------------------------------------------------------------------------------------

    def reserve(self, now: float, peer: PeerId, ip: Ip | None, *, spare: bool = False) -> Granted | Refusal:
        """Reserve a slot for `peer`, which connects from `ip`, or renew its reservation.

        `spare`: others can dial the peer directly; it gets a slot only while many are free, and loses it to one that
        needs it.
        """
        self.wake(now)
        config, (place, region) = self.config, place_of(ip)
        refusal = self._too_often(now, place)
        if refusal is not None:
            return refusal
        if not spare:
            self._make_room(peer)
        others = [held for holder, held in self._reservations.items() if holder != peer]
        most = int(config.reservations * config.spare_share) if spare else config.reservations
        bounds = (
            (len(others), most, "this relay"),
            (sum(held.place == place for held in others), config.reservations_per_place, place),
            (sum(held.region == region for held in others), config.reservations_per_region, region),
        )
        for count, bound, whose in bounds:
            if count >= bound:
                return Refusal(Status.RESERVATION_REFUSED, f"{whose} already has {bound} reservations, the maximum")
        renewed = self._reservations.pop(peer, None) is not None
        expires = now + config.reservation_s
        self._reservations[peer] = _Reservation(place, region, expires, spare)
        return Granted(expires, renewed)

    def _make_room(self, peer: PeerId) -> None:
        """If all slots are taken, drop the oldest spare reservation."""
        if peer not in self._reservations and len(self._reservations) >= self.config.reservations:
            oldest = next((holder for holder, held in self._reservations.items() if held.spare), None)
            if oldest is not None:
                del self._reservations[oldest]

    def holds(self, now: float, peer: PeerId) -> bool:
        """Return True while `peer` has a valid reservation."""
        held = self._reservations.get(peer)
        return held is not None and now < held.expires

    def holders(self) -> list[PeerId]:
        """Peers with a reservation, as of the last call that passed the time."""
        return list(self._reservations)

    def left(self, peer: PeerId) -> None:
        """Record that the last connection to `peer` is closed, which ends its reservation."""
        self._reservations.pop(peer, None)

    def wake(self, now: float) -> None:
        """Drop expired reservations."""
        while self._reservations:
            peer, first = next(iter(self._reservations.items()))
            if now < first.expires:
                break
            del self._reservations[peer]

    # --- circuits ------------------------------------------------------------------------------------------

    def connect(self, now: float, source: PeerId, ip: Ip | None, destination: PeerId) -> Admitted | Refusal:
        """Admit or refuse a circuit from `source`, which connects from `ip`, to `destination`."""
        place, _ = place_of(ip)
        refusal = self._too_often(now, place)
        if refusal is not None:
            return refusal
        if source == destination:
            return Refusal(Status.PERMISSION_DENIED, "a circuit to the requesting peer itself")
        if not self.holds(now, destination):
            return Refusal(Status.NO_RESERVATION, f"{destination.short} has no reservation here")
        full = self._full(source, place, destination)
        if full is not None:
            return Refusal(Status.RESOURCE_LIMIT_EXCEEDED, full)
        self._next += 1
        self._circuits[self._next] = _Circuit(source, place, destination)
        return Admitted(self._next)

    def ended(self, number: int) -> None:
        """Record that the circuit is closed or could not be opened."""
        self._circuits.pop(number, None)

    @property
    def circuits(self) -> int:
        """Number of circuits, including those being opened."""
        return len(self._circuits)

    def _full(self, source: PeerId, place: str, destination: PeerId) -> str | None:
        config, circuits = self.config, self._circuits.values()
        from_here = [circuit for circuit in circuits if circuit.place == place]
        from_source = [circuit for circuit in circuits if circuit.source == source]
        to_there = [circuit for circuit in circuits if circuit.destination == destination]
        from_here_there = sum(circuit.place == place for circuit in to_there)
        bounds = (
            (len(circuits), config.circuits, "this relay"),
            (len(from_source), config.circuits_per_source, source.short),
            (len(from_here), config.circuits_per_place, place),
            (len(to_there), config.circuits_per_destination, f"the path to {destination.short}"),
            (from_here_there, config.circuits_per_place_and_destination, f"{place} to {destination.short}"),
            (sum(c.source == source for c in to_there), config.circuits_per_pair, f"the pair with {destination.short}"),
        )
        for count, bound, whose in bounds:
            if count >= bound:
                return f"{whose} already has {bound} circuits, the maximum"
        return None

    # --- rate ----------------------------------------------------------------------------------------------

    def _too_often(self, now: float, place: str) -> Refusal | None:
        most = self.config.requests_per_place_min
        allowance = self._requests[place] = self._requests.get(place) or _Allowance(most, now)
        allowance.left = min(most, allowance.left + (now - allowance.at) * most / 60)
        allowance.at = now
        if allowance.left < 1:
            return Refusal(Status.RESOURCE_LIMIT_EXCEEDED, f"{place} sends more than {most} requests a minute")
        allowance.left -= 1
        return None

    def check(self) -> None:
        """Assert the bounds, for tests, which call it after every step."""
        config, circuits, held = self.config, self._circuits.values(), self._reservations.values()
        assert len(held) <= config.reservations
        assert len(circuits) <= config.circuits
        assert len(self._requests) <= _PLACES
        _within([one.place for one in held], config.reservations_per_place)
        _within([one.region for one in held], config.reservations_per_region)
        _within([one.source for one in circuits], config.circuits_per_source)
        _within([one.place for one in circuits], config.circuits_per_place)
        _within([one.destination for one in circuits], config.circuits_per_destination)
        _within([(one.place, one.destination) for one in circuits], config.circuits_per_place_and_destination)
        _within([(one.source, one.destination) for one in circuits], config.circuits_per_pair)


def overfull(held: Sequence[tuple[str, int]], most_bytes: int) -> list[int]:
    """Circuits to close so that the held bytes fall to at most `most_bytes`, given each circuit's place and held bytes.

    Closes the fullest circuit of the place that holds most, repeatedly. So a peer that stalls many circuits loses its
    own, and others lose none.
    """
    total = sum(size for _, size in held)
    by_place: dict[str, int] = {}
    fullest: dict[str, list[int]] = {}  # circuits by place, the fullest last
    for number in sorted(range(len(held)), key=lambda number: held[number][1]):
        place, size = held[number]
        by_place[place] = by_place.get(place, 0) + size
        fullest.setdefault(place, []).append(number)
    ended = []
    while total > most_bytes:
        place = max(by_place, key=by_place.__getitem__)
        number = fullest[place].pop()
        ended.append(number)
        total -= held[number][1]
        by_place[place] -= held[number][1]
    return ended


def _within(names: Iterable[object], bound: int) -> None:
    counts: dict[object, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    assert all(count <= bound for count in counts.values()), f"more than {bound}: {counts}"
