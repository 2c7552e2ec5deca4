"""Parts of a DHT command: searches for keys, placements of records, and tasks that combine both.

Each part returns which peer to ask next and receives the answers; `Kademlia` combines requests to the same peer into
one message. Nothing here sends, stores or verifies; no part outlives its task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_ANSWERS_KEPT, DHT_BYTES_PER_KEY
from peerd.core.record import Record
from peerd.dht.node.lookup import Lookup
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict, answer_bytes


class KeySearch:
    """One lookup towards `key`; with `values` it also collects the records that peers hold under it.

    `max_age_s`: greatest acceptable age of cached copies. Each answer may contain up to `most_bytes` of records (0: no
    limit). Of all answers together at most `DHT_ANSWERS_KEPT` times that much is kept, first come, first kept.
    """

    def __init__(
        self,
        key: Key,
        lookup: Lookup,
        *,
        values: bool,
        held: Iterable[Record] = (),
        had: Iterable[Record] = (),
        most_bytes: int = 0,
        max_age_s: int = 0,
    ) -> None:
        """`held`: our stored records under the key. `had`: known records, which count once a peer reports them."""
        self.key = key
        self.values = values
        self.lookup = lookup
        self.most_bytes = most_bytes
        self.max_age_s = max_age_s
        self.answer_bytes = most_bytes or DHT_BYTES_PER_KEY  # most bytes of records in one answer
        self.has = {record.tag: record for record in had}
        self._left = DHT_ANSWERS_KEPT * self.answer_bytes
        self._best: dict[bytes, Record] = {}
        self._answers: dict[Contact, dict[bytes, Record]] = {}  # by answerer
        self._gather(held)

    @property
    def done(self) -> bool:
        return self.lookup.why is not None

    @property
    def was_answered(self) -> bool:
        """True if a peer other than ourselves answered."""
        return bool(self._answers)

    def next(self, now: float) -> list[Contact]:
        return self.lookup.next(now)

    def wake_at(self) -> float | None:
        return self.lookup.wake_at()

    def answered(self, contact: Contact, nearer: Iterable[Contact], records: Sequence[Record]) -> None:
        """Record an answer; `records` are verified and of this key."""
        self.lookup.answered(contact.peer, nearer, holds=bool(records))
        self._answers[contact] = {record.sub_key: record for record in records}
        self._gather(records)

    def failed(self, peer: PeerId) -> None:
        self.lookup.failed(peer)

    def live(self, wall: float, own: Iterable[Record] = ()) -> list[Record]:
        """The valid records, one per sub-key and in their order; `own` records may supersede collected ones."""
        self._gather(own, ours=True)
        return [r for _, r in sorted(self._best.items()) if r.is_live(wall) and not r.tombstone]

    def lacking(self, wall: float) -> tuple[Contact, list[Record]] | None:
        """The nearest peer whose answer lacked the best version of some records, and those records, or None.

        Records that did not fit into the peer's answer do not count as lacking.
        """
        for contact in sorted(self._answers, key=lambda contact: contact.place ^ self.lookup.target):
            had = self._answers[contact]
            room = self.answer_bytes - sum(map(answer_bytes, had.values()))
            missing = [
                r
                for sub_key, r in self._best.items()
                if had.get(sub_key) != r and r.is_live(wall)
                if not self.most_bytes or sub_key in had or answer_bytes(r) <= room
            ]
            if missing:
                return contact, missing
        return None

    def _gather(self, records: Iterable[Record], *, ours: bool = False) -> None:
        for record in records:
            best = self._best.get(record.sub_key)
            if best is not None and not record.beats(best):
                continue
            size = answer_bytes(record) - (answer_bytes(best) if best is not None else 0)
            if ours or size <= self._left:
                self._best[record.sub_key] = record
                self._left -= size


class Placement:
    """One record being stored on the `copies` nearest peers of `contacts`; others replace peers that fail or are slow.

    A peer is slow after `patience_s`. The placement is done when enough peers store the record or none is left to ask;
    a slow peer delays it only while no peer at all has stored the record. `held`: copies that exist already (ours).
    """

    def __init__(
        self,
        record: Record,
        contacts: Sequence[Contact],
        copies: int,
        *,
        patience_s: Callable[[PeerId], float],
        held: int = 0,
    ) -> None:
        self.record = record
        self.holders = held
        self.refusals: list[Verdict] = []
        self.newest = 0  # the latest version with which a peer refused ours as stale
        self._fresh = list(contacts)
        self._copies = copies
        self._patience_s = patience_s
        self._waiting: dict[PeerId, float] = {}  # by peer, when it becomes slow
        self._slow: set[PeerId] = set()

    @property
    def done(self) -> bool:
        if self.holders >= self._copies:
            return True
        return not self._fresh and not self._waiting and (self.holders > 0 or not self._slow)

    def next(self, now: float) -> list[Contact]:
        for peer, slow_at in list(self._waiting.items()):
            if now >= slow_at:
                del self._waiting[peer]
                self._slow.add(peer)
        room = max(0, self._copies - self.holders - len(self._waiting))
        chosen, self._fresh = self._fresh[:room], self._fresh[room:]
        self._waiting.update((contact.peer, now + self._patience_s(contact.peer)) for contact in chosen)
        return chosen

    def wake_at(self) -> float | None:
        return min(self._waiting.values()) if self._waiting and not self.done else None

    def answered(self, peer: PeerId, verdict: Verdict, version: int) -> None:
        if not self._settle(peer):
            return
        if verdict is Verdict.STORED:
            self.holders += 1
            return
        self.refusals.append(verdict)
        if verdict is Verdict.STALE:
            self.newest = max(self.newest, version)

    def failed(self, peer: PeerId) -> None:
        self._settle(peer)

    def _settle(self, peer: PeerId) -> bool:
        known = peer in self._waiting or peer in self._slow
        self._waiting.pop(peer, None)
        self._slow.discard(peer)
        return known


Part = KeySearch | Placement


@dataclass(slots=True)
class Task:
    """Searches and the placements that follow from them. `op` is None if nobody waits for the result."""

    op: int | None
    kind: str  # "get", "copy", "put", "join", "refresh"
    searches: list[KeySearch] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    then: Callable[[KeySearch], list[Placement]] | None = None  # returns the placements after a finished search
    attempt: int = 1
    _pending: list[KeySearch] = field(init=False)  # searches whose placements have not been created yet

    _going: list[KeySearch] = field(init=False)  # searches that have not ended
    _hurried: bool = False

    def __post_init__(self) -> None:
        self._going = list(self.searches)
        self._pending = list(self.searches) if self.then is not None else []

    @property
    def done(self) -> bool:
        return not self._pending and all(part.done for part in self.parts())

    def parts(self) -> list[KeySearch | Placement]:
        return [*self.searches, *self.placements]

    def next(self, now: float, touched: Collection[int] | None = None) -> list[tuple[Contact, Part]]:
        """Peers to ask now, each with the part that asks.

        `touched`: ids of the searches with new answers; None checks all, because time has passed.
        """
        searches = self._going if touched is None else [s for s in self._going if id(s) in touched]
        wants: list[tuple[Contact, Part]] = [(c, search) for search in searches for c in search.next(now)]
        if any(search.done for search in searches):
            self._going = [search for search in self._going if not search.done]
            if self._hurry():
                wants += [(c, search) for search in self._going for c in search.next(now)]
        for search in [search for search in self._pending if search.done]:
            self._pending.remove(search)
            self.placements += self.then(search) if self.then is not None else []
        wants += [(c, placement) for placement in self.placements for c in placement.next(now)]
        return wants

    def _hurry(self) -> bool:
        """Let the last of many searches ask more peers at once, because the task waits for them.

        Returns True when they begin to hurry.
        """
        if self._hurried or not self._going or 2 * len(self._going) > len(self.searches):
            return False
        self._hurried = True
        for search in self._going:
            search.lookup.hurried = True
        return True

    def wake_at(self) -> float | None:
        """Time at which to call `next` even without an answer, or None if only answers matter."""
        parts: list[Part] = [*self._going, *self.placements]
        return min((at for part in parts if (at := part.wake_at()) is not None), default=None)
