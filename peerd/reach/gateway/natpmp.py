"""NAT-PMP (RFC 6886): requests a port mapping from the router in a UDP exchange of 12 bytes.

The protocol is so small that no library is used. Hostile input: only the gateway's own address and port can answer (the
socket is connected), answers have one of two exact lengths, and other peers test the mapping before it is used.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable
from typing import Final

import trio

from peerd.reach.gateway.router import Mapped, NoMapping

PORT: Final = 5351
FIRST_WAIT_S: Final = 0.25  # RFC 6886, section 3.1: doubled with each repeat
_TRIES: Final = 4  # the RFC's nine take a minute; a home router answers within milliseconds
_EXTERNAL: Final = 0
_MAP_TCP: Final = 2
_ANSWER: Final = 128
_ANSWER_BYTES: Final = {_EXTERNAL: 12, _MAP_TCP: 16}
_RESULTS: Final = {
    1: "it supports another version only",
    2: "port mapping is switched off",
    3: "it has no address itself",
    4: "it has no free port",
    5: "it does not know this request",
}


def external_request() -> bytes:
    """A request for the router's public address."""
    return struct.pack("!BB", 0, _EXTERNAL)


def map_request(port: int, wanted: int, lease_s: int) -> bytes:
    """A request to map the router's port `wanted`, or any other, to our `port`. A lease of 0 removes the mapping."""
    return struct.pack("!BBHHHI", 0, _MAP_TCP, 0, port, wanted, lease_s)


def parse_external(answer: bytes) -> ipaddress.IPv4Address:
    """Parse the router's public address. Raises NoMapping with the reason."""
    _check(answer, _EXTERNAL)
    return ipaddress.IPv4Address(answer[8:12])


def parse_mapped(answer: bytes, port: int) -> tuple[int, int]:
    """Parse the answer about our `port`; returns the router's port and the lease in seconds. Raises NoMapping."""
    _check(answer, _MAP_TCP)
    inside, outside, lease_s = struct.unpack_from("!HHI", answer, 8)
    if inside != port:
        raise NoMapping(f"the router answered about port {inside} instead of {port}")
    return outside, lease_s


def _is_answer(answer: bytes, operation: int) -> bool:
    """True if this is an answer to that operation; an error may be shorter than a result."""
    return len(answer) >= 4 and answer[0] == 0 and answer[1] == _ANSWER + operation


def _check(answer: bytes, operation: int) -> None:
    if not _is_answer(answer, operation):
        raise NoMapping("the router's answer is not NAT-PMP")
    result = int.from_bytes(answer[2:4], "big")
    if result:
        raise NoMapping(f"the router refuses: {_RESULTS.get(result, f'error {result}')}")
    if len(answer) != _ANSWER_BYTES[operation]:
        raise NoMapping(f"the router's answer has {len(answer)} bytes")


class NatPmp:
    """Client for a router that supports NAT-PMP."""

    kind: Final = "NAT-PMP"

    def __init__(self, gateway: Callable[[], str | None], port: int = PORT) -> None:
        """`gateway` returns the router's current address, or None if it is unknown."""
        self._gateway, self._port = gateway, port

    async def map(self, port: int, lease_s: int) -> Mapped:
        ip = parse_external(await self._ask(external_request(), _EXTERNAL))
        outside, granted_s = parse_mapped(await self._ask(map_request(port, port, lease_s), _MAP_TCP), port)
        if not outside or not granted_s:  # looks like the answer to `unmap`
            raise NoMapping("the router's answer has no port, or no lease")
        return Mapped(ip, outside, granted_s)

    async def unmap(self, port: int) -> None:
        parse_mapped(await self._ask(map_request(port, 0, 0), _MAP_TCP), port)

    async def _ask(self, request: bytes, operation: int) -> bytes:
        gateway = self._gateway()
        if gateway is None:
            raise NoMapping("no router is known that could be asked by NAT-PMP")
        try:
            with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                await sock.connect((gateway, self._port))
                for attempt in range(_TRIES):
                    await sock.send(request)
                    with trio.move_on_after(FIRST_WAIT_S * 2**attempt):
                        while True:
                            answer = await sock.recv(64)
                            if _is_answer(answer, operation):
                                return answer
        except OSError as error:
            raise NoMapping(f"no NAT-PMP at {gateway}: {error.strerror or error}") from error
        raise NoMapping(f"no NAT-PMP at {gateway}: no answer")
