"""Limits of a relay: which peers hold a reservation, and which circuits there may be.

Sans-IO: `service.connectivity.relay` does what is decided here. Every refusal has its status and a reason in words.
Invariants: the bounds of RelayConfig hold at any time, whoever asks however often; the tables hold nothing of peers
that left, and an expired reservation counts for nothing from that moment on. A hostile peer may ask under many
identities, from one address or a whole network; ask again and again; connect to one peer until nobody else can.
Identities are free, addresses are not: so what one place may have is bounded beside what one peer may have, and one
place cannot take all circuits to a peer. Source: libp2p specs `relay/circuit-v2.md`; the bounds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.addr import Ip, place_of
from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.protobuf.circuit import Status

_PLACES = 4096  # places whose requests of the last minute are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Bounds of what a relay gives away. Generous with bytes and hours, so that one can train over it; careful with
    places.
    """

    spare_share: float = 0.5  # of reservations, for peers that can be dialed: they give way to those that cannot
    reservations: int = 256  # each keeps a connection open: a third of those that may come in stay for others
    reservations_per_place: int = 16  # one household or office; a place is an IPv4 address or an IPv6 /64
    reservations_per_region: int = 64  # IPv4 /24, IPv6 /48: what one renter of addresses can take
    reservation_s: float = 3600.0  # as Go's; refreshed long before
    circuits: int = 256  # each costs two streams and two tasks; what they may hold is bounded below
    circuits_per_source: int = 32
    circuits_per_place: int = 64
    circuits_per_destination: int = 64
    circuits_per_place_and_destination: int = 16  # so that no place takes all circuits to a peer
    circuits_per_pair: int = 4  # as many as connections to one peer (limits.LINKS_PER_PEER)
    requests_per_place_min: int = 240  # reservations and circuits asked for: a restarted household, several times over
    circuit_s: float = 7200.0  # then a fresh one has to be opened: places go round
    circuit_bytes: int = 64 << 30  # in each direction: two hours at 70 Mb/s
    circuit_idle_s: float = 90.0  # nothing in either direction: links over it ping every 10 s, Go's every 30 s
    circuit_stall_s: float = 60.0  # one piece that the receiver does not take
    held_bytes: int = 256 << 20  # unread, of all circuits: three round trips of 100 ms at 7 Gb/s, or someone who stalls
    circuit_bytes_per_s: float = math.inf  # one circuit, each direction
    bytes_per_s: float = math.inf  # all circuits, both directions; places that want more than there is share equally


@dataclass(frozen=True, slots=True)
class Granted:
    """The reservation holds until `expires`, on the clock of `now`."""

    expires: float
    renewed: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The circuit has a place, from now until `ended`."""

    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal, with its reason."""

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
    """A token bucket: what is left at `at`."""

    left: float
    at: float


@dataclass(slots=True)
class RelayServer:
    """The tables of one relay."""

    config: RelayConfig = field(default_factory=RelayConfig)
    _reservations: dict[PeerId, _Reservation] = field(default_factory=dict)  # the next to expire first
    _circuits: dict[int, _Circuit] = field(default_factory=dict)
    _requests: BoundedDict[str, _Allowance] = field(default_factory=lambda: BoundedDict(_PLACES))  # by place
    _next: int = 0

    # --- reservations --------------------------------------------------------------------------------------

    def reserve(self, now: float, peer: PeerId, ip: Ip | None, *, spare: bool = False) -> Granted | Refusal:
        """Reserve a place for `peer`, which comes from `ip`; a reservation that it has is renewed.

        `spare`: others can dial it; it has a place as long as many are free, and loses it to one that needs it.
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
                return Refusal(Status.RESERVATION_REFUSED, f"{whose} has its {bound} reservations")
        renewed = self._reservations.pop(peer, None) is not None
        expires = now + config.reservation_s
        self._reservations[peer] = _Reservation(place, region, expires, spare)
        return Granted(expires, renewed)

    def _make_room(self, peer: PeerId) -> None:
        """Take back the oldest spare place, where all are given away."""
        if peer not in self._reservations and len(self._reservations) >= self.config.reservations:
            oldest = next((holder for holder, held in self._reservations.items() if held.spare), None)
            if oldest is not None:
                del self._reservations[oldest]

    def holds(self, now: float, peer: PeerId) -> bool:
        """True while `peer` holds a reservation here."""
        held = self._reservations.get(peer)
        return held is not None and now < held.expires

    def holders(self) -> list[PeerId]:
        """Peers with a reservation, as of the last call that told the time."""
        return list(self._reservations)

    def left(self, peer: PeerId) -> None:
        """The last connection to `peer` is gone, and with it its reservation."""
        self._reservations.pop(peer, None)

    def wake(self, now: float) -> None:
        """Forget what has expired."""
        while self._reservations:
            peer, first = next(iter(self._reservations.items()))
            if now < first.expires:
                break
            del self._reservations[peer]

    # --- circuits ------------------------------------------------------------------------------------------

    def connect(self, now: float, source: PeerId, ip: Ip | None, destination: PeerId) -> Admitted | Refusal:
        """`source`, which comes from `ip`, wants a circuit to `destination`."""
        place, _ = place_of(ip)
        refusal = self._too_often(now, place)
        if refusal is not None:
            return refusal
        if source == destination:
            return Refusal(Status.PERMISSION_DENIED, "a circuit leads to somebody else")
        if not self.holds(now, destination):
            return Refusal(Status.NO_RESERVATION, f"{destination.short} has no reservation here")
        full = self._full(source, place, destination)
        if full is not None:
            return Refusal(Status.RESOURCE_LIMIT_EXCEEDED, full)
        self._next += 1
        self._circuits[self._next] = _Circuit(source, place, destination)
        return Admitted(self._next)

    def ended(self, number: int) -> None:
        """The circuit is closed, or never came to be."""
        self._circuits.pop(number, None)

    @property
    def circuits(self) -> int:
        """Number of circuits, with those that are being made."""
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
            (len(to_there), config.circuits_per_destination, f"the way to {destination.short}"),
            (from_here_there, config.circuits_per_place_and_destination, f"{place} to {destination.short}"),
            (sum(c.source == source for c in to_there), config.circuits_per_pair, f"the pair with {destination.short}"),
        )
        for count, bound, whose in bounds:
            if count >= bound:
                return f"{whose} has its {bound} circuits"
        return None

    # --- how often -----------------------------------------------------------------------------------------

    def _too_often(self, now: float, place: str) -> Refusal | None:
        most = self.config.requests_per_place_min
        allowance = self._requests[place] = self._requests.get(place) or _Allowance(most, now)
        allowance.left = min(most, allowance.left + (now - allowance.at) * most / 60)
        allowance.at = now
        if allowance.left < 1:
            return Refusal(Status.RESOURCE_LIMIT_EXCEEDED, f"{place} asks more than {most} times a minute")
        allowance.left -= 1
        return None

    def check(self) -> None:
        """The bounds, for tests: called after every step there."""
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
    """Circuits to end, given the place and the bytes held of each: the fullest of the place that holds most, until the
    rest is within `most_bytes`. So a peer that stalls many circuits loses them, and others none.
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
