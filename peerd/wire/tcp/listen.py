"""Opens the listeners of a host, all or none.

`/ip4/0.0.0.0/tcp/<port>` and `/ip6/::/tcp/<port>` together mean every address of this machine: port 0 then stands for
one free port that both use, and a machine with only one of the two IP versions listens on that one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from multiaddr import Multiaddr

from peerd.core.addr import ip_of, tcp_addr, tcp_place
from peerd.core.errors import ConfigError
from peerd.wire.transport import Listener, NoSuchFamily, Transport, close_surely

_log = logging.getLogger("peerd.wire")
_TRIES: Final = 16  # for a port that is free in both families


async def open_listeners(listen: Sequence[Multiaddr], transports: Sequence[Transport]) -> list[Listener]:
    """Open a listener for each address. Raises ConfigError with the address that failed."""
    opened: list[Listener] = []
    done: set[Multiaddr] = set()
    complete = False
    try:
        for addr in dict.fromkeys(listen):
            other = other_family(addr)
            if addr in done:
                continue
            if other is not None and other in listen:
                opened += await _open_both(addr, other, transports)
                done.add(other)
            else:
                opened.append(await _open(addr, transports))
        complete = True
        return opened
    finally:
        if not complete:
            await close_surely(*opened)


async def _open_both(first: Multiaddr, second: Multiaddr, transports: Sequence[Transport]) -> list[Listener]:
    """Open both wildcards, on the same port if possible; a family that this machine does not have is skipped."""
    any_port = _port(first) == 0
    for _ in range(_TRIES if any_port else 1):
        try:
            one = await _open(first, transports)
        except NoSuchFamily as error:
            _log.debug("%s", error)
            return [await _open(second, transports)]
        try:
            port = next((port for addr in one.addrs if (port := _port(addr))), 0)
            return [one, await _open(_with_port(second, port), transports)]
        except NoSuchFamily as error:
            _log.debug("%s", error)
            return [one]
        except ConfigError:
            await close_surely(one)
            if not any_port:
                raise
    return [await _open(first, transports), await _open(second, transports)]


async def _open(addr: Multiaddr, transports: Sequence[Transport]) -> Listener:
    for transport in transports:
        if transport.can_dial(addr):
            return await transport.listen(addr)
    raise NoSuchFamily(f"cannot listen on {addr}: no transport speaks that kind of address")


def _port(addr: Multiaddr) -> int:
    place = tcp_place(addr)
    return place.port if place is not None else 0


def _with_port(addr: Multiaddr, port: int) -> Multiaddr:
    return tcp_addr(str(ip_of(addr)), port)


def other_family(addr: Multiaddr) -> Multiaddr | None:
    """The other IP version's wildcard with the same port, or None if `addr` is not a wildcard."""
    ip, place = ip_of(addr), tcp_place(addr)
    if ip is None or place is None or not ip.is_unspecified:
        return None
    return tcp_addr("::" if ip.version == 4 else "0.0.0.0", place.port)
