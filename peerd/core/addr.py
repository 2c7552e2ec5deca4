"""Multiaddr helpers: parsing of addresses from users and from peers, and classification of addresses.

Knows the protocols that appear in libp2p addresses and validates every component, so that an accepted address can
always be printed, split and compared. No sockets, no name resolution. Hostile input: unknown codes, lengths beyond the
end, host names with invalid bytes, peer ids of other key types, oversized addresses; each raises ProtocolViolation.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Final, NamedTuple

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.ids import PEER_ID_BYTES, PeerId
from peerd.core.limits import ADDR_BYTES
from peerd.core.varint import decode_varint

_P2P: Final = 0x01A5
_CIRCUIT: Final = 0x0122
_DNS_CODES: Final = {0x35: "dns", 0x36: "dns4", 0x37: "dns6", 0x38: "dnsaddr", 0x01C1: "sni"}
_VARIABLE: Final = -1
# Code -> bytes of its value; https://github.com/multiformats/multiaddr/blob/master/protocols.csv
_VALUE_BYTES: Final = {
    0x04: 4,  # ip4
    0x29: 16,  # ip6
    0x06: 2,  # tcp
    0x0111: 2,  # udp
    0x01CC: 0,  # quic
    0x01CD: 0,  # quic-v1
    0x01C0: 0,  # tls
    0x01C6: 0,  # noise
    0x01DD: 0,  # ws
    0x01DE: 0,  # wss
    _CIRCUIT: 0,
    0x0309: 8,  # memory
    _P2P: _VARIABLE,
    **dict.fromkeys(_DNS_CODES, _VARIABLE),
}
_DNS_BYTES: Final = 253
_DNS_LABEL: Final = re.compile("[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_CID: Final = b"\x01\x72"  # prefix of a peer id as CIDv1 (libp2p-key)
# In every accepted address, /p2p is these three bytes (code and length) and a peer id of 38 bytes.
_PEER_HEAD: Final = b"\xa5\x03\x26"
_CIRCUIT_PART: Final = b"\xa2\x02"
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK: Final = "127.0.0.0/8"
_PRIVATE: Final = [
    (name, ipaddress.ip_network(block))
    for name, block in (
        (LOOPBACK, LOOPBACK),
        (LOOPBACK, "::1/128"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("172.16.0.0/12", "172.16.0.0/12"),
        ("192.168.0.0/16", "192.168.0.0/16"),
        ("100.64.0.0/10", "100.64.0.0/10"),  # carrier-grade NAT; some VPNs use it, too
        ("fc00::/7", "fc00::/7"),
    )
]
EXAMPLE: Final = "/ip4/198.51.100.7/tcp/31337/p2p/12D3KooW..."


class TcpPlace(NamedTuple):
    """A TCP endpoint; `family` is ip4, ip6, dns, dns4 or dns6."""

    family: str
    host: str
    port: int


class CircuitPlace(NamedTuple):
    """The relay of a circuit. `addr` is the relay's address, or None for any known address of it."""

    relay: PeerId
    addr: Multiaddr | None


def parse_addr(text: str) -> Multiaddr:
    """Parse an address written by a user. Raises ConfigError with the reason."""
    if len(text) > ADDR_BYTES or not text.isprintable() or not text.isascii():
        raise ConfigError(f"{text[:60]!r} is not an address: it is too long or contains invalid characters")
    if not text.startswith("/") or len(text) < 2:
        raise ConfigError(f"{text!r} is not an address: it has to begin with '/', as in {EXAMPLE}")
    names = [name for family, name in pairwise(text.split("/")) if family in _DNS_CODES.values()]
    try:
        for name in names:  # the library's errors about names are about code points
            _check_host_name(name)
        return decode_addr(Multiaddr(text).to_bytes())
    except (MultiaddrError, ValueError, LookupError) as error:
        reason = getattr(error, "original", None) or getattr(error, "message", None) or error
        raise ConfigError(f"{text!r} is not an address: {reason}; one looks like {EXAMPLE}") from None
    except ProtocolViolation as error:
        raise ConfigError(f"{text!r} is not an address: {error}; one looks like {EXAMPLE}") from None


def decode_addr(raw: bytes) -> Multiaddr:
    """Parse an address from a peer, in binary form. Raises ProtocolViolation. A peer id as CIDv1 is converted to the
    38-byte form.
    """
    if not 0 < len(raw) <= ADDR_BYTES:
        raise ProtocolViolation(f"an address has {len(raw)} bytes; allowed: 1 to {ADDR_BYTES}")
    parts = [_usual(code, raw[begin:end]) for code, begin, end in _components(raw)]
    return Multiaddr(b"".join(parts))


