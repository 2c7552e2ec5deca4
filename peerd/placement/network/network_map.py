"""The conductor's map of the network: delays and rates of pairs of peers, as both ends of each pair measured them.

If the two ends of a pair report different figures, the higher delay and the lower rate count. So a peer can make its
own pairs look worse, but never better than the other end reports, and it cannot affect other pairs. If only one end has
a figure, that one counts. A limit of a pair (for the division of averaging) counts only if both ends report that the
pair, and not their own internet connection, determined the rate; its value is then the higher of their rates. One end
alone cannot know whether the other one was busy, and a liar that reports limits between itself and all others changes
nothing.

Figures settle and fade: a figure that was not reported again for FADE_S is unknown, and its pair is a gap
for `landmarks`. Sans-IO. Bounded in total and per reporting peer; when the map is full, the peer with most figures
loses its oldest one, so that a stranger cannot displace others. Hostile input: any figures about any names from any
authorized reporter; the driver checks who may report and which names exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from peerd.core.limits import NETWORK_FIGURES, NETWORK_PEERS
from peerd.messages.network import PairFigures

FADE_S: Final = 1200.0  # four times the interval between two reports of one pair
RATE_FADE_S: Final = 3600.0  # age at which a rate fades; longer, because measuring one needs a transfer
_SWEEP_S: Final = 60.0

SETTLE_S: Final = 40.0  # time constant: after it the value has covered 63 % of the change, by ratio
STEP: Final = 1.2  # least ratio by which the shown value changes


@dataclass(frozen=True, slots=True)
class PairView:
    """The combined figures of one pair; None if not measured. Rates in bytes/s, one per direction."""

    rtt_s: float | None = None
    there: float | None = None
    back: float | None = None
    age_s: float = 0.0  # of the oldest of these figures


NOTHING: Final = PairView()


class _Told:
    """The figures of one reporting peer about its pair with one other peer."""

    __slots__ = ("at", "down", "down_limited", "rate_at", "rtt", "rtt_at", "up", "up_limited")

    def __init__(self) -> None:
        self.rtt: SettlingFigure | None = None
        self.up: SettlingFigure | None = None
        self.down: SettlingFigure | None = None
        self.at = self.rtt_at = self.rate_at = -math.inf
        self.up_limited = self.down_limited = False

    def take(self, now: float, said: PairFigures) -> None:
        self.at, self.up_limited, self.down_limited = now, said.up_limited, said.down_limited
        if said.rtt_s > 0:
            self.rtt, self.rtt_at = _settled(self.rtt, now, said.rtt_s), now - said.rtt_age_s
        self.up = _settled(self.up, now, said.up_bytes_per_s) if said.up_bytes_per_s > 0 else None
        self.down = _settled(self.down, now, said.down_bytes_per_s) if said.down_bytes_per_s > 0 else None
        if self.up is not None or self.down is not None:
            self.rate_at = now - said.rate_age_s

    def fades(self, now: float) -> bool:
        return now - self.at > FADE_S

    def has_rates(self, now: float) -> bool:
        return now - self.rate_at <= RATE_FADE_S


def _settled(known: SettlingFigure | None, now: float, value: float) -> SettlingFigure:
    if known is None:
        return SettlingFigure(now, value)
    known.note(now, value)
    return known


class NetworkMap:
    """The map of all pairs. Peers are identified by name."""

    def __init__(self, most_figures: int = NETWORK_FIGURES) -> None:
        self._most = most_figures
        self._said: dict[str, dict[str, _Told]] = {}  # by reporter and other peer; oldest report first
        self._about: dict[str, dict[str, None]] = {}  # other peer -> its reporters
        self._sizes: dict[int, dict[str, None]] = {}  # number of figures -> reporters with that many
        self._count = 0
        self._swept_at = -math.inf

    def __len__(self) -> int:
        """Number of stored figures."""
        return self._count

    # --- reports ----------------------------------------------------------------------------------------------

    def take(self, now: float, teller: str, figures: Iterable[PairFigures]) -> None:
        """Store a report of `teller` about its own pairs."""
        self._sweep(now)
        for said in figures:
            if said.peer == teller:
                continue
            told = self._said.get(teller, {}).get(said.peer) or _Told()
            self._drop(teller, said.peer)  # so that it becomes the newest
            told.take(now, said)
            self._add(teller, said.peer, told)

    def _add(self, teller: str, other: str, told: _Told) -> None:
        mine = self._said.get(teller, {})
        if len(mine) >= NETWORK_PEERS:
            self._drop(teller, next(iter(mine)))
        elif self._count >= self._most:
            fullest = next(iter(self._sizes[max(self._sizes)]))
            self._drop(fullest, next(iter(self._said[fullest])))
        mine = self._said.setdefault(teller, {})
        self._resize(teller, len(mine), len(mine) + 1)
        mine[other] = told
        self._about.setdefault(other, {})[teller] = None
        self._count += 1

    def _drop(self, teller: str, other: str) -> None:
        mine = self._said.get(teller, {})
        if mine.pop(other, None) is None:
            return
        self._resize(teller, len(mine) + 1, len(mine))
        tellers = self._about[other]
        del tellers[teller]
        if not tellers:
            del self._about[other]
        if not mine:
            del self._said[teller]
        self._count -= 1

    def _resize(self, teller: str, before: int, after: int) -> None:
        if before:
            there = self._sizes[before]
            del there[teller]
            if not there:
                del self._sizes[before]
        if after:
            self._sizes.setdefault(after, {})[teller] = None

    def _sweep(self, now: float) -> None:
        """Drop faded figures, at most once per _SWEEP_S."""
        if now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        old = [
            (teller, other) for teller, mine in self._said.items() for other, told in mine.items() if told.fades(now)
        ]
        for teller, other in old:
            self._drop(teller, other)

    # --- views ------------------------------------------------------------------------------------------------

    def peers(self) -> list[str]:
        """All peers of pairs with a measured delay or rate, sorted."""
        return sorted(self._said.keys() | self._about.keys())

    def others(self, peer: str) -> list[str]:
        """Peers whose pair with `peer` has a measured delay or rate, sorted."""
        return sorted(self._said.get(peer, {}).keys() | self._about.get(peer, {}).keys())

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every pair with a measured delay or rate, once each, in the order of names."""
        for one in self.peers():
            yield from ((one, other) for other in self.others(one) if one < other)

    def view(self, now: float, one: str, other: str) -> PairView:
        """The combined figures of the pair of `one` and `other`."""
        mine, theirs = self._told(now, one, other), self._told(now, other, one)
        if mine is None and theirs is None:
            return NOTHING
        tells = [told for told in (mine, theirs) if told is not None]
        rtts = [told.rtt.read(now) for told in tells if told.rtt is not None]
        rating = [told for told in tells if told.has_rates(now)]
        there, back = self._rates(now, mine, theirs), self._rates(now, theirs, mine)
        ages = [now - told.rtt_at for told in tells if told.rtt is not None] if rtts else []
        ages += [now - told.rate_at for told in rating if there or back]
        return PairView(
            max(rtts, default=None), min(there, default=None), min(back, default=None), max(ages, default=0)
        )

    def _rates(self, now: float, sender: _Told | None, receiver: _Told | None) -> list[float]:
        """The rates of one direction, as reported by the sender and the receiver; up to two."""
        known = []
        if sender is not None and sender.up is not None and sender.has_rates(now):
            known.append(sender.up.read(now))
        if receiver is not None and receiver.down is not None and receiver.has_rates(now):
            known.append(receiver.down.read(now))
        return known

    def limits(self, now: float, teller: str) -> dict[tuple[str, str], float]:
        """Limits of the pairs of `teller`, in bytes/s by (from, to)."""
        found = {}
        for other in self.others(teller):
            for pair in ((teller, other), (other, teller)):
                limit = self.limit(now, *pair)
                if limit is not None:
                    found[pair] = limit
        return found

    def limit(self, now: float, source: str, target: str) -> float | None:
        """The limit of one direction of a pair, in bytes/s, if both ends report one, else None."""
        sender, receiver = self._told(now, source, target), self._told(now, target, source)
        if sender is None or receiver is None or not (sender.up_limited and receiver.down_limited):
            return None
        rates = self._rates(now, sender, receiver)
        return max(rates) if len(rates) == 2 else None

    def _told(self, now: float, teller: str, other: str) -> _Told | None:
        told = self._said.get(teller, {}).get(other)
        return None if told is None or told.fades(now) else told

    def check(self) -> None:
        """Raise AssertionError if the indexes disagree with the figures or a bound is exceeded."""
        told = {(teller, other) for teller, mine in self._said.items() for other in mine}
        assert told == {(teller, other) for other, tellers in self._about.items() for teller in tellers}
        assert len(told) == self._count <= self._most
        assert all(mine and len(mine) <= NETWORK_PEERS and teller not in mine for teller, mine in self._said.items())
        sizes = {(len(mine), teller) for teller, mine in self._said.items()}
        assert sizes == {(size, teller) for size, tellers in self._sizes.items() for teller in tellers}


class SettlingFigure:
    """A figure that settles: it approaches a new value within about a minute, and is shown in steps of a fifth.

    So a fluctuating measurement stays at an average, and small changes do not cause new plans. Sans-IO; values are
    positive.
    """

    __slots__ = ("_at", "_from", "_shown", "_to")

    def __init__(self, now: float, value: float) -> None:
        self._at, self._from, self._to, self._shown = now, value, value, value

    def note(self, now: float, value: float) -> None:
        """Record a new reported value."""
        self._from, self._at, self._to = self._value(now), now, value

    def _value(self, now: float) -> float:
        if self._from == self._to:
            return self._to
        part = -math.expm1(-max(0.0, now - self._at) / SETTLE_S)
        return math.exp(math.log(self._from) * (1 - part) + math.log(self._to) * part)

    def read(self, now: float) -> float:
        """The value to show now."""
        value = self._value(now)
        if not self._shown / STEP < value < self._shown * STEP:
            self._shown = value
        return self._shown
