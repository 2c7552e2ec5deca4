"""UPnP Internet Gateway Devices, by the library miniupnpc: the optional extra `peerd[portmap]`.

The library blocks, so all calls run in one worker thread at a time. A cancelled caller abandons the thread, which the
library's own timeouts end. Hostile input: any host in the local network can answer as a router; other peers test the
mapping before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import random
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from peerd.reach.gateway.router import Mapped, NoMapping

T = TypeVar("T")

_DISCOVERY_MS: Final = 1000  # for each of seven kinds of router, until one answers
_FURTHER_PORTS: Final = 4  # tried if the port is taken, such as by another machine in the same home
_TAKEN: Final = ("ConflictInMappingEntry", "ConflictWithOtherMechanisms")
_FOR_EVER_ONLY: Final = "OnlyPermanentLeasesSupported"  # older routers; the mapping is removed on exit


def available() -> bool:
    """True if the library miniupnpc is installed."""
    return importlib.util.find_spec("miniupnpc") is not None


class _Failing:
    """Converts the bare `Exception` that the library raises into NoMapping with the same message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception and error is not None:
            text = str(error)
            raise NoMapping("no UPnP router answers" if text in ("", "Success") else f"UPnP: {text}") from error


class UpnpRouter:
    """Client for a router that supports UPnP."""

    kind: Final = "UPnP"

    def __init__(self, rng: random.Random, description_url: str | None = None) -> None:
        """`description_url`: URL of the router's device description. If None, it is discovered in the local network."""
        self._rng, self._url = rng, description_url
        self._limiter = trio.CapacityLimiter(1)
        self._outside: dict[int, int] = {}  # our port -> the router's port
        self._last: Any = None  # the router that was found last

    async def map(self, port: int, lease_s: int) -> Mapped:
        return await self._in_thread(lambda: self._map(port, lease_s))

    async def unmap(self, port: int) -> None:
        await self._in_thread(lambda: self._unmap(port))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)

    def _router(self) -> Any:
        """Discover the current router: this machine may have changed networks since the last call, minutes ago."""
        igd = importlib.import_module("miniupnpc").UPnP()
        igd.discoverdelay = _DISCOVERY_MS
        with _Failing():
            if self._url is None:
                igd.discover()
                igd.selectigd()
            else:
                igd.selectigd(self._url)
        self._last = igd
        return igd

    def _map(self, port: int, lease_s: int) -> Mapped:
        igd = self._router()
        wanted = [self._outside.get(port, port), *(self._rng.randrange(20000, 60000) for _ in range(_FURTHER_PORTS))]
        for outside in wanted:
            try:
                granted_s = _add(igd, outside, port, lease_s)
            except NoMapping as error:
                if any(word in str(error) for word in _TAKEN):
                    continue
                raise
            self._outside[port] = outside
            with _Failing():
                return Mapped(_ip(igd.externalipaddress()), outside, granted_s)
        raise NoMapping("UPnP: all requested ports are taken")

    def _unmap(self, port: int) -> None:
        outside = self._outside.pop(port, None)
        if outside is not None and self._last is not None:
            with _Failing():
                self._last.deleteportmapping(outside, "TCP")


def _add(igd: Any, outside: int, port: int, lease_s: int) -> int:
    """Add a mapping; returns the granted lease in seconds, 0 for a permanent one."""
    try:
        with _Failing():
            igd.addportmapping(outside, "TCP", igd.lanaddr, port, "peerd", "", lease_s)
        return lease_s
    except NoMapping as error:
        if lease_s == 0 or _FOR_EVER_ONLY not in str(error):
            raise
    return _add(igd, outside, port, 0)


def _ip(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        raise NoMapping(f"UPnP: the router does not know its own address ({text[:40]!r})") from None
