"""Discovery of peers in the local network by multicast DNS, as in libp2p, with the library zeroconf: `peerd[lan]`.

A peer announces a service `<random>._p2p._udp.local` with texts `dnsaddr=<address with /p2p>`. The library has its own
thread; peerd calls it from worker threads, and the names that it finds reach the event loop through one bounded table.
Hostile input: any host in the local network may send anything. Texts are parsed strictly and only up to a size, and the
number of unresolved names is bounded. Source: libp2p specs `discovery/mdns.md`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import random
import string
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from peerd.core.addr import decode_addr, ip_of, is_dialable, is_relayed, parse_addr, split_peer, tcp_place
from peerd.core.errors import ConfigError, PeerdError, ProtocolViolation
from peerd.core.limits import ADDRS_PER_PEER, LAN_NAMES, LAN_TEXT_BYTES

SERVICE: Final = "_p2p._udp.local."
_KEY: Final = b"dnsaddr="
_STRING_BYTES: Final = 255  # of one text in DNS
_NAME_CHARS: Final = 32
_LOOK_UP_MS: Final = 2000
_STOP_S: Final = 2.0


class NoDiscovery(PeerdError):
    """Multicast DNS cannot be used on this machine; the message has the reason."""


def available() -> bool:
    """True if the library zeroconf is installed."""
    return importlib.util.find_spec("zeroconf") is not None


def text_of(addrs: Sequence[Multiaddr]) -> bytes:
    """The TXT record that announces these addresses, which include /p2p."""
    texts = [_KEY + str(addr).encode() for addr in addrs]
    return b"".join(bytes([len(text)]) + text for text in texts if len(text) <= _STRING_BYTES)


def addrs_in(text: bytes) -> list[Multiaddr]:
    """The direct addresses with /p2p in another peer's TXT record. Other content and excess data are ignored."""
    found: list[Multiaddr] = []
    at, text = 0, text[:LAN_TEXT_BYTES]
    while at < len(text) and len(found) < ADDRS_PER_PEER:
        size = text[at]
        part = text[at + 1 : at + 1 + size]
        at += 1 + size
        if len(part) < size or not part.startswith(_KEY):
            continue
        try:
            addr = decode_addr(parse_addr(part[len(_KEY) :].decode("ascii")).to_bytes())
        except (ConfigError, ProtocolViolation, UnicodeDecodeError):
            continue
        if split_peer(addr)[1] is not None and is_dialable(addr) and not is_relayed(addr):
            found.append(addr)
    return found


class Mdns:
    """Announces this peer in the local network and finds others, while `run` runs."""

    def __init__(self, rng: random.Random, interfaces: Sequence[str] | None = None) -> None:
        """`interfaces`: IP addresses of the interfaces to use, or None for all."""
        self._name = "".join(rng.choices(string.ascii_lowercase + string.digits, k=_NAME_CHARS))
        self._interfaces = interfaces
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}  # found by the library's thread and not yet looked up

    async def run(self, addrs: Sequence[Multiaddr], found: Callable[[bytes], None]) -> None:
        """Announce `addrs`, which include this peer's id, until cancelled. Calls `found` with others' TXT records."""
        news, token = trio.Event(), trio.lowlevel.current_trio_token()

        def seen(zeroconf: object, service_type: str, name: str, state_change: object) -> None:
            if self._is_first_of_new(name):
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(lambda: news.set())

        library = None
        try:
            library = await trio.to_thread.run_sync(lambda: self._start(addrs, seen))
            while True:
                await news.wait()
                news = trio.Event()
                for name in self._taken():
                    text = await trio.to_thread.run_sync(_look_up, library, name, abandon_on_cancel=True)
                    if text:
                        found(text)
        finally:
            if library is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(_STOP_S):
                    await trio.to_thread.run_sync(library.close, abandon_on_cancel=True)

    def _is_first_of_new(self, name: str) -> bool:
        """Add a name to the table; True if it is the only one, so that the event loop must be woken."""
        with self._lock:
            if len(self._names) >= LAN_NAMES or name in self._names or name.startswith(self._name):
                return False
            self._names[name] = None
            return len(self._names) == 1

    def _taken(self) -> list[str]:
        with self._lock:
            names = list(self._names)
            self._names.clear()
        return names

    def _start(self, addrs: Sequence[Multiaddr], seen: Callable[..., None]) -> Any:
        zeroconf = importlib.import_module("zeroconf")
        options = {} if self._interfaces is None else {"interfaces": list(self._interfaces)}
        try:
            library = zeroconf.Zeroconf(**options)
        except OSError as error:
            raise NoDiscovery(f"multicast DNS cannot be used: {error.strerror or error}") from error
        try:
            library.register_service(self._service(zeroconf, addrs))
            zeroconf.ServiceBrowser(library, SERVICE, handlers=[seen])
        except (OSError, zeroconf.Error) as error:
            library.close()
            raise NoDiscovery(f"multicast DNS cannot be used: {error}") from error
        return library

    def _service(self, zeroconf: Any, addrs: Sequence[Multiaddr]) -> Any:
        places = [place for addr in addrs if (place := tcp_place(addr)) is not None]
        hosts = [ip for addr in addrs if (ip := ip_of(addr)) is not None]
        return zeroconf.ServiceInfo(
            SERVICE,
            f"{self._name}.{SERVICE}",
            port=places[0].port if places else 0,
            properties=text_of(addrs),
            addresses=[ip.packed for ip in hosts if isinstance(ip, ipaddress.IPv4Address)],
            server=f"{self._name}.local.",
        )


def _look_up(library: Any, name: str) -> bytes:
    zeroconf = importlib.import_module("zeroconf")
    try:
        info = zeroconf.ServiceInfo(SERVICE, name)
        info.request(library, _LOOK_UP_MS)  # returns False for peers that announce only the text, which is enough
        return bytes(info.text or b"")
    except zeroconf.Error:
        return b""  # an invalid name
