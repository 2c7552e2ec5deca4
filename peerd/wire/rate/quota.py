"""Quota of actions that strangers may cause within a minute: per stranger, per target, and in total; and the limit of
log lines that they may cause.

Sans-IO. Only actions that are carried out count: refused requests leave no trace, so that a flood of requests cannot
displace the entries that bound earlier ones. Invariants: no bound is exceeded in any sixty seconds; older entries are
dropped, so the tables have at most as many entries as the total bound allows in a minute.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from peerd.core.bounded_dict import BoundedDict

K = TypeVar("K", bound=Hashable)

_MINUTE_S: Final = 60.0
_SUBJECTS: Final = 1024


class Quota:
    """Limits actions per minute by several keys at once, such as peer and network. An action must keep all limits.

    Each action has one key (`names`) per limit: for a limit per peer, the peer's id.
    """

    def __init__(self, *most: int) -> None:
        """`most`: for each limit, the number of actions allowed per minute and key."""
        self._most = most
        self._done: OrderedDict[tuple[int, Hashable], deque[float]] = OrderedDict()  # latest last

    def __len__(self) -> int:
        return len(self._done)

    def exceeded(self, now: float, names: Sequence[Hashable]) -> int | None:
        """Index of the first limit that is reached, or None. `names`: the key to check for each limit."""
        for number, (most, name) in enumerate(zip(self._most, names, strict=True)):
            times = self._done.get((number, name), deque())
            while times and times[0] <= now - _MINUTE_S:
                times.popleft()
            if len(times) >= most:
                return number
        return None

    def count(self, now: float, names: Sequence[Hashable]) -> None:
        """Count one action under these keys, one for each limit."""
        for key in enumerate(names):
            self._done.setdefault(key, deque()).append(now)
            self._done.move_to_end(key)
        while not (times := next(iter(self._done.values()))) or times[-1] <= now - _MINUTE_S:
            self._done.popitem(last=False)  # stops at the entry just counted, if not earlier

    def take_back(self, names: Sequence[Hashable]) -> None:
        """Remove the latest action counted under these keys, if it is still stored."""
        for key in enumerate(names):
            if times := self._done.get(key):
                times.pop()


class LogLimit(Generic[K]):
    """Limit of log lines about peers' faults, which they can repeat at will: one line per subject in `again_s` seconds.

    At most `subjects` are remembered, those logged latest.
    """

    def __init__(self, again_s: float, subjects: int = _SUBJECTS) -> None:
        self._again_s = again_s
        self._logged_at = BoundedDict[K, float](subjects)

    def may_log(self, now: float, subject: K) -> bool:
        """True if the subject was not logged lately; then it counts as logged now."""
        if now - self._logged_at.get(subject, -math.inf) < self._again_s:
            return False
        self._logged_at[subject] = now
        return True
