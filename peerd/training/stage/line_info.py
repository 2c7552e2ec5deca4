"""Line information that a peer declares, for the conductor to divide averaging by."""

from __future__ import annotations

from typing import Final, Literal

from peerd.core.messages.swarm import LineInfo
from peerd.service.run_services import Carries

_NOTHING_BYTES_PER_S: Final = 1.0  # 0 would be unknown


def own_line(
    carries: Carries, mode: Literal["node", "aux"], elements: int = 0, dtype: str = "", further: int = 0
) -> LineInfo:
    """The line by its limits, else as measured; `elements` and `dtype` of the vector that the peer brings to a round.

    A peer that can only dial sums nothing: a member becomes a client, and a helper is left out of every round.
    """
    up, down = carries.up_bytes_per_s, carries.down_bytes_per_s
    if mode == "aux" and not carries.takes_inbound:
        return LineInfo(mode, _NOTHING_BYTES_PER_S, _NOTHING_BYTES_PER_S)
    return LineInfo(
        mode="client" if not carries.takes_inbound else mode,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        elements=elements,
        dtype=dtype,
        further=further,
        up_measured=carries.up_measured,
        down_measured=carries.down_measured,
    )
