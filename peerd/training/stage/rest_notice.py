"""RestNotice: the text by which a peer's user learns that it contributes no gradients for now, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.contributions import Rest
from peerd.core.run.runfile import BYTES_PER_MBIT
from peerd.service.run_services import Carries


@dataclass(frozen=True, slots=True)
class RestNotice:
    """The conductor's reason, and this peer's line as it is known here."""

    rest: Rest
    carries: Carries

    def text(self) -> str:
        """One sentence: why the peer rests, and what would change it."""
        rest = self.rest
        told = f"this peer rests: a step takes {_seconds(rest.without_s)} without its gradients"
        told += f", and would take {_seconds(rest.with_s)} with them"
        if not rest.needed_bytes_per_s:
            return f"{told}; its device computes too slowly to make up for that"
        line = self._line()
        now = f" (it carries {_mbit(line)})" if line else ""
        return f"{told}; it would contribute with a line of {_mbit(rest.needed_bytes_per_s)}{now}"

    def _line(self) -> float:
        """The narrower known direction of our line in bytes/s; 0: nothing is known."""
        known = [rate for rate in (self.carries.up_bytes_per_s, self.carries.down_bytes_per_s) if rate]
        return min(known, default=0.0)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s / BYTES_PER_MBIT:.3g} Mb/s"
