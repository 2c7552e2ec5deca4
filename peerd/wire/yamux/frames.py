"""Yamux on the wire, and the events of a session: frame header, types, flags, codes.

Source: https://github.com/hashicorp/yamux/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from peerd.wire.yamux.stream import YamuxStream

PROTOCOL: Final = "/yamux/1.0.0"
DATA, WINDOW, PING, GO_AWAY = 0, 1, 2, 3
SYN, ACK, FIN, RST = 1, 2, 4, 8
GONE_NORMAL, GONE_PROTOCOL, GONE_INTERNAL = 0, 1, 2
HEADER: Final = struct.Struct(">BBHII")  # version, type, flags, stream id, length


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer opened this stream."""

    stream: YamuxStream


@dataclass(frozen=True, slots=True)
class Changed:
    """This stream received bytes, its end, or a reset."""

    stream: YamuxStream


@dataclass(frozen=True, slots=True)
class Pong:
    """A round trip was measured."""

    rtt_s: float


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The peer accepts no more streams and will leave; `code`: 0 normal, 1 our protocol violation, 2 its error."""

    code: int


@dataclass(frozen=True, slots=True)
class Dead:
    """The peer has been silent for `silent_s` seconds; the link counts as dead."""

    silent_s: float


Event = Opened | Changed | Pong | GoneAway | Dead
