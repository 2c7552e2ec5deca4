"""Port mapping by a home router: it sends connections to a port of its public address to this machine.

Kinds of router are in `natpmp` and `upnp`; when to ask is `service/connectivity/port_mapping`'s affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from peerd.core.addr import Ip
from peerd.core.errors import PeerdError


class NoMapping(PeerdError):
    """No router answered, or it does not do that; the text says which."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A router's promise: its own address and port, and for how long (0: until it is told otherwise)."""

    ip: Ip
    port: int
    lease_s: int


class Router(Protocol):
    """One way to talk to the router. Calls raise NoMapping, and may be cancelled."""

    @property
    def kind(self) -> str:
        """The protocol's name, for the user."""
        ...

    async def map(self, port: int, lease_s: int) -> Mapped:
        """Have TCP connections from outside come to `port` of this machine; again before the lease ends."""
        ...

    async def unmap(self, port: int) -> None:
        """Undo `map`."""
        ...
