"""Timeouts of a link, and the settings of its muxer."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.wire.yamux.stream import YamuxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Timeouts of a link, in seconds, and its muxer's settings."""

    yamux: YamuxConfig = field(default_factory=YamuxConfig)
    negotiate_s: float = 10.0  # until an incoming stream without a protocol is reset
    linger_s: float = 1.0  # from our go-away until the connection is closed, if the peer does not close it
    leave_s: float = 10.0  # from the peer's go-away until open streams are ended
    stall_s: float = 60.0  # until a send that makes no progress ends the link
