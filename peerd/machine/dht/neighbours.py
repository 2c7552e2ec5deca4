"""Neighbours of a DHT node: the table, suspicion, and what was learned along the way.

Peers enter the table when they themselves talked to us and say where they can be dialled; hearsay never enters it. A
peer that falls silent or closes its connection is out of consideration at once, and probed once its suspicion has
cooled; a second silence removes it. The removed ones are remembered, because when *our* line was down everybody seemed
to die, and somebody must be asked when it is back. Sends nothing: it says which peers to probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import Key, PeerId
from peerd.machine.dht.routing_table import Contact, Table
from peerd.machine.rate.liveness import Liveness

_SHUN_LIARS_S = 300.0
_FORMER = 64
_GREETED = 8192
_NEAR_KEYS = 1024
_LONELY = 4  # with fewer live neighbours than this, former ones are tried again
_PROBES = 3  # of one kind per round


@dataclass(frozen=True, slots=True)
class _Near:
    """The peers that a search found nearest to a key."""

    found_at: float
    contacts: tuple[Contact, ...]


class Neighbours:
    """The peers around `own`. Times are monotonic seconds."""

    def __init__(self, own: PeerId, table: Table, *, greet_again_s: float, near_s: float, stale_s: float) -> None:
        self.table = table
        self._own = own
        self._k = table.k
        self._greet_again_s = greet_again_s
        self._near_s = near_s
        self._stale_s = stale_s
        self._silence = Liveness()
        self._liars = Liveness()
        self._greeted = BoundedDict[PeerId, float](_GREETED)
        self._near = BoundedDict[Key, _Near](_NEAR_KEYS)
        self._former = BoundedDict[PeerId, Contact](_FORMER)
        self._resigned = BoundedDict[PeerId, None](_GREETED)  # cannot be dialed, as they say themselves
        self._given = BoundedDict[tuple[PeerId, Key], float](_NEAR_KEYS)

    def usable(self, now: float, peer: PeerId) -> bool:
        """True when this peer may be asked, and named to others."""
        return not (self._silence.shunned(now, peer) or self._liars.shunned(now, peer))

    def believed(self, now: float, contacts: Iterable[Contact]) -> list[Contact]:
        """Of peers that others name, those that we may ask: not ourselves, and none that we know to be silent."""
        others = [contact for contact in contacts if contact.peer.raw != self._own.raw]
        return others if self._calm else [contact for contact in others if self.usable(now, contact.peer)]

    def closest(self, now: float, target: int, count: int) -> list[Contact]:
        """Usable peers of the table, nearest to `target` first."""
        return self.table.closest(target, count, None if self._calm else lambda peer: self.usable(now, peer))

    def welcome(self, now: float, contact: Contact) -> tuple[bool, Contact | None]:
        """The peer itself talked to us and can be dialled. Returns whether it is newly seated, and the peer to
        probe.
        """
        self._silence.answered(contact.peer)
        self._resigned.pop(contact.peer, None)
        if self._liars.shunned(now, contact.peer):
            return False, None
        seated, oldest = self.table.add(now, contact)
        if seated:
            self._former.pop(contact.peer, None)
        if oldest is not None:
            seen = self.table.seen_at(oldest.peer)
            if seen is not None and now - seen < self._stale_s:
                oldest = None  # it was well a moment ago
        return seated, oldest

    def answered(self, now: float, peer: PeerId) -> None:
        """Note a sign of life."""
        self._silence.answered(peer)
        self.table.seen(now, peer)

    def silent(self, now: float, peer: PeerId) -> Contact | None:
        """Note that it did not answer. Returns a newcomer to probe when that cost it its seat."""
        if self._silence.silent(now, peer) < 2:
            return None
        return self._remove(peer)

    def lost(self, now: float, peer: PeerId) -> None:
        """Note that its connection closed: leave it alone until it was probed."""
        self._greeted.pop(peer, None)
        self._silence.silent(now, peer)

    def lied(self, now: float, peer: PeerId) -> Contact | None:
        """Note that it broke the protocol. Returns a newcomer to probe in its place."""
        self._liars.lied(now, peer, _SHUN_LIARS_S)
        newcomer = self._remove(peer)
        self._former.pop(peer, None)
        return newcomer

    def resigned(self, peer: PeerId) -> Contact | None:
        """Note its word that it cannot be dialed, or not any more. Returns a newcomer to probe in its place."""
        self._resigned[peer] = None
        newcomer = self._remove(peer)
        self._former.pop(peer, None)
        return newcomer

    def has_resigned(self, peer: PeerId) -> bool:
        """True when the peer itself said last that it resigns, whatever others still tell of it."""
        return peer in self._resigned

    def is_liar(self, now: float, peer: PeerId) -> bool:
        return self._liars.shunned(now, peer)

    def greets(self, now: float, peer: PeerId) -> bool:
        """True when the next message to `peer` should say who we are; notes that it does."""
        greeted = self._greeted.get(peer)
        if greeted is not None and now - greeted < self._greet_again_s:
            return False
        self._greeted[peer] = now
        return True

    def ungreeted(self, peer: PeerId) -> None:
        """Note that the greeting did not arrive."""
        self._greeted.pop(peer, None)

    def greet_all_again(self) -> None:
        """Greet all peers anew: what we say about ourselves has changed."""
        self._greeted.clear()

    def found_near(self, now: float, key: Key, contacts: Iterable[Contact]) -> None:
        """Note that a search ended with these, nearest first."""
        self._near[key] = _Near(now, tuple(contacts))

    def seeds(self, now: float, key: Key, target: int) -> list[Contact]:
        """Contacts to begin a look-up of `key` with: the peers of the table, and those that the last such look-up
        found.
        """
        contacts = self.closest(now, target, self._k)
        near = self._near.get(key)
        if near is None or now - near.found_at > self._stale_s:
            return contacts
        known = {contact.peer for contact in contacts} | {self._own}
        return contacts + [c for c in near.contacts if c.peer not in known and self.usable(now, c.peer)]

    def near_is_fresh(self, now: float, key: Key) -> bool:
        """True when a look-up of `key` ended so recently that its result, with the table's, will do."""
        near = self._near.get(key)
        return near is not None and now - near.found_at <= self._near_s

    def may_give(self, now: float, peer: PeerId, key: Key) -> bool:
        """True when `peer` may be offered copies of what it lacks under `key`; not again for a while, it may have
        refused.
        """
        given = self._given.get((peer, key))
        if given is not None and now - given < self._near_s:
            return False
        self._given[peer, key] = now
        return True

    def probes(self, now: float) -> list[Contact]:
        """Contacts to ping now: cooled suspects, peers not heard from for long, and former ones when we are lonely."""
        cooled = [contact for peer in self._silence.cooled(now) if (contact := self.table.contact(peer)) is not None]
        unseen = sorted(self.table.longest_unseen(), key=lambda seen: seen[0])[:_PROBES]
        stale = [contact for seen, contact in unseen if now - seen > self._stale_s]
        former: list[Contact] = []
        if len(self.table) - len(cooled) < _LONELY:
            former = [contact for contact in self._former.values() if self.usable(now, contact.peer)]
        wanted = [contact for contact in [*cooled, *stale, *former[-_PROBES:]] if self.usable(now, contact.peer)]
        return list({contact.peer: contact for contact in wanted}.values())

    @property
    def _calm(self) -> bool:
        """True when no peer is under suspicion: the usual case, worth a short cut."""
        return not self._silence and not self._liars

    def _remove(self, peer: PeerId) -> Contact | None:
        contact = self.table.contact(peer)
        if contact is None:
            return None
        self._former[peer] = contact
        return self.table.remove(peer)
