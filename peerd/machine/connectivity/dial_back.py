"""Dial-backs for AutoNAT: never to anybody but the asker, and never more than a few at once.

Decides, and dials nothing. Only addresses with the very IP address from which the asker is connected are allowed, so
that nobody can have others dialed (RFC 3489, 12.1.1). Hostile input: floods of questions from one peer, from one
address with many identities, and from many; addresses of victims, of this machine's own network, of relays.
Invariants: the tables stay within limits.AUTONAT_*; every refusal has a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multiaddr import Multiaddr

from peerd.core import limits
from peerd.core.addr import decode_addr, ip_of, place_of, reach, split_peer, tcp_place
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.protobuf.autonat import DialMe, DialStatus
from peerd.machine.connectivity.path_selection import PathKind
from peerd.machine.rate.quota import Quota

_TOO_OFTEN = ("too many questions in this minute", "you ask too often", "your address asks too often")


@dataclass(frozen=True, slots=True)
class DialBackRefusal:
    """A refusal to dial back, with its reason."""

    status: DialStatus
    why: str


@dataclass(frozen=True, slots=True)
class Asker:
    """The asking peer, and the link on which its question came."""

    peer: PeerId
    remote: Multiaddr
    way: PathKind


class DialBacks:
    """The questions under way and those of the last minute."""

    def __init__(self) -> None:
        self._busy: dict[int, str] = {}  # question -> place of the asker
        self._next = 0
        bounds = limits.AUTONAT_PER_MINUTE, limits.AUTONAT_PER_MINUTE_PER_PEER, limits.AUTONAT_PER_MINUTE_PER_IP
        self._quota = Quota(*bounds)

    @property
    def under_way(self) -> int:
        return len(self._busy)

    def begin(self, now: float, asker: Asker, question: DialMe) -> tuple[int, list[Multiaddr]] | DialBackRefusal:
        """The question's number and where to dial, or why not; `end` it with that number."""
        ip = ip_of(asker.remote)
        if question.peer not in (None, asker.peer):
            return DialBackRefusal(DialStatus.BAD_REQUEST, "only the asker itself is dialed")
        if asker.way in (PathKind.RELAYED, PathKind.PUNCHED) or ip is None:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, "this connection does not show from where you dial")
        if reach(asker.remote) < 2:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, "only addresses of the internet are dialed")
        addrs = _allowed(asker, question.addrs)
        if not addrs:
            return DialBackRefusal(DialStatus.DIAL_REFUSED, f"no address to dial at {ip}, from where you are connected")
        place = place_of(ip)[0]
        names = "", asker.peer, place
        if crowd := self._crowd(now, names):
            return DialBackRefusal(DialStatus.DIAL_REFUSED, crowd)
        self._quota.count(now, names)
        self._next += 1
        self._busy[self._next] = place
        return self._next, addrs

    def end(self, number: int) -> None:
        """The question has been answered."""
        del self._busy[number]

    def _crowd(self, now: float, names: tuple[str, PeerId, str]) -> str:
        """Why this is one question too many; "" when it is not."""
        if len(self._busy) >= limits.AUTONAT_AT_ONCE:
            return "too many questions at once"
        if list(self._busy.values()).count(names[-1]) >= limits.AUTONAT_AT_ONCE_PER_IP:
            return "too many questions at once from your address"
        over = self._quota.exceeded(now, names)
        return "" if over is None else _TOO_OFTEN[over]

    def check(self) -> None:
        """Invariants, for tests."""
        assert len(self._busy) <= limits.AUTONAT_AT_ONCE
        assert len(self._quota) <= 1 + 2 * limits.AUTONAT_PER_MINUTE


def _allowed(asker: Asker, raw: Iterable[bytes]) -> list[Multiaddr]:
    """The addresses it names that lie where it is."""
    found: list[Multiaddr] = []
    for each in raw:
        try:
            found.append(split_peer(decode_addr(each))[0])
        except ProtocolViolation:
            continue  # a kind of address that is not known here
    ip = ip_of(asker.remote)
    good = [addr for addr in found if ip_of(addr) == ip and (place := tcp_place(addr)) is not None and place.port != 0]
    return list(dict.fromkeys(good))[: limits.AUTONAT_DIALS]
