"""Rates of this peer's internet connection that the conductor and stage-mates use for planning."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.run.runfile import BYTES_PER_MBIT, RunFile
from peerd.wire.host.host import Host


@dataclass(frozen=True, slots=True)
class LineSpeeds:
    """Rates of this peer's internet connection in bytes/s: limits in the run file, else measured; 0 if unknown.

    `takes_inbound`: other peers can connect to this one.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    up_measured: bool
    down_measured: bool
    takes_inbound: bool


def line_speeds(run: RunFile, host: Host) -> LineSpeeds:
    """Rates of this peer's internet connection: limits of the run file, else measured rates."""
    limits, line = run.limits, host.line
    up, down = limits.upload_mbit * BYTES_PER_MBIT, limits.download_mbit * BYTES_PER_MBIT
    return LineSpeeds(
        up or line.up.told_bytes_per_s(),
        down or line.down.told_bytes_per_s(),
        up_measured=not up,
        down_measured=not down,
        takes_inbound=host.takes_inbound,
    )
