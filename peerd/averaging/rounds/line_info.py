"""The network rates that a peer declares to the conductor, and a sentence for users whose connection is too slow."""

from __future__ import annotations

from typing import Final, Literal

from peerd.averaging.line_speeds import LineSpeeds
from peerd.messages.contributions import Rest
from peerd.messages.swarm import LineInfo
from peerd.run.runfile import BYTES_PER_MBIT

_NOTHING_BYTES_PER_S: Final = 1.0  # 0 would mean unknown


def own_line(
    carries: LineSpeeds, mode: Literal["node", "aux"], elements: int = 0, dtype: str = "", further: int = 0
) -> LineInfo:
    """The rates of this peer's connection: its limits, else measured rates. `elements`, `dtype`: the vector to average.

    A peer that can only dial does not sum for others: a member becomes a client, and a helper gets no share in any
    round.
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


def rest_text(rest: Rest, carries: LineSpeeds) -> str:
    """One sentence for the user: why this peer contributes no gradients, and which network rate would change that."""
    told = f"this peer rests: a step takes {_seconds(rest.without_s)} without its gradients"
    told += f", and would take {_seconds(rest.with_s)} with them"
    if not rest.needed_bytes_per_s:
        return f"{told}; its device computes too slowly to make up for that"
    known = [rate for rate in (carries.up_bytes_per_s, carries.down_bytes_per_s) if rate]
    now = f" (it carries {_mbit(min(known))})" if known else ""
    return f"{told}; it would contribute with a connection of {_mbit(rest.needed_bytes_per_s)}{now}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s / BYTES_PER_MBIT:.3g} Mb/s"
