"""UPnP Internet Gateway Devices, through the library miniupnpc: the optional extra `peerd[portmap]`.

The library blocks: all of it runs in one worker thread at a time, which a caller whose patience ends leaves behind
(its own time limits end it). Hostile input: whoever is in the local network can answer as a router; what it promises
is believed only so far that others test it.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import random
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from peerd.net.gateway.router import Mapped, NoMapping

T = TypeVar("T")

_DISCOVERY_MS: Final = 1000  # for each of seven kinds of router, until one answers
_FURTHER_PORTS: Final = 4  # tried when the port is taken, be it by another machine of the same home
_TAKEN: Final = ("ConflictInMappingEntry", "ConflictWithOtherMechanisms")
_FOR_EVER_ONLY: Final = "OnlyPermanentLeasesSupported"  # older routers: we take it back when we leave


def available() -> bool:
    """True when the library is installed."""
    return importlib.util.find_spec("miniupnpc") is not None


class _Failing:
    """The library raises bare `Exception`, and nothing else is its doing: as NoMapping, with its words."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception and error is not None:
            text = str(error)
            raise NoMapping("no UPnP router answers" if text in ("", "Success") else f"UPnP: {text}") from error


class UpnpRouter:
    """A router that speaks UPnP."""

    kind: Final = "UPnP"

    def __init__(self, rng: random.Random, description_url: str | None = None) -> None:
        """`description_url`: where the router describes itself; None: found by asking the local network."""
        self._rng, self._url = rng, description_url
        self._limiter = trio.CapacityLimiter(1)
        self._outside: dict[int, int] = {}  # our port -> the router's
        self._last: Any = None  # the router that was found last

    async def map(self, port: int, lease_s: int) -> Mapped:
        return await self._in_thread(lambda: self._map(port, lease_s))

    async def unmap(self, port: int) -> None:
        await self._in_thread(lambda: self._unmap(port))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)

    def _router(self) -> Any:
        """The router that is there now: this machine may be elsewhere since, and asking happens every few
        minutes only.
        """
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
        raise NoMapping("UPnP: every port that was asked for is taken")

    def _unmap(self, port: int) -> None:
        outside = self._outside.pop(port, None)
        if outside is not None and self._last is not None:
            with _Failing():
                self._last.deleteportmapping(outside, "TCP")


def _add(igd: Any, outside: int, port: int, lease_s: int) -> int:
    """Seconds of the lease that the router granted; 0: for ever."""
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
