"""Times of a link, and the settings of its muxer."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.machine.mux.stream import YamuxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Times of a link, in seconds, and its muxer's settings."""

    yamux: YamuxConfig = field(default_factory=YamuxConfig)
    negotiate_s: float = 10.0  # an incoming stream names its protocol, or is reset
    linger_s: float = 1.0  # after a go-away: until the other side closes
    leave_s: float = 10.0  # after the peer's go-away: until open streams are cut
    stall_s: float = 60.0  # a send that the peer does not take
