"""The part of a daemon's status snapshot that the commands show, as structs.

Commands call `decode_status` and read fields of structs. `peerd status --json` prints a snapshot as
received, which has more fields than these. Text may come from untrusted peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from peerd.core.decoders import convert
from peerd.core.errors import PeerdError
from peerd.core.version import VERSION
from peerd.status.swarm_status import Figure, StatusPart, SwarmStatus


class OwnPeerStatus(StatusPart, frozen=True):
    """The daemon's peer id and addresses."""

    id: str = "?"
    addrs: Sequence[str] = ()


class ConnectedPeerStatus(StatusPart, frozen=True):
    """A connected peer, and how it is connected: "direct", "punched", "relayed"."""

    way: str | None = None


class RateStatus(StatusPart, frozen=True):
    """One direction of the internet connection, in Mb/s."""

    limit_mbit: Figure = None
    measured_mbit: Figure = None  # the highest measured rate
    now_mbit: Figure = 0.0


class TrafficStatus(StatusPart, frozen=True):
    """The daemon's connections and traffic. `line` has the directions "up" and "down"."""

    streams: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    in_per_s: Figure = 0.0
    out_per_s: Figure = 0.0
    line: dict[str, RateStatus] = msgspec.field(default_factory=dict)
    peers: Sequence[ConnectedPeerStatus] = ()


class CarriedStatus(StatusPart, frozen=True):
    """Circuits and bytes that the daemon carries for others as a relay."""

    circuits: int = 0
    reservations: int = 0
    carried_bytes: int = 0


class ReachableStatus(StatusPart, frozen=True):
    """Whether and how others reach this peer."""

    verdict: str = "unknown"
    advice: str = ""
    for_s: Figure = None  # duration of the verdict
    proven: Sequence[str] = ()  # addresses at which others have reached it
    relays: Sequence[str] = ()
    carries: CarriedStatus | None = None


class BootstrapStatus(StatusPart, frozen=True):
    """A bootstrap address, and the state of the connection to it."""

    addr: str = "?"
    connected: bool = False
    in_reserve: bool = False
    problem: str | None = None


class DirectoryStatus(StatusPart, frozen=True):
    """The daemon's contacts and stored records in the DHT, and what it waits for there."""

    waits_for: str | None = None
    peers: int = 0
    records_held: int = 0
    lookups: int | None = None
    lies: int | None = None
    bootstrap: Sequence[BootstrapStatus] = ()
    clock_warning: str | None = None


class LimitsStatus(StatusPart, frozen=True):
    """The limits that the user set for this machine, as one phrase."""

    text: str = ""


class BudgetUserStatus(StatusPart, frozen=True):
    """A user of a resource, with its use and its limit."""

    who: str = "?"
    has: Figure = 0
    of: Figure = 0


class BudgetStatus(StatusPart, frozen=True):
    """Use of one resource, and the peer, place (address block) and region that use most of it."""

    means: str = "?"
    used: Figure = 0
    of: Figure = 0
    peer: BudgetUserStatus | None = None
    place: BudgetUserStatus | None = None
    region: BudgetUserStatus | None = None


class FaultStatus(StatusPart, frozen=True):
    """The last internal error at one line of code."""

    place: str = "?"
    error: str = "?"


class FaultsStatus(StatusPart, frozen=True):
    """Internal errors: their number, and the code line of the last one."""

    count: int = 0
    last: str | None = None
    places: Sequence[FaultStatus] = ()


class StatusSnapshot(StatusPart, frozen=True):
    """The status of a daemon. Roles and events may have further fields, under names of their own."""

    version: str = "?"
    uptime_s: Figure = None  # None without figures of the daemon itself, as while it rests
    run: str | None = None
    data_dir: str = "?"
    alone: str | None = None  # how long all links have been lost, in words
    no_part_yet: str | None = None  # what it waits for before it takes part
    peer: OwnPeerStatus = OwnPeerStatus()
    roles: Sequence[dict[str, Any]] = ()
    network: TrafficStatus = TrafficStatus()
    reachability: ReachableStatus = ReachableStatus()
    dht: DirectoryStatus | None = None
    limits: LimitsStatus = LimitsStatus()
    budgets: Sequence[BudgetStatus] = ()
    faults: FaultsStatus = FaultsStatus()
    swarm: SwarmStatus = SwarmStatus()
    events: Sequence[dict[str, Any]] = ()


S = TypeVar("S", bound=StatusPart)


def decode_status(told: dict[str, Any], kind: type[S]) -> S:
    """Decode a snapshot, or a part of it. Raises PeerdError if a field has another type than this version knows."""
    known = {key: value for key, value in told.items() if value is not None}  # what is unknown has its default
    try:
        return convert(known, kind)
    except (msgspec.ValidationError, OverflowError, SystemError) as error:  # the others: an integer beyond all floats
        theirs = told.get("version") or "of another version"
        raise PeerdError(f"peerd {VERSION} can't show the status of the daemon, peerd {theirs}: {error}") from error
