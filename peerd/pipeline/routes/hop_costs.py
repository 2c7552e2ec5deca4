"""Costs of hops as a trainer learns them from answers, sans-IO: seconds of computing, of waiting, and between peers.

An answer states for each hop how long it computed, waited, and awaited the next hop's answer. The part of a hop's time
that the next one does not account for was spent between the two: both directions, sizes over rates plus delays. Pairs
never measured, or long ago, are estimated by network coordinates, slightly too short, so that each promising pair is
tried once.

Claims are hostile input. The claims of a hop and all later ones must fit into the time measured by the previous hop,
and in the end by the trainer itself; the rest counts as time between the two, so a liar can only move its time to its
own paths. A peer's computing time is the median of what different preceding peers reported, the time between two peers
the median of the last measurements. A hop can attribute to later hops only as much time as these are known to take, so
a liar gains little by lying about others. If only one peer has reported about another one, the latter is not considered
slow. A peer counts as at most `_FASTEST` times as fast as the median of its stage.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.messages.handover import Hop
from peerd.pipeline.routes.coordinates import Coordinates
from peerd.pipeline.routes.priors import expected_s

_SMOOTHING: Final = 0.3
_TELLERS: Final = 8  # preceding peers whose reports about one peer's computing are kept
_FASTEST: Final = 8.0  # greatest speed that counts, as a multiple of the median
_TRUSTED: Final = 1.5  # most time attributed to later hops, as a multiple of what they are known to take
_PAIRS: Final = 8192
_LAST: Final = 3  # measurements of a pair whose median counts
_GUESSED: Final = 0.8  # fraction of the estimate by coordinates, so that each promising pair is tried once
_STALE_S: Final = 600.0  # age at which a measurement is tried again if it may have improved
_CACHED: Final = 16384  # most cached estimates
_REFRESHED_EVERY: Final = 8  # answers after which cached estimates are dropped

TRAINER: Final = ""  # name of the trainer itself


class _Known:
    """Reports about one peer: by preceding peer, seconds of computing and of waiting for other trainers' work."""

    def __init__(self) -> None:
        self._told = BoundedDict[str, tuple[float, float]](_TELLERS)
        self._count, self._at = 0, -math.inf
        self.service_s = self.waiting_s = 0.0  # the medians

    def note(self, before: str, service_s: float, wait_s: float, now: float) -> None:
        old_s = self._told.get(before, (0.0, wait_s))[1]
        self._told[before] = service_s, old_s + _SMOOTHING * (wait_s - old_s)
        self._count, self._at = self._count + 1, now
        self.service_s, self.waiting_s = map(statistics.median_low, zip(*self._told.values(), strict=True))

    def is_doubtful(self, now: float) -> bool:
        """Return True if only one peer has reported about it, and rarely, or if it was long ago: then it is retried."""
        one_alone = len(self._told) == 1 and TRAINER not in self._told and self._count < _TELLERS
        return one_alone or now - self._at >= _STALE_S


class _Pair:
    """Seconds between two peers, both directions together, for one microbatch alone."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_LAST)
        self.at = -math.inf

    def note(self, seconds: float, now: float) -> None:
        self._last.append(seconds)
        self.at = now

    @property
    def seconds(self) -> float:
        return statistics.median_low(self._last)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time charged to a hop, capped by the previous hop's own measurement."""

    peer: str
    service_s: float
    wait_s: float
    onward_s: float

    @property
    def whole_s(self) -> float:
        return self.service_s + self.wait_s + self.onward_s


