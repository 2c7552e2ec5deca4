"""One iterative look-up toward a key: whom to ask next, when to stop, and why. No network, no records, no clock.

The idea is that of rust-libp2p's closest-peers iterator: the candidates in order of distance, each in one of five
states. A peer that does not answer within `slow_s` no longer holds up the search but may still answer; after
`silent_s` it has failed. A plain search ends when the `want` nearest candidates that are not slow or failed have
answered. A search for values says `found` when an answer held some; then `enough` answers from the nearest suffice.

Invariants: never more than `parallel` peers are waited for, until the nearest have answered and nothing nearer
turned up: then the rest of the `want` are asked at once. Every look-up ends, whatever peers do: at most `max_asked`
are asked, each is waited for at most `silent_s`, and at most `keep` candidates are remembered (the nearest).
A hostile peer may name peers that do not exist: it costs their time-outs, and never more than `max_asked` of them.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from peerd.core.ids import PeerId
from peerd.machine.table import Contact


class State(enum.Enum):
    NEW = "new"  # heard of, not asked
    WAITING = "waiting"
    SLOW = "slow"  # asked, silent for `slow_s`; may still answer
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRule:
    """When to ask and when to stop."""

    want: int = 8  # nearest peers whose answers end the search
    enough: int = 3  # nearest answers that do once something was found; also what counts as having come near
    parallel: int = 4  # peers waited for at once while coming nearer
    slow_s: float = 1.0
    silent_s: float = 5.0
    max_asked: int = 64
    keep: int = 128


@dataclass(slots=True, order=True)
class _Candidate:
    distance: int
    contact: Contact = field(compare=False)
    state: State = field(default=State.NEW, compare=False)
    asked_at: float = field(default=0.0, compare=False)


class Lookup:
    """The search toward `target` that begins with the contacts in `seeds`. `own`, if given, has answered already."""

    def __init__(self, target: int, seeds: Iterable[Contact], rule: LookupRule, own: Contact | None = None) -> None:
        self.target = target
        self.why: str | None = None  # the reason why it ended
        self.found = False  # set by the owner when somebody held what is sought
        self.asked = 0
        self._rule = rule
        self._sorted: list[_Candidate] = []  # nearest first
        self._of: dict[PeerId, _Candidate] = {}
        if own is not None:
            self._add(own, State.ANSWERED)
        self.learn(seeds)

    def next(self, now: float) -> list[Contact]:
        """Whom to ask now; an empty list means wait, or look at `why`."""
        if self.why is not None:
            return []
        self._age(now)
        usable = [c for c in self._sorted if c.state not in (State.SLOW, State.FAILED)]
        if self.found and self._nearest_answers(usable) >= self._rule.enough:
            self.why = f"the nearest {self._rule.enough} peers have answered"
            return []
        window = usable[: self._rule.enough if self.found else self._rule.want]
        fresh = [c for c in window if c.state is State.NEW]
        if not fresh and not any(c.state is State.WAITING for c in window):
            self._end(len(window))
            return []
        chosen = fresh[: max(0, self._room(usable))]
        if fresh and not chosen and self.asked >= self._rule.max_asked and not self._count(State.WAITING):
            self.why = f"{self.asked} peers were asked, more than it should take"
        for candidate in chosen:
            candidate.state, candidate.asked_at = State.WAITING, now
        self.asked += len(chosen)
        return [candidate.contact for candidate in chosen]

    def answered(self, peer: PeerId, nearer: Iterable[Contact]) -> None:
        """The peer answered, and named others."""
        candidate = self._of.get(peer)
        if candidate is not None and candidate.state is not State.NEW:
            candidate.state = State.ANSWERED
        self.learn(nearer)

    def failed(self, peer: PeerId) -> None:
        """The peer cannot be reached, has gone, or lied."""
        candidate = self._of.get(peer)
        if candidate is not None:
            candidate.state = State.FAILED

    def postponed(self, peer: PeerId) -> None:
        """The peer answered, but had no room for this key in its answer: it may be asked again."""
        candidate = self._of.get(peer)
        if candidate is not None and candidate.state in (State.WAITING, State.SLOW):
            candidate.state = State.NEW
            self.asked -= 1  # its owner sees to it that such an answer always settles another key

    def learn(self, contacts: Iterable[Contact]) -> None:
        """Further candidates; those known already change nothing."""
        for contact in contacts:
            if contact.peer not in self._of:
                self._add(contact, State.NEW)

    def wake_at(self) -> float | None:
        """When `next` should be called though nobody answered; None when it has ended or waits for nobody."""
        if self.why is not None:
            return None
        return min((due for c in self._sorted if (due := self._due(c)) is not None), default=None)

    def nearest(self, count: int) -> list[Contact]:
        """The nearest candidates that may be alive, nearest first."""
        alive = (c.contact for c in self._sorted if c.state not in (State.SLOW, State.FAILED))
        return [contact for contact, _ in zip(alive, range(count), strict=False)]

    def states(self) -> dict[PeerId, State]:
        """Every candidate's state, nearest first."""
        return {candidate.contact.peer: candidate.state for candidate in self._sorted}

    def _add(self, contact: Contact, state: State) -> None:
        candidate = _Candidate(contact.place ^ self.target, contact, state)
        insort(self._sorted, candidate)
        self._of[contact.peer] = candidate
        if len(self._sorted) > self._rule.keep:
            farthest = next((c for c in reversed(self._sorted) if c.state is State.NEW), None)
            if farthest is not None:
                self._sorted.remove(farthest)
                del self._of[farthest.contact.peer]

    def _nearest_answers(self, usable: list[_Candidate]) -> int:
        """Answers that are nearer than every candidate not asked yet, among those who should hold records."""
        answers = 0
        for candidate in usable[: self._rule.want]:
            if candidate.state is State.NEW:
                break
            answers += candidate.state is State.ANSWERED
        return answers

    def _room(self, usable: list[_Candidate]) -> int:
        nearest = usable[: self._rule.enough]
        near = len(nearest) == self._rule.enough and all(c.state is State.ANSWERED for c in nearest)
        limit = max(self._rule.want, self._rule.parallel) if near else self._rule.parallel
        return min(limit - self._count(State.WAITING), self._rule.max_asked - self.asked)

    def _end(self, answers: int) -> None:
        """Nobody is left to ask; but if too few have answered, slow peers may still help."""
        if answers < self._rule.enough and self._count(State.SLOW):
            return
        if answers == 0:
            self.why = "no other peer is known" if not self.asked else "none of the known peers answered"
        elif answers >= self._rule.want:
            self.why = f"the nearest {self._rule.want} peers have answered"
        else:
            self.why = "all known peers have answered or failed"

    def _age(self, now: float) -> None:
        for candidate in self._sorted:
            due = self._due(candidate)
            while due is not None and now >= due:
                candidate.state = State.SLOW if candidate.state is State.WAITING else State.FAILED
                due = self._due(candidate)

    def _due(self, candidate: _Candidate) -> float | None:
        if candidate.state is State.WAITING:
            return candidate.asked_at + self._rule.slow_s
        return candidate.asked_at + self._rule.silent_s if candidate.state is State.SLOW else None

    def _count(self, state: State) -> int:
        return sum(candidate.state is state for candidate in self._sorted)
