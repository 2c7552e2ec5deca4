"""The parsers of messages about the network itself, for the table in `tests.fuzz.parsers`."""

from __future__ import annotations

from peerd.core.addr import parse_addr
from peerd.core.protobuf.autonat import Dialed, DialMe, DialStatus
from tests.fuzz.parsers import ADDRS, KEYS, PARSERS, Corpus, parser

__all__ = ["PARSERS"]


def _autonat_messages() -> Corpus:
    addrs = tuple(parse_addr(addr).to_bytes() for addr in ADDRS)
    asked = DialMe(peer=KEYS.peer_id, addrs=addrs)
    return [asked.encode(), Dialed(status=DialStatus.DIAL_ERROR, text="no").encode()]


@parser("autonat", _autonat_messages)
def _autonat(data: bytes) -> None:
    kind = DialMe if data[:2] == b"\x08\x00" else Dialed
    assert kind.decode(kind.decode(data).encode()) == kind.decode(data)
