"""Port mapping: a home router forwards connections to a port of its public address to this machine.

The protocols are in `natpmp` and `upnp`; `reach/port_mapping` decides when to use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from peerd.core.addr import Ip
from peerd.core.errors import PeerdError


class NoMapping(PeerdError):
    """The port was not mapped: no router answered, or it refused. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A port mapping: the router's public address and port, and the lease in seconds (0: until `unmap`)."""

    ip: Ip
    port: int
    lease_s: int


class Router(Protocol):
    """A client of the router, for one protocol. Calls raise NoMapping, and may be cancelled."""

    @property
    def kind(self) -> str:
        """The protocol's name, for the user."""
        ...

    async def map(self, port: int, lease_s: int) -> Mapped:
        """Have the router forward a public TCP port to `port` of this machine; repeat before the lease ends."""
        ...

    async def unmap(self, port: int) -> None:
        """Remove the mapping."""
        ...
