"""What a peer says of its own line, for the conductor to divide averaging by."""

from __future__ import annotations

from typing import Final, Literal

from peerd.core.runfile import LimitsSection
from peerd.core.training import LineInfo

_BYTES_PER_MBIT: Final = 125_000


def own_line(
    limits: LimitsSection, mode: Literal["node", "client", "aux"], elements: int = 0, dtype: str = "", further: int = 0
) -> LineInfo:
    """The line as this peer's limits have it (0: unknown); `elements` and `dtype` of what it brings to a round."""
    return LineInfo(
        mode=mode,
        up_bytes_per_s=limits.upload_mbit * _BYTES_PER_MBIT,
        down_bytes_per_s=limits.download_mbit * _BYTES_PER_MBIT,
        elements=elements,
        dtype=dtype,
        further=further,
    )
