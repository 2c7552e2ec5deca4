"""The Clock contract: every reading of time and every draw of randomness goes through it.

`now` never jumps; `wall` is Unix time corrected by the offset that peers agree on. Named random streams are
derived from (seed, purpose), so a run with the same seed makes the same choices. Key and nonce bytes come from
`secure_bytes`, which the simulator replaces. What peers tell each other is `uncorrected` time. Hours of the day, such
as `22:00-08:00`, know minutes of the day and nothing of dates or time zones: the caller reads the clock on the wall, so
they keep to what that shows when daylight saving time begins or ends.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

DAY_MINUTES: Final = 24 * 60
HOURS_WINDOWS: Final = 16  # of one day: more is a timetable
_WINDOW: Final = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; equals trio.current_time() inside a trio run."""
        ...

    def wall(self) -> float:
        """Corrected Unix seconds: for expiry of records only."""
        ...

    def secure_bytes(self, count: int) -> bytes:
        """Unpredictable bytes for keys and nonces."""
        ...

    def rng(self, purpose: str) -> random.Random:
        """A fresh random stream for this purpose; the same purpose gives the same stream."""
        ...


@runtime_checkable
class AdjustableClock(Protocol):
    """A clock whose wall time can be corrected, as `net.clock.RealClock`."""

    offset_s: float


def uncorrected(clock: Clock) -> float:
    """Unix seconds as this machine's own clock shows them, without the correction by peers."""
    offset_s: float = getattr(clock, "offset_s", 0.0)  # of an AdjustableClock; isinstance takes ten times as long
    return clock.wall() - offset_s


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows of the day as minutes from midnight; the end is not included, and lies before the begin over midnight."""

    windows: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Hours:
        """`22:00-08:00`, or several with commas; ValueError says what is wrong."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > HOURS_WINDOWS:
            raise ValueError(f"has {len(parts)} windows; allowed: up to {HOURS_WINDOWS}")
        return cls(tuple(_window(part) for part in parts))

    def open_at(self, minute: int) -> bool:
        """True when the minute of the day lies in a window."""
        return any(_within(minute, begin, end) for begin, end in self.windows)

    def opens_next(self, minute: int) -> int:
        """The first minute of the day, from `minute` on and over midnight, that lies in a window."""
        return min((begin for begin, _ in self.windows), key=lambda begin: (begin - minute) % DAY_MINUTES)


def clock_text(minute: int) -> str:
    """A minute of the day as clocks show it."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _window(text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(text)
    allowed = "allowed: HH:MM-HH:MM, such as 22:00-08:00, several with commas"
    if match is None:
        raise ValueError(f"has {text!r}, which is no window of the day; {allowed}")
    hour, minute, to_hour, to_minute = map(int, match.groups())
    begin, end = 60 * hour + minute, 60 * to_hour + to_minute
    if minute > 59 or to_minute > 59 or begin >= DAY_MINUTES or end > DAY_MINUTES:
        raise ValueError(f"has {text!r}, which no clock shows; {allowed}")
    if begin == end % DAY_MINUTES:
        raise ValueError(f"has {text!r}, which begins where it ends; without hours it is the whole day")
    return begin, end


def _within(minute: int, begin: int, end: int) -> bool:
    return begin <= minute < end if begin < end else minute >= begin or minute < end
