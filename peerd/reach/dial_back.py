"""Dial-backs for AutoNAT: only the requesting peer itself is dialed, and only a few at once.

This module decides and dials nothing. Only addresses with exactly the IP address that the requester is connected from
are allowed, so that nobody can make us dial others (RFC 3489, 12.1.1). Hostile input: floods of requests from one peer,
from one address with many identities, and from many addresses; addresses of victims, of this machine's own network, of
relays. Invariants: the tables stay within limits.AUTONAT_*; every refusal has a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import decode_addr, ip_of, place_of, reach, split_peer, tcp_place
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.reach.messages.autonat_message import DialRequest, DialStatus
from peerd.wire.path_selection import PathKind
from peerd.wire.rate.quota import Quota

_TOO_OFTEN = ("too many requests in this minute", "you ask too often", "your address asks too often")


@dataclass(frozen=True, slots=True)
class DialBackRefusal:
    """A refused dial-back request, with the reason."""

    status: DialStatus
    why: str


@dataclass(frozen=True, slots=True)
class Asker:
    """The requesting peer, and the link on which its request arrived."""

    peer: PeerId
    remote: Multiaddr
    way: PathKind


class DialBacks:
    """Dial-back requests in progress, and those of the last minute."""

    def __init__(self) -> None:
        self._busy: dict[int, str] = {}  # request number -> place of the requester
        self._next = 0
        bounds = limits.AUTONAT_PER_MINUTE, limits.AUTONAT_PER_MINUTE_PER_PEER, limits.AUTONAT_PER_MINUTE_PER_IP
        self._quota = Quota(*bounds)

    @property
    def under_way(self) -> int:
        return len(self._busy)

    def begin(self, now: float, asker: Asker, question: DialRequest) -> tuple[int, list[Multiaddr]] | DialBackRefusal:
        """Admit a request: return its number, which `end` needs, and the addresses to dial; or the refusal."""
        ip = ip_of(asker.remote)
        if question.peer not in (None, asker.peer):
            return DialBackRefusal(DialStatus.BAD_REQUEST, "only the requesting peer itself is dialed")
        if asker.way in (PathKind.RELAYED, PathKind.PUNCHED) or ip is None:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, "this connection does not show your address")
        if reach(asker.remote) < 2:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, "only public addresses are dialed")
        addrs = _allowed(asker, question.addrs)
        if not addrs:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, f"the request has no address at {ip}, your own IP address")
        place = place_of(ip)[0]
        names = "", asker.peer, place
        if crowd := self._crowd(now, names):
            return DialBackRefusal(DialStatus.DIAL_REFUSED, crowd)
        self._quota.count(now, names)
        self._next += 1
        self._busy[self._next] = place
        return self._next, addrs

    def end(self, number: int) -> None:
        """Record that the request has been answered."""
        del self._busy[number]

    def _crowd(self, now: float, names: tuple[str, PeerId, str]) -> str:
        """The limit that this request would exceed, or "" if there is none."""
        if len(self._busy) >= limits.AUTONAT_AT_ONCE:
            return "too many requests at once"
        if list(self._busy.values()).count(names[-1]) >= limits.AUTONAT_AT_ONCE_PER_IP:
            return "too many requests at once from your address"
        over = self._quota.exceeded(now, names)
        return "" if over is None else _TOO_OFTEN[over]

    def check(self) -> None:
        """Assert the invariants, for tests."""
        assert len(self._busy) <= limits.AUTONAT_AT_ONCE
        assert len(self._quota) <= 1 + 2 * limits.AUTONAT_PER_MINUTE


def _allowed(asker: Asker, raw: Iterable[bytes]) -> list[Multiaddr]:
    """The requested addresses that have the requester's own IP address."""
    found: list[Multiaddr] = []
    for each in raw:
        try:
            found.append(split_peer(decode_addr(each))[0])
        except ProtocolViolation:
            continue  # unknown kind of address
    ip = ip_of(asker.remote)
    good = [addr for addr in found if ip_of(addr) == ip and (place := tcp_place(addr)) is not None and place.port != 0]
    return list(dict.fromkeys(good))[: limits.AUTONAT_DIALS]
