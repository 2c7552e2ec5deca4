"""The Clock interface, the only source of time and randomness; and `Hours`, windows of the day.

`now` is monotonic; `wall` is Unix time, corrected by the offset that peers agree on. Random streams are derived from
(seed, purpose), so a run with the same seed makes the same choices. Keys and nonces come from `secure_bytes`, which the
simulator replaces. Peers send each other `uncorrected` time.

`Hours` such as `22:00-08:00` work on minutes of the day and know no dates or time zones. The caller passes local time,
so the windows follow the local clock when daylight saving time begins or ends.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

DAY_MINUTES: Final = 24 * 60
HOURS_WINDOWS: Final = 16  # per day
_WINDOW: Final = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")


class Clock(Protocol):
    """Source of time and randomness."""

    def now(self) -> float:
        """Monotonic time in seconds; equals trio.current_time() inside a trio run."""
        ...

    def wall(self) -> float:
        """Corrected Unix time in seconds, used only for the expiry of records."""
        ...

    def secure_bytes(self, count: int) -> bytes:
        """Unpredictable bytes for keys and nonces."""
        ...

    def rng(self, purpose: str) -> random.Random:
        """A new random stream for this purpose; the same purpose always yields the same stream."""
        ...


@runtime_checkable
class AdjustableClock(Protocol):
    """A clock whose wall time can be corrected, such as `wire.clock.RealClock`."""

    offset_s: float


def uncorrected(clock: Clock) -> float:
    """Unix time in seconds by this machine's own clock, without the offset agreed with peers."""
    offset_s: float = getattr(clock, "offset_s", 0.0)  # of an AdjustableClock; isinstance is ten times slower
    return clock.wall() - offset_s


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows of the day, as (begin, end) in minutes from midnight. The end is exclusive; a window across midnight ends
    before it begins.
    """

    windows: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse `22:00-08:00`, or several windows separated by commas. Raises ValueError with the reason."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > HOURS_WINDOWS:
            raise ValueError(f"has {len(parts)} windows; allowed: up to {HOURS_WINDOWS}")
        return cls(tuple(_window(part) for part in parts))

    def open_at(self, minute: int) -> bool:
        """True if the minute of the day is inside a window."""
        return any(_within(minute, begin, end) for begin, end in self.windows)

    def opens_next(self, minute: int) -> int:
        """The minute of the day at which the next window begins, counted from `minute` on, across midnight."""
        return min((begin for begin, _ in self.windows), key=lambda begin: (begin - minute) % DAY_MINUTES)


def clock_text(minute: int) -> str:
    """A minute of the day as HH:MM."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _window(text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(text)
    allowed = "allowed: HH:MM-HH:MM, such as 22:00-08:00, several with commas"
    if match is None:
        raise ValueError(f"has {text!r}, which is not a window of the day; {allowed}")
    hour, minute, to_hour, to_minute = map(int, match.groups())
    begin, end = 60 * hour + minute, 60 * to_hour + to_minute
    if minute > 59 or to_minute > 59 or begin >= DAY_MINUTES or end > DAY_MINUTES:
        raise ValueError(f"has {text!r}, which is not a time of day; {allowed}")
    if begin == end % DAY_MINUTES:
        raise ValueError(f"has {text!r}, which begins where it ends; without hours it is the whole day")
    return begin, end


def _within(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin < end else minute >= begin or minute < end
