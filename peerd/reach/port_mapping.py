"""Port mapping: keeps the listening port open at the home router while this peer runs.

Asks each kind of router in turn and announces the public address and port that it maps. Renews long before the lease
ends, because a router that restarts forgets the mapping. Asks again when this machine joins another network, and
removes the mapping at the end. Other peers test whether the address works (`autonat`). An address that is not public is
not announced, because behind a second router it is useless.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from peerd.core.addr import reach, tcp_addr, tcp_place
from peerd.core.clock import Clock
from peerd.reach.gateway.natpmp import NatPmp
from peerd.reach.gateway.router import NoMapping, Router
from peerd.reach.gateway.upnp import UpnpRouter, available
from peerd.wire.host.host import Host
from peerd.wire.rate.backoff import backoff_s
from peerd.wire.tcp.interfaces import gateway

_log = logging.getLogger("peerd.portmap")
MAPPED: Final = "mapped"  # the source under which the address is announced
_SHORTEST_LEASE_S: Final = 60.0  # shorter leases are renewed as if they had this length

_WORDS: Final = {  # by state, for users
    "mapped": "the router forwards {address} to this peer ({by})",
    "useless": "the router opens a port that others cannot reach: {why} ({by})",
    "none": "no router opens a port for this peer: {why}",
    "not needed": "no router is asked for a port: {why}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMapConfig:
    """Settings of the port mapping. Times in seconds."""

    lease_s: int = 3600  # half of what RFC 6886 recommends: after a crash the mapping expires sooner
    renew_s: float = 300.0  # a router that was restarted has no mapping
    retry_s: float = 60.0  # after no router answered; doubled each time
    longest_retry_s: float = 3600.0
    ask_s: float = 15.0  # one router; a search that finds no UPnP router takes half of that
    leave_s: float = 2.0


class PortMapping:
    """Keeps this peer's port mapped. Idle until `run`."""

    def __init__(self, host: Host, routers: Sequence[Router], config: PortMapConfig | None = None) -> None:
        self._host, self._routers = host, list(routers)
        self._config = config or PortMapConfig()
        self._held: tuple[Router, int] | None = None  # the router and the port that it maps
        self._failures = 0
        self._was_mapped = False
        self._lease_s = math.inf
        self._status: dict[str, Any] = {"state": "asking", "address": None, "by": None, "why": None}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the port mapped until cancelled."""
        task_status.started()
        try:
            while True:
                await self._look()
                with trio.move_on_after(self._pause_s()):
                    await self._host.whereabouts.relocated()
                    self._failures = 0
        finally:
            with trio.CancelScope(shield=True):
                await self._leave()

    def status(self) -> dict[str, Any]:
        """Plain data: `state` (asking, mapped, useless, none, not needed), public address, kind of router, reason."""
        return dict(self._status)

    def _pause_s(self) -> float:
        if not self._failures:
            return min(self._config.renew_s, self._lease_s / 2)
        return backoff_s(self._failures, self._config.retry_s, self._config.longest_retry_s)

    async def _look(self) -> None:
        port = self._inside_port()
        if self._held is not None and self._held[1] != port:
            await self._leave()
        if port is None:
            self._failures = 0
            self._tell("not needed", why="this host listens on no private IPv4 address")
            return
        reasons: list[str] = []
        for router in sorted(self._routers, key=lambda each: self._held is None or each is not self._held[0]):
            reason = await self._ask(router, port)
            if reason is None:
                self._failures = 0
                return
            reasons.append(reason)
        self._held = None
        self._failures += 1
        self._tell("none", why="; ".join(reasons))

    def _inside_port(self) -> int | None:
        """The port to map. None if there is no port to map, or if strangers reach it without a router's help."""
        places = [(addr, place) for addr in self._host.listen_addrs() if (place := tcp_place(addr)) is not None]
        four = [(addr, place) for addr, place in places if place.family == "ip4"]
        if any(reach(addr) == 2 for addr, _ in four):
            return None
        return next((place.port for addr, place in four if reach(addr) == 1), None)

    async def _ask(self, router: Router, port: int) -> str | None:
        """Why this router does not help, or None if it maps the port."""
        try:
            with trio.fail_after(self._config.ask_s):
                mapped = await router.map(port, self._config.lease_s)
        except NoMapping as error:
            return str(error)
        except trio.TooSlowError:
            return f"{router.kind}: no answer within {self._config.ask_s:g} s"
        self._held = (router, port)
        self._lease_s = max(float(mapped.lease_s), _SHORTEST_LEASE_S) if mapped.lease_s else math.inf
        addr = tcp_addr(str(mapped.ip), mapped.port)
        if reach(addr) < 2:
            self._tell("useless", by=router.kind, why=f"the router's own address, {mapped.ip}, is not public")
        else:
            self._tell("mapped", address=str(addr), by=router.kind)
        self._host.whereabouts.announce(MAPPED, [addr] if reach(addr) == 2 else [])
        return None

    def _tell(self, state: str, *, address: str | None = None, by: str | None = None, why: str | None = None) -> None:
        told = {"state": state, "address": address, "by": by, "why": why}
        if told != self._status:
            self._status = told
            news = state == "mapped" or self._was_mapped  # at the start only `peerd status` shows a missing one
            self._was_mapped = state == "mapped"
            _log.log(logging.INFO if news else logging.DEBUG, "%s", _WORDS[state].format(**told))
        if address is None:
            self._host.whereabouts.announce(MAPPED, [])

    async def _leave(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with trio.move_on_after(self._config.leave_s):
                try:
                    await held[0].unmap(held[1])
                except NoMapping as error:
                    _log.debug("the mapping was not removed: %s", error)


def own_routers(clock: Clock) -> list[Router]:
    """The routers that this machine may have, the quickest to ask first. Empty without the extra `peerd[portmap]`."""
    if not available():
        return []
    return [NatPmp(gateway), UpnpRouter(clock.rng("portmap"))]


async def tried(routers: Sequence[Router], port: int) -> list[str]:
    """Each router's answer as text, when it is asked to map `port` for a moment: for `peerd doctor`."""
    told: dict[str, str] = {}

    async def attempt(router: Router) -> None:
        try:
            with trio.fail_after(PortMapConfig().ask_s):
                mapped = await router.map(port, int(_SHORTEST_LEASE_S))
                await router.unmap(port)
            told[router.kind] = f"the router at {mapped.ip} maps ports by {router.kind}"
        except NoMapping as error:
            told[router.kind] = str(error)
        except trio.TooSlowError:
            told[router.kind] = f"{router.kind}: no answer"

    async with trio.open_nursery() as nursery:
        for router in routers:
            nursery.start_soon(attempt, router)
    return [told[router.kind] for router in routers]
