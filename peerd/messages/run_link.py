"""Join links `peerd://HOST:PORT/PEER/RUN`, and the messages that fetch a run file through one.

The shared part of a run file is sent as canonical JSON, without the sections that each volunteer sets and without the
publisher's paths, signed by the organizer if the run has one. The receiver decodes it into a typed run file before it
uses any value; the volunteer has to allow the code, files and hosts that it names (`run.check_line`). Hostile
input: malformed links (ConfigError); answers that are too long, not JSON, deeply nested, with wrong types, unsigned,
signed by others, or with keys that each user sets (ProtocolViolation).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Final
from urllib.parse import quote, unquote

import msgspec
from multiaddr import Multiaddr

from peerd.core.addr import block_of, ip_of, is_relayed, parse_addr, tcp_place
from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.keys import SIGNATURE_BYTES, verify
from peerd.core.limits import RUN_FILE_BYTES
from peerd.messages.encoding import BAD_INPUT, Message
from peerd.run.check_line import own_keys
from peerd.run.runfile import LineSection, RunFile

SERVICE: Final = "run/1"
METHOD: Final = "run/1/file"
DOMAIN: Final = b"peerd run file 1\0"
LINK_CHARS: Final = 1024
FORM: Final = "peerd://HOST:PORT/PEER/RUN"
_LINK: Final = re.compile(r"peerd://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([1-9]\d{0,4})/([A-Za-z0-9]+)/([^/?#\s]+)")
_LEFT_OUT: Final = ("bootstrap", "listen", "announce", "limits", "line")  # each peer's own
_ACCESS: Final = ("allow", "organizer")
_DEFAULT: Final[dict[str, Any]] = msgspec.to_builtins(RunFile(run="", line=LineSection(link="")))


class RunFileRequest(Message, frozen=True):
    """A request for the run file of a run."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class RunFileAnswer(Message, frozen=True):
    """Answer: the shared part of the run file, and the organizer's signature, empty if the run has no organizer."""

    text: Annotated[bytes, msgspec.Meta(max_length=RUN_FILE_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A join link: a backbone's host, port and peer id, and the name of the run."""

    host: str  # IPv4, IPv6 or DNS name
    port: int
    peer: PeerId
    run: str

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Parse a join link. Raises ConfigError."""
        match = _LINK.fullmatch(text) if len(text) <= LINK_CHARS else None
        if match is None:
            raise ConfigError(f"{text[:120]!r} is not a join link; it has the form {FORM}")
        host, port, peer, run = match.groups()
        try:
            link = cls(_host(host), int(port), PeerId.parse(peer), unquote(run, errors="strict"))
        except ValueError as error:
            raise ConfigError(f"{text[:120]!r} is not a join link: {error}; it has the form {FORM}") from error
        if link.port > 65535 or not 0 < len(link.run) <= 64 or not link.run.isprintable() or link.text != text:
            raise ConfigError(f"{text[:120]!r} is not a join link as peerd writes it; it has the form {FORM}")
        link.addr  # noqa: B018 - raises ConfigError for an invalid host name
        return link

    @property
    def text(self) -> str:
        """The link as text, as it is published."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"peerd://{host}:{self.port}/{self.peer.text}/{quote(self.run, safe='')}"

    @property
    def addr(self) -> Multiaddr:
        """The backbone's address."""
        try:
            kind = f"ip{ipaddress.ip_address(self.host).version}"
        except ValueError:
            kind = "dns"
        return parse_addr(f"/{kind}/{self.host}/tcp/{self.port}/p2p/{self.peer.text}")


def best_link(addrs: Iterable[Multiaddr], peer: PeerId, run: str) -> JoinLink | None:
    """The link to `peer` with the widest reach: a public address, else one of its network, else of this machine.

    Returns None if no address has a host and a TCP port.
    """
    found = []
    for addr in addrs:
        ip, port = ip_of(addr), re.search(r"/tcp/(\d+)(/p2p/[^/]+)?$", str(addr))
        if port is None or is_relayed(addr):
            continue
        if ip is None:  # a name that the user announces
            place = tcp_place(addr)
            found += [(0, 0, JoinLink(place.host, place.port, peer, run))] if place is not None else []
            continue
        rank = 2 if ip.is_loopback else 1 if block_of(ip) is not None else 0
        found.append((rank, ip.version, JoinLink(str(ip), int(port[1]), peer, run)))
    return min(found, key=lambda one: one[:2])[2] if found else None


def shared_file(run: RunFile) -> bytes:
    """The published part of a run file, as canonical JSON: the values that differ from the defaults."""
    tree = msgspec.to_builtins(run)
    for name in _LEFT_OUT:
        del tree[name]
    tree["access"] = {key: value for key, value in tree["access"].items() if key in _ACCESS}
    tree["pipeline"]["plan"] = ""  # its content is in `plan`
    tree["model"]["vocab"] = PurePosixPath(tree["model"]["vocab"]).name
    for source in (tree["data"], *tree["data"]["sources"]):
        if source["kind"] != "dataset" and is_local(source["path"]):
            source["path"] = PurePosixPath(source["path"]).name or "text"
    return msgspec.json.encode(_beside(tree, _DEFAULT), order="sorted")


def plain_tree(run: RunFile) -> dict[str, Any]:
    """The values of a run file from a join link that differ from the defaults, as plain values."""
    return _beside(msgspec.to_builtins(run), _DEFAULT)


def shared_run(told: RunFileAnswer, run: str) -> RunFile:
    """Decode a published run file. Raises ProtocolViolation if it is malformed, of another run or wrongly signed.

    Does not check what the file may name: see `check_line`.
    """
    try:
        found = from_json(told.text, RunFile)
    except BAD_INPUT as error:
        raise ProtocolViolation(f"the run file that it sent is not valid: {error!s:.200}") from None
    if found.line is not None:
        raise ProtocolViolation("its run file sets line, which each peer must set itself")
    if own := own_keys(found):
        raise ProtocolViolation(f"its run file sets {own[0]}, which each peer must set itself")
    if found.run != run:
        raise ProtocolViolation("its run file is of another run")
    organizer = found.access.organizer
    if organizer:
        if not _signed(organizer, told):
            raise ProtocolViolation(f"its run file is not signed by the organizer that it names, {organizer!r:.100}")
    elif told.signature:
        raise ProtocolViolation("its run file is signed, and names no organizer")
    return found


def is_local(path: str) -> bool:
    """True if `path` names local files."""
    return path != "stdlib" and not path.startswith(("http://", "https://"))


def _signed(organizer: str, told: RunFileAnswer) -> bool:
    try:
        peer = PeerId.parse(organizer)
    except ValueError:
        return False
    return len(told.signature) == SIGNATURE_BYTES and verify(peer, DOMAIN + told.text, told.signature)


def _beside(tree: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The values of `tree` that differ from `default`."""
    left: dict[str, Any] = {}
    for key, value in tree.items():
        known = default.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            value = _beside(value, known)
            if value:
                left[key] = value
        elif value != known:
            left[key] = value
    return left


def _host(text: str) -> str:
    if text.startswith("["):
        return str(ipaddress.IPv6Address(text[1:-1]))
    if re.fullmatch(r"[0-9.]+", text):
        return str(ipaddress.IPv4Address(text))
    return text
