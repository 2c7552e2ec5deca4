"""Faults: unexpected exceptions in peerd's own code, contained, logged with file and line, and counted.

A supervisor runs one link, one stream, one call, or one incoming or outgoing connection; an exception inside ends only
that. Errors caused by a peer or the network are RemoteErrors and are not faults. `peerd status` shows the counts; every
fault is worth a bug report. Invariants: Cancelled and other BaseExceptions pass through, also out of exception groups;
the number of counted places is bounded, and so is the log: a fault that recurs is logged at its first, second, fourth,
eighth... occurrence.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peerd.core.limits import FAULT_CHARS, FAULT_PLACES

_log = logging.getLogger("peerd.wire")
_HOME: Final = Path(__file__).resolve().parent.parent.parent  # contains the folders `peerd` and `roles`
_OURS: Final = (str(_HOME / "peerd"), str(_HOME / "roles"))
_ELSEWHERE: Final = "elsewhere"  # the common counter of further places, once there are too many


@dataclass(frozen=True, slots=True)
class Fault:
    """Exceptions raised at one line of code: their count, what the latest one ended (a link, a call), and its text."""

    count: int
    where: str
    error: str


class _Guard:
    """Context manager that records an exception raised inside, and suppresses it."""

    __slots__ = ("_faults", "_where")

    def __init__(self, faults: Faults, where: str) -> None:
        self._faults, self._where = faults, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):  # a group that contains Cancelled is not an Exception
            return False
        self._faults.note(self._where, error)
        return True


class Faults:
    """All faults of one process, by the file and line that raised."""

    def __init__(self) -> None:
        self.places: dict[str, Fault] = {}
        self.last = ""  # place of the last fault

    @property
    def total(self) -> int:
        return sum(fault.count for fault in self.places.values())

    def note(self, where: str, error: BaseException) -> None:
        """Log and count `error`, which has ended `where`: a link, a stream, a call or a role."""
        for each in _leaves(error):
            place = place_of(each)
            if place not in self.places and len(self.places) >= FAULT_PLACES:
                place = _ELSEWHERE
            count = self.places[place].count + 1 if place in self.places else 1
            self.last = place
            self.places[place] = Fault(count, where[:FAULT_CHARS], f"{type(each).__name__}: {each}"[:FAULT_CHARS])
            if count & (count - 1) == 0:
                times = f" ({count} times so far)" if count > 1 else ""
                _log.error("%s failed with an internal error at %s%s", where, place, times, exc_info=each)

    def guard(self, where: str) -> _Guard:
        """Like `contain`, for a callback inside another task: `with faults.guard("..."): callback(peer)`."""
        return _Guard(self, where)

    async def contain(self, work: Callable[[], Awaitable[object]], about: Callable[[], str]) -> bool:
        """Run `work`. An exception is recorded under the name `about()` and suppressed. True if `work` returned."""
        fine = True
        try:
            await work()
        except* Exception as group:  # Cancelled in a group is raised again
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
    """The first exception of nested exception groups."""
    return next(_leaves(error), error)


def place_of(error: BaseException) -> str:
    """File and line of the innermost frame in peerd's own code, or of the innermost frame if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return _ELSEWHERE
    file, line = next((one for one in reversed(frames) if one[0].startswith(_OURS)), frames[-1])
    return f"{Path(file).relative_to(_HOME) if Path(file).is_relative_to(_HOME) else Path(file).name}:{line}"
