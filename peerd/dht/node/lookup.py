"""One iterative lookup towards a key: which peers to ask next, when to stop, and why. No network, records or clock.

Based on rust-libp2p's closest-peers iterator: the candidates are ordered by distance, each in one of five states. A
peer that takes longer than usual for it no longer holds up the search but may still answer, and so does a peer that
`want` nearer candidates have overtaken; after `silent_s` it has failed. A plain search ends when the `want` nearest
candidates that are neither slow nor failed have answered. A search for values sets `found` when an answer contains
some. It then ends after `enough` such answers from the `want` nearest, or after `enough` answers from the very nearest.
With `anywhere`, for which cached copies are enough, answers with values count at any distance.

Among suitable candidates, those with the earliest expected answer are asked first. Each bit by which a candidate is
farther from the key than the key's possible holders counts as a fraction of a round trip; within that radius distance
does not count.

Invariants: at most `parallel` peers are waited for, until the nearest have answered and no nearer one turned up; then
the rest of the `want` are asked at once. Every lookup ends, even with liars: at most `max_asked` are asked, each is
waited for at most `silent_s`, and at most `keep` candidates are stored (the nearest). Hostile input: a peer may name
peers that do not exist, which costs their timeouts, of at most `max_asked` peers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from peerd.core.ids import PeerId
from peerd.dht.node.routing_table import Contact
from peerd.wire.rate.round_trips import RoundTrips


class State(enum.Enum):
    NEW = "new"  # known, not asked
    WAITING = "waiting"
    SLOW = "slow"  # asked, and silent for longer than usual, or overtaken; may still answer
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRule:
    """Parameters of a lookup: when to ask and when to stop."""

    want: int = 8  # nearest peers whose answers end the search
    enough: int = 3  # nearest answers that suffice once a value was found; also the test for being near the key
    spare: int = 0  # peers asked beyond `enough` once a value was found, because one may be slow
    parallel: int = 4  # peers waited for at once while approaching the key
    hurry: int = 2  # additional peers at once in a hurried lookup
    approach: int = 2  # replaces `parallel` while the nearest candidate is farther away than holders can be
    slow_s: float = 1.0  # patience with a peer if no round trips are known
    silent_s: float = 5.0
    doubt: int = 0  # answers required beyond `enough` per missing holder
    roots: int = 0  # initial peers that must have answered before a search ends without a value
    anywhere: bool = False  # answers with values count at any distance: cached copies are enough
    patient: bool = True  # wait for slow peers before reporting that nothing was found
    max_asked: int = 64
    keep: int = 128


@dataclass(frozen=True, slots=True)
class LookupGuide:
    """What a node knows for ordering candidates: round trips, and the probable distance of a key's holders."""

    round_trips: RoundTrips
    radius: int

    def way_s(self, distance: int) -> float:
        """Estimated time of the remaining hops from a peer at this distance."""
        return (distance // self.radius).bit_length() * self.round_trips.typical_s / _BITS_PER_HOP


@dataclass(slots=True, eq=False)
class _Candidate:
    distance: int
    contact: Contact
    state: State = State.NEW
    asked_at: float = 0.0
    slow_at: float = 0.0
    way_s: float = 0.0  # estimated time of the hops from it to the holders
    cost_s: float = 0.0  # estimated time of its answer and of the hops beyond it
    is_root: bool = False  # known from the beginning
    is_awaited: bool = False  # waited for even if nearer ones are known
    holds: bool = False  # its answer contained a value


@dataclass(slots=True)
class _View:
    """Summary for `next` of the nearest `want` candidates that are neither slow nor failed."""

    usable: int = 0  # number of these candidates
    answers: int = 0  # of them, answered and nearer than any that was not asked
    holders: int = 0  # of them (with `anywhere` of all), answered with a value
    pending: int = 0  # of them, waited for
    new: list[_Candidate] = field(default_factory=list)  # of them, not asked
    fresh: list[_Candidate] = field(default_factory=list)  # of the new ones, those that must be asked
    waiting: bool = False  # the answer of a candidate that must answer is missing
    unasked: bool = False  # a candidate that was not asked has been passed
    near: bool = False  # the nearest `enough` have all answered


_DISTANCE = attrgetter("distance")
_COST = attrgetter("cost_s")
_BITS_PER_HOP = 5.3  # distance that one answer gains: one bit, and log2(20) for the nearest of twenty peers


class Lookup:
    """The search towards `target`, starting with the contacts in `seeds`. `own`, if given, counts as answered."""

    def __init__(
        self,
        target: int,
        seeds: Iterable[Contact],
        rule: LookupRule,
        own: Contact | None = None,
        guide: LookupGuide | None = None,
    ) -> None:
        self.target = target
        self.why: str | None = None  # the reason why it ended
        self.found = False  # a value was found; the owner may set it as well
        self.hurried = False  # set by the owner if much depends on this lookup: it may ask more peers at once
        self.asked = 0
        self._rule = rule
        self._guide = guide
        self._answered = 0  # peers that answered, without ourselves
        self._holding = 0  # of these, those that answered with a value
        self._sorted: list[_Candidate] = []  # nearest first
        self._of: dict[bytes, _Candidate] = {}  # by raw peer id, which hashes fast
        self._waiting: list[_Candidate] = []  # in state WAITING, in the order of asking
        self._slow: list[_Candidate] = []  # in state SLOW, in the order of becoming slow
        if own is not None:
            self.learn([own])
            self._of[own.peer.raw].state = State.ANSWERED
        self.learn(seeds)
        for candidate in self._sorted:
            candidate.is_root = candidate.state is State.NEW

    def next(self, now: float) -> list[Contact]:
        """Peers to ask now. An empty list means wait, or that the lookup has ended (see `why`)."""
        if self.why is not None:
            return []
        self._age(now)
        view = self._look()
        if self.found and self._suffices(view):
            nearest = "nearest" if view.answers >= self._rule.enough else "near"
            self.why = f"the {nearest} {self._rule.enough} peers have answered"
            return []
        if not view.fresh and not view.waiting:
            view.fresh = self._further_roots()
        if not view.fresh and not view.waiting:
            self._end(view.usable)
            return []
        left = self._rule.max_asked - self.asked
        chosen = view.fresh[: max(0, min(self._room(view), left))]
        if not left and not self._waiting:
            self.why = f"{self.asked} peers were asked, the most allowed"
        for candidate in chosen:
            candidate.state, candidate.asked_at = State.WAITING, now
            candidate.slow_at = now + self._patience_s(candidate)
        self._waiting += chosen
        self.asked += len(chosen)
        return [candidate.contact for candidate in chosen]

    def answered(self, peer: PeerId, nearer: Iterable[Contact], *, holds: bool = False) -> None:
        """Record that the peer answered and named the contacts `nearer`. `holds`: its answer contained a value."""
        if self._settle(peer, State.ANSWERED):
            self._answered += 1
            self._of[peer.raw].holds = holds
            self._holding += holds
        self.found |= holds
        self.learn(nearer)

    def failed(self, peer: PeerId) -> None:
        """Record that the peer could not be reached, has left, or lied."""
        self._settle(peer, State.FAILED)

    def postponed(self, peer: PeerId) -> None:
        """Record that the peer answered but had no room for this key in its answer: it may be asked again."""
        if self._settle(peer, State.NEW):
            self.asked -= 1  # this cannot repeat forever: such an answer always contains at least one other key

    def learn(self, contacts: Iterable[Contact]) -> None:
        """Add candidates; known ones are ignored."""
        before = len(self._sorted)
        for contact in contacts:
            if contact.peer.raw not in self._of:
                candidate = _Candidate(contact.place ^ self.target, contact)
                if self._guide is not None:
                    candidate.way_s = self._guide.way_s(candidate.distance)
                    candidate.cost_s = candidate.way_s + self._guide.round_trips.expected_s(contact.peer)
                self._of[contact.peer.raw] = candidate
                self._sorted.append(candidate)
        if len(self._sorted) > before:
            self._sorted.sort(key=_DISTANCE)
            self._forget_farthest(len(self._sorted) - self._rule.keep)

    def wake_at(self) -> float | None:
        """Time at which to call `next` even without an answer, or None if the lookup has ended or waits for nobody."""
        if self.why is not None:
            return None
        times = [waiting.slow_at for waiting in self._waiting]
        times += [slow.asked_at + self._rule.silent_s for slow in self._slow]
        return min(times, default=None)

    def nearest(self, count: int) -> list[Contact]:
        """The nearest candidates that may be alive, nearest first."""
        alive = (c.contact for c in self._sorted if c.state not in (State.SLOW, State.FAILED))
        return [contact for contact, _ in zip(alive, range(count), strict=False)]

    def states(self) -> dict[PeerId, State]:
        """Every candidate's state, nearest first."""
        return {candidate.contact.peer: candidate.state for candidate in self._sorted}

    def _forget_farthest(self, surplus: int) -> None:
        """Drop up to `surplus` candidates that were not asked, the farthest first."""
        for index in reversed(range(len(self._sorted))):
            if surplus <= 0:
                return
            if self._sorted[index].state is State.NEW:
                del self._of[self._sorted.pop(index).contact.peer.raw]
                surplus -= 1

    def _settle(self, peer: PeerId, state: State) -> bool:
        """Set the final state of a peer that was asked. Returns False if it was not asked or was settled before."""
        candidate = self._of.get(peer.raw)
        if candidate is None or candidate.state not in (State.WAITING, State.SLOW):
            return False
        (self._waiting if candidate.state is State.WAITING else self._slow).remove(candidate)
        candidate.state = state
        return True

    def _suffices(self, view: _View) -> bool:
        """Return True if the values found suffice.

        The fewer answers contain values, the more answers are required: a peer may hold worthless records in order to
        end the search before it reaches the peers with others' records.
        """
        enough = self._rule.enough
        return view.holders >= enough or view.answers >= enough + self._rule.doubt * (enough - view.holders)

    def _further_roots(self) -> list[_Candidate]:
        """Initial candidates that must still be asked before a search ends without a value.

        All other candidates may have been named by liars that name each other.
        """
        if self.found:
            return []
        roots = [candidate for candidate in self._sorted if candidate.is_root]
        lacking = self._rule.roots - sum(candidate.state is State.ANSWERED for candidate in roots)
        further = [candidate for candidate in roots if candidate.state is State.NEW][: max(0, lacking)]
        for candidate in further:
            candidate.is_awaited = True
        return further

    def _room(self, view: _View) -> int:
        """Number of further peers that may be asked at once."""
        rule, extra = self._rule, self._rule.hurry if self.hurried else 0
        limit = rule.approach if self._is_far(view) else rule.parallel
        if view.near:
            limit = max(rule.want, rule.parallel)
        room = min(limit + extra, max(rule.want, rule.parallel)) - len(self._waiting)
        return min(room, self._lacking(view)) if self.found else room

    def _is_far(self, view: _View) -> bool:
        """Return True while even the nearest candidate is too far away to be a holder."""
        return self._guide is not None and bool(view.new) and view.new[0].distance > self._guide.radius

    def _lacking(self, view: _View) -> int:
        """Number of peers still to be asked so that `enough` holders answer even if some are slow."""
        spare = self._rule.spare + (self._rule.hurry if self.hurried else 0)
        return self._rule.enough + spare - view.holders - view.pending

    def _patience_s(self, candidate: _Candidate) -> float:
        if self._guide is None:
            return self._rule.slow_s
        return min(self._guide.round_trips.patience_s(candidate.contact.peer), self._rule.silent_s)

    def _look(self) -> _View:
        """Summarize the candidates that matter, in one pass; the rest of the list may be long."""
        view, enough, want = _View(), self._rule.enough, self._rule.want
        early = 0  # answers among the nearest `enough`
        for candidate in self._sorted:
            state = candidate.state
            if state is State.SLOW or state is State.FAILED:
                continue
            view.usable += 1
            if state is State.ANSWERED:
                early += view.usable <= enough
                view.answers += not view.unasked
                view.holders += candidate.holds
            elif state is State.NEW:
                view.unasked = True
                view.new.append(candidate)
            else:
                view.pending += 1
            if view.usable == want:
                break
        view.near = early == enough
        if self._rule.anywhere:
            view.holders = self._holding
        self._decide(view)
        return view

    def _decide(self, view: _View) -> None:
        """Choose the peers that must still answer: the `want` nearest, or after a find the missing number."""
        if view.pending < len(self._waiting) and view.usable == self._rule.want:
            self._overtake(self._waiting)
        view.waiting = view.pending > 0 or any(candidate.is_awaited for candidate in self._waiting)
        view.fresh = sorted(view.new, key=_COST)
        if self._guide is not None and view.fresh:
            # A candidate more than half a hop behind the best is asked only once the best has failed.
            best = min(candidate.way_s for candidate in (*view.fresh, *self._waiting))
            most = best + self._guide.round_trips.typical_s / 2
            view.fresh = [candidate for candidate in view.fresh if candidate.way_s <= most]
        if self.found:
            view.fresh = view.fresh[: max(0, self._lacking(view))]

    def _end(self, answers: int) -> None:
        """End the lookup because no candidate is left; but wait for slow peers if none or too few have answered."""
        wanting = self._rule.patient and not self.found and answers < self._rule.enough
        if self._slow and (wanting or not self._answered):
            return
        if answers == 0:
            self.why = "no other peer is known" if not self.asked else "none of the known peers answered"
        elif answers >= self._rule.want:
            self.why = f"the nearest {self._rule.want} peers have answered"
        else:
            self.why = "all known peers have answered or failed"

    def _overtake(self, waiting: list[_Candidate]) -> None:
        """Stop waiting for candidates beyond the `want` nearest."""
        usable = (c for c in self._sorted if c.state not in (State.SLOW, State.FAILED))
        within = {id(c) for c, _ in zip(usable, range(self._rule.want), strict=False)}
        for candidate in [c for c in waiting if not c.is_awaited and id(c) not in within]:
            self._slow_down(candidate)

    def _age(self, now: float) -> None:
        for candidate in [c for c in self._waiting if now >= c.slow_at]:
            self._slow_down(candidate)
        for candidate in [c for c in self._slow if now >= c.asked_at + self._rule.silent_s]:
            self._slow.remove(candidate)
            candidate.state = State.FAILED

    def _slow_down(self, candidate: _Candidate) -> None:
        self._waiting.remove(candidate)
        candidate.state = State.SLOW
        self._slow.append(candidate)
