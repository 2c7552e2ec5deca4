"""Quota of what strangers may have us do within a minute: by each of them, at each target, and in all.

Sans-IO. Only what is done is counted: whoever is refused leaves no trace, so that no flood of requests pushes out what
bounds those before it. Invariants: no bound is exceeded in any sixty seconds; nothing older than that is kept, so that
the tables hold at most as many entries as the bound of all together allows in a minute.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Final

_MINUTE_S: Final = 60.0


class Quota:
    """Several bounds that hold at once; each counts by a name of its own."""

    def __init__(self, *most: int) -> None:
        """`most`: of each bound, per minute and name."""
        self._most = most
        self._done: OrderedDict[tuple[int, Hashable], deque[float]] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._done)

    def exceeded(self, now: float, names: Sequence[Hashable]) -> int | None:
        """The number of the first bound that leaves no room; `names`: under which to look for each."""
        for number, (most, name) in enumerate(zip(self._most, names, strict=True)):
            times = self._done.get((number, name), deque())
            while times and times[0] <= now - _MINUTE_S:
                times.popleft()
            if len(times) >= most:
                return number
        return None

    def count(self, now: float, names: Sequence[Hashable]) -> None:
        """Count one more time."""
        for key in enumerate(names):
            self._done.setdefault(key, deque()).append(now)
            self._done.move_to_end(key)
        while not (times := next(iter(self._done.values()))) or times[-1] <= now - _MINUTE_S:
            self._done.popitem(last=False)  # ends at the latest with what was just counted

    def take_back(self, names: Sequence[Hashable]) -> None:
        """The latest time does not count after all; nothing happens if it is forgotten."""
        for key in enumerate(names):
            if times := self._done.get(key):
                times.pop()
