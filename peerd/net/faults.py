"""Faults of ours: errors that nobody foresaw, contained where strangers come in, logged with their place, and counted.

A supervisor stands around one link, one stream, one call, one connection that comes in or goes out; whatever raises in
there ends that alone. What a peer or the network does is a RemoteError and none of this. `peerd status` shows the
counts: any fault is worth a report.
Invariants: Cancelled and whatever else is no Exception passes, out of groups, too; places are bounded, and so is the
log: a fault that somebody provokes again and again is told at its first, second, fourth, eighth... time.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peerd.core.limits import FAULT_CHARS, FAULT_PLACES

_log = logging.getLogger("peerd.net")
_HOME: Final = Path(__file__).resolve().parent.parent.parent  # where the folders `peerd` and `roles` lie
_OURS: Final = (str(_HOME / "peerd"), str(_HOME / "roles"))
_ELSEWHERE: Final = "elsewhere"  # counts what comes from further places, once there are too many


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults at one place: their number, what the last one ended, and its error in words."""

    count: int
    where: str
    error: str


class _Guard:
    """Notes what is raised inside, and lets it go no further."""

    __slots__ = ("_faults", "_where")

    def __init__(self, faults: Faults, where: str) -> None:
        self._faults, self._where = faults, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):  # a group with Cancelled in it is none
            return False
        self._faults.note(self._where, error)
        return True


class Faults:
    """All faults of one process, by the file and line that raised."""

    def __init__(self) -> None:
        self.places: dict[str, Fault] = {}
        self.last = ""  # the place of the last one

    @property
    def total(self) -> int:
        return sum(fault.count for fault in self.places.values())

    def note(self, where: str, error: BaseException) -> None:
        """Log and count: `error` has ended `where`, a link, a stream, a call, a role."""
        for each in _leaves(error):
            place = place_of(each)
            if place not in self.places and len(self.places) >= FAULT_PLACES:
                place = _ELSEWHERE
            count = self.places[place].count + 1 if place in self.places else 1
            self.last = place
            self.places[place] = Fault(count, where[:FAULT_CHARS], f"{type(each).__name__}: {each}"[:FAULT_CHARS])
            if count & (count - 1) == 0:
                times = f" ({count} times by now)" if count > 1 else ""
                _log.error("%s failed by a fault of ours at %s%s", where, place, times, exc_info=each)

    def guard(self, where: str) -> _Guard:
        """As `contain`, for what is called in somebody else's task: `with faults.guard("..."): told(peer)`."""
        return _Guard(self, where)

    async def contain(self, work: Callable[[], Awaitable[object]], about: Callable[[], str]) -> bool:
        """Run `work`: what it raises is noted, with `about()`, and goes no further. True: it returned."""
        fine = True
        try:
            await work()
        except* Exception as group:  # of a group with Cancelled in it that part goes on
            fine = False
            self.note(about(), group)
        return fine


def _leaves(error: BaseException) -> Iterator[Exception]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif isinstance(error, Exception):
        yield error


def first_of(error: BaseException) -> BaseException:
    """The first error of a group of groups."""
    return next(_leaves(error), error)


def place_of(error: BaseException) -> str:
    """File and line of the innermost frame of ours; of the innermost of all, where none is."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return _ELSEWHERE
    file, line = next((one for one in reversed(frames) if one[0].startswith(_OURS)), frames[-1])
    return f"{Path(file).relative_to(_HOME) if Path(file).is_relative_to(_HOME) else Path(file).name}:{line}"