def _usual(code: int, component: bytes) -> bytes:
    cid = len(component) == len(_PEER_HEAD) + len(_CID) + PEER_ID_BYTES
    return _PEER_HEAD + component[-PEER_ID_BYTES:] if code == _P2P and cid else component


def _components(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield code, begin and end of each component. Raises ProtocolViolation for a malformed one."""
    at = 0
    while at < len(raw):
        begin = at
        code, at = _number(raw, at)
        size = _VALUE_BYTES.get(code)
        if size is None:
            raise ProtocolViolation(f"the protocol with code {code} is not known here")
        if size == _VARIABLE:
            size, at = _number(raw, at)
        if at + size > len(raw):
            raise ProtocolViolation("an address ends inside a component")
        _check_value(code, raw[at : at + size])
        at += size
        yield code, begin, at


def _number(raw: bytes, at: int) -> tuple[int, int]:
    found = decode_varint(raw, at)
    if found is None:
        raise ProtocolViolation("an address ends inside a number")
    return found


def _check_value(code: int, value: bytes) -> None:
    if code == _P2P:
        try:
            PeerId(value.removeprefix(_CID))
        except ValueError:
            raise ProtocolViolation("the peer id is not that of an Ed25519 key (12D3KooW...)") from None
    elif code in _DNS_CODES:
        _check_host_name(value.decode("latin-1"))


def _check_host_name(name: str) -> None:
    """Raise ProtocolViolation unless `name` is a host name (RFC 1123, IDNA) that the library can print."""
    shown, labels = repr(name[:80]), name.removesuffix(".").split(".")
    if "_" in name:
        raise ProtocolViolation(
            f"{shown} has an underscore, which no host name may have: give that machine another name, or use its IP"
        )
    if len(name) > _DNS_BYTES or not all(map(_DNS_LABEL.fullmatch, labels)):
        raise ProtocolViolation(
            f"{shown} is not a host name: it needs parts of 1 to 63 letters, digits and '-', with dots between them"
        )
    xn = any(label[2:4] == "--" for label in labels)  # reserved for IDNA
    if xn or "." not in name:
        try:
            Multiaddr(f"/dns/{name}")
        except (MultiaddrError, ValueError, LookupError):
            why = f"it names a protocol: write '{name}.' or its IP"
            why = "it has '--', and is no valid 'xn--' name" if xn else why
            raise ProtocolViolation(f"{shown} is not accepted as a host name: {why}") from None


def split_peer(addr: Multiaddr) -> tuple[Multiaddr, PeerId | None]:
    """The address without a final /p2p component, and the peer in that component, or None."""
    raw = addr.to_bytes()
    tail = raw[-41:]
    if len(tail) == 41 and tail.startswith(_PEER_HEAD):
        try:
            return Multiaddr(raw[:-41]), PeerId(tail[3:])
        except ValueError:
            pass
    return addr, None


def peers_named(texts: Iterable[str]) -> list[str]:
    """The peer ids at the end of these addresses, without duplicates. Invalid addresses and addresses without a peer
    are skipped.
    """
    found = []
    for text in texts:
        with suppress(ConfigError):
            peer = split_peer(parse_addr(text))[1]
            if peer is not None:
                found.append(peer.text)
    return list(dict.fromkeys(found))


def with_peer(addr: Multiaddr, peer: PeerId) -> Multiaddr:
    """`addr` with /p2p/<peer> as its last component."""
    bare, named = split_peer(addr)
    return addr if named == peer else Multiaddr(bare.to_bytes() + _PEER_HEAD + peer.raw)


def normal(addr: Multiaddr) -> Multiaddr:
    """`addr` in its normal form: an IPv4-mapped IPv6 address (::ffff:1.2.3.4) becomes IPv4."""
    ip = ip_of(addr)
    if ip is None or ip.version == 4 or ip.ipv4_mapped is None:
        return addr
    return Multiaddr(b"\x04" + ip.ipv4_mapped.packed + addr.to_bytes()[17:])


def tcp_addr(host: str, port: int) -> Multiaddr:
    """/ip4|ip6/<host>/tcp/<port> for a literal IP address. An IPv6 zone is dropped."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    code = b"\x04" if ip.version == 4 else b"\x29"
    return Multiaddr(code + ip.packed + b"\x06" + port.to_bytes(2, "big"))


def tcp_place(addr: Multiaddr) -> TcpPlace | None:
    """Host and port of a plain TCP address, or None for any other address. A final /p2p is ignored."""
    raw = split_peer(addr)[0].to_bytes()
    if raw[:1] == b"\x04" and len(raw) == 8 and raw[5] == 6:
        return TcpPlace("ip4", str(ipaddress.IPv4Address(raw[1:5])), int.from_bytes(raw[6:], "big"))
    if raw[:1] == b"\x29" and len(raw) == 20 and raw[17] == 6:
        return TcpPlace("ip6", str(ipaddress.IPv6Address(raw[1:17])), int.from_bytes(raw[18:], "big"))
    if raw[:1] in (b"\x35", b"\x36", b"\x37") and len(raw) >= 6 and raw[1] < 0x80 and len(raw) == 5 + raw[1]:
        name, tail = raw[2 : 2 + raw[1]], raw[2 + raw[1] :]
        if tail[0] == 6:
            return TcpPlace(_DNS_CODES[raw[0]], name.decode(), int.from_bytes(tail[1:], "big"))
    return None


def ip_of(addr: Multiaddr) -> Ip | None:
    """The IP address at the start of `addr`, or None if it does not start with one."""
    raw = addr.to_bytes()
    if raw[:1] == b"\x04" and len(raw) >= 5:
        return ipaddress.IPv4Address(raw[1:5])
    if raw[:1] == b"\x29" and len(raw) >= 17:
        return ipaddress.IPv6Address(raw[1:17])
    return None


def circuit_addr(relay_addr: Multiaddr | None, relay: PeerId) -> Multiaddr:
    """The address of any peer with a reservation at `relay`: <relay_addr>/p2p/<relay>/p2p-circuit."""
    begin = b"" if relay_addr is None else split_peer(relay_addr)[0].to_bytes()
    return Multiaddr(begin + _PEER_HEAD + relay.raw + _CIRCUIT_PART)


def circuit_place(addr: Multiaddr) -> CircuitPlace | None:
    """The relay of a circuit address, with or without the destination's peer id at its end; inverse of `circuit_addr`.

    Returns None for every other address, including circuits through two relays, which are not supported.
    """
    raw = addr.to_bytes()
    circuits = [(start, end) for code, start, end in _components(raw) if code == _CIRCUIT]
    if len(circuits) != 1:
        return None
    start, end = circuits[0]
    if len(raw) != end and split_peer(addr)[0].to_bytes() != raw[:end]:
        return None
    if start == len(_PEER_HEAD) + PEER_ID_BYTES and raw.startswith(_PEER_HEAD):
        return CircuitPlace(PeerId(raw[len(_PEER_HEAD) : start]), None)
    if start == 0:
        return None
    bare, relay = split_peer(Multiaddr(raw[:start]))
    return None if relay is None else CircuitPlace(relay, bare)


def is_relayed(addr: Multiaddr) -> bool:
    """True if the address is a circuit over a relay."""
    return any(code == _CIRCUIT for code, _, _ in _components(addr.to_bytes()))


def is_dialable(addr: Multiaddr) -> bool:
    """True if the address can be dialed: it has a concrete host and port, or one relay whose address has these."""
    if is_relayed(addr):
        circuit = circuit_place(addr)
        return circuit is not None and (circuit.addr is None or is_dialable(circuit.addr))
    ip, place = ip_of(addr), tcp_place(addr)
    if ip is not None and (ip.is_unspecified or ip.is_multicast or (ip.version == 6 and ip.is_link_local)):
        return False  # an IPv6 link-local address needs an interface
    return place is None or place.port != 0


def parse_announced(text: str) -> Multiaddr:
    """Parse an address that a user announces for this peer, without /p2p. ConfigError if others cannot dial it."""
    addr = split_peer(parse_addr(text))[0]
    if is_relayed(addr) or tcp_place(addr) is None or not is_dialable(addr):
        raise ConfigError(f"{text} cannot be dialed; allowed: a host or name and a port, as /ip4/203.0.113.5/tcp/31337")
    return addr


def reach(addr: Multiaddr) -> int:
    """Scope of an address: 0 for this machine, 1 for this network, 2 for the internet. Names count as 2."""
    ip = ip_of(addr)
    if ip is None:
        return 2
    if ip.is_loopback:
        return 0
    return 2 if ip.is_global else 1  # carrier-grade NAT (100.64.0.0/10) is not global either


def block_of(ip: Ip) -> str | None:
    """The private address block that contains `ip`, or None. Different networks may use the same private address."""
    return next((name for name, block in _PRIVATE if ip.version == block.version and ip in block), None)


def place_of(ip: Ip | None) -> tuple[str, str]:
    """The place and the region of an address. Rate limits count by these, because identities are free.

    A place is an IPv4 address or an IPv6 /64, what one household has. A region is a /24 or a /48, what a customer can
    rent.
    """
    if ip is None:
        return "an unknown place", "an unknown region"
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return place_of(ip.ipv4_mapped)
        return _network(ip, 64), _network(ip, 48)
    return str(ip), _network(ip, 24)


def _network(ip: Ip, bits: int) -> str:
    return str(ipaddress.ip_network((ip, bits), strict=False))