class HopCosts:
    """The learned costs of all peers and pairs. Names are peer ids as text."""

    def __init__(self, rng: random.Random) -> None:
        self._known: dict[str, _Known] = {}
        self._pairs = BoundedDict[tuple[str, str], _Pair](_PAIRS)
        self._coordinates = Coordinates(rng)
        self._guesses: dict[str, dict[str, float | None]] = {}
        self._guessed, self._answers = 0, 0

    # --- what is known ----------------------------------------------------------------------------------------

    def services(self, names: Sequence[str], now: float, rates: Mapping[str, float]) -> list[float]:
        """Seconds that each of a stage's peers needs to compute a microbatch.

        Unmeasured peers get the expectation from their published `rates`, else the median; all are 0 if nothing is
        known.
        """
        found = [self._known.get(name) for name in names]
        told = {name: known.service_s for name, known in zip(names, found, strict=True) if known is not None}
        expected = {} if len(told) == len(names) else expected_s(told, {name: rates.get(name, 0.0) for name in names})
        middle = statistics.median_low((told or expected).values()) if told or expected else 0.0
        least = middle / _FASTEST
        return [
            expected.get(name, middle)
            if known is None
            else max(least, min(known.service_s, middle) if known.is_doubtful(now) else known.service_s)
            for name, known in zip(names, found, strict=True)
        ]

    def doubted_s(self, name: str, now: float) -> float | None:
        """Seconds to assume for a peer with too few measurements, infinity if it has none, or None if it has enough."""
        known = self._known.get(name)
        if known is None:
            return math.inf
        return known.service_s if known.is_doubtful(now) else None

    def waiting_s(self, name: str, now: float) -> float:
        """Seconds that microbatches wait at a peer for the work of other trainers."""
        known = self._known.get(name)
        return 0.0 if known is None or known.is_doubtful(now) else known.waiting_s

    def between(self, one: str, others: Sequence[str], now: float) -> list[float]:
        """Seconds between a peer and each of `others`, both directions together; unknown pairs count as the nearest."""
        row = self._guesses.get(one)
        if row is None:
            if self._guessed > _CACHED:
                self._forget_guesses()
            row = self._guesses[one] = {}
        for other in others:
            if other not in row:
                row[other] = self._guess(one, other, now)
                self._guessed += 1
        found = [row[other] for other in others]
        least_s = min((seconds for seconds in found if seconds is not None), default=0.0)
        return [least_s if seconds is None else seconds for seconds in found]

    def _guess(self, one: str, other: str, now: float) -> float | None:
        pair, far_s = self._pairs.get((one, other)), self._coordinates.between_s(one, other)
        if pair is not None and (far_s is None or now - pair.at < _STALE_S):
            return pair.seconds
        if far_s is None:
            return None
        return _GUESSED * far_s if pair is None else min(pair.seconds, _GUESSED * far_s)

    def _forget_guesses(self) -> None:
        self._guesses, self._guessed = {}, 0

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all peers not in `names`."""
        self._known = {name: known for name, known in self._known.items() if name in names}
        self._coordinates.keep_only(names)
        for pair in [pair for pair in self._pairs if not all(name in names or name == TRAINER for name in pair)]:
            del self._pairs[pair]
        self._forget_guesses()

    @property
    def remembered(self) -> int:
        """Number of peers and pairs with any measurement."""
        return len(self._known) + len(self._pairs)

    # --- learning from answers --------------------------------------------------------------------------------

    def answered(
        self,
        now: float,
        hops: Sequence[Hop],
        took_s: float,
        loads: Sequence[int],
        named: Sequence[str] | None = None,
        slowed: Sequence[float] | None = None,
    ) -> None:
        """Record an answer that took `took_s` seconds from the trainer through `hops` and back.

        `loads`: by hop, our other microbatches that were there. `named`: the peers that were to compute; if another
        peer did, the time before it was spent on finding out that the named one does not answer. `slowed`: by hop, the
        factor by which our other microbatches on the same path slowed the transfer to it.
        """
        spent = within(hops, took_s)
        slowed = slowed or [1.0] * len(spent)
        explained_s = [load * self._service_s(hop) for hop, load in zip(spent, loads, strict=True)]
        known_s = self._rest_s(spent, explained_s, slowed)
        before, outer_s = TRAINER, took_s
        names = named or [hop.peer for hop in spent]
        for hop, rest_s, name, times in zip(spent, known_s, names, slowed, strict=True):
            accounted_s = hop.whole_s if rest_s is None else min(hop.whole_s, _TRUSTED * rest_s)
            self._note_pair(before, name, (outer_s - accounted_s) / times, now, is_near=name == hop.peer)
            before, outer_s = hop.peer, hop.onward_s
        before = TRAINER
        for hop, explained in zip(spent, explained_s, strict=True):
            known = self._known.setdefault(hop.peer, _Known())
            known.note(before, hop.service_s, max(0.0, hop.wait_s - explained), now)
            before = hop.peer
        self._answers += 1
        if self._answers % _REFRESHED_EVERY == 0:
            self._forget_guesses()

    def _service_s(self, hop: Spent) -> float:
        known = self._known.get(hop.peer)
        return hop.service_s if known is None else known.service_s

    def _rest_s(
        self, spent: Sequence[Spent], explained_s: Sequence[float], slowed: Sequence[float]
    ) -> list[float | None]:
        """For each hop, how long it and the later hops are known to take, or None if one of them is unknown."""
        found: list[float | None] = []
        rest_s: float | None = 0.0
        after, times = "", 1.0
        for hop, explained, before_times in zip(reversed(spent), reversed(explained_s), reversed(slowed), strict=True):
            known, pair = self._known.get(hop.peer), self._pairs.get((hop.peer, after))
            if rest_s is None or known is None or (after and pair is None):
                rest_s = None
            else:
                on_way_s = times * pair.seconds if pair is not None else 0.0
                rest_s += known.service_s + known.waiting_s + explained + on_way_s
            found.append(rest_s)
            after, times = hop.peer, before_times
        return found[::-1]

    def _note_pair(self, one: str, other: str, seconds: float, now: float, *, is_near: bool) -> None:
        """Record the time of a pair. `is_near`: it measures the path itself, so it also updates the coordinates."""
        seconds = max(0.0, seconds)
        pair = self._pairs.get((one, other)) or _Pair()
        pair.note(seconds, now)
        self._pairs[one, other] = pair
        if one != TRAINER and is_near:
            self._coordinates.measured(one, other, seconds)


def within(hops: Sequence[Hop], took_s: float) -> list[Spent]:
    """The hops' claims, each capped by the previous hop's measurement."""
    found = []
    for hop in hops:
        service_s = min(hop.service_s, took_s)
        wait_s = min(hop.wait_s, took_s - service_s)
        took_s = min(hop.onward_s, took_s - service_s - wait_s)
        found.append(Spent(hop.peer, service_s, wait_s, took_s))
    return found
