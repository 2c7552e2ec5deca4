"""Neighbours of a DHT node: the routing table, suspicion of silent peers, and the results of recent lookups.

A peer enters the table when it has sent us a message itself and stated addresses where it can be dialed; peers that
others report never enter it. A peer that falls silent or closes its connection is not used any more, and is probed
after a while; a second silence removes it. Removed peers are remembered: if *our* internet connection was down,
everybody seemed dead, and we need peers to ask when it is back. Sends nothing: it returns the peers to probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import Key, PeerId
from peerd.dht.node.routing_table import Contact, Table
from peerd.wire.rate.suspicion import Suspicion

_SILENT_S, _SILENT_MOST_S = 5.0, 640.0  # for which a silent peer is not used: at first, and at most
_SHUN_LIARS_S = 300.0
_SUSPECTS = 4096
_FORMER = 64
_GREETED = 8192
_NEAR_KEYS = 1024
_LONELY = 4  # with fewer live neighbours than this, former ones are tried again
_PROBES = 3  # of each kind per round


@dataclass(frozen=True, slots=True)
class _Near:
    """The peers that a search found nearest to a key."""

    found_at: float
    contacts: tuple[Contact, ...]


class Neighbours:
    """The DHT peers that `own` knows. Times are monotonic, in seconds."""

    def __init__(self, own: PeerId, table: Table, *, greet_again_s: float, near_s: float, stale_s: float) -> None:
        self.table = table
        self._own = own
        self._k = table.k
        self._greet_again_s = greet_again_s
        self._near_s = near_s
        self._stale_s = stale_s
        # By raw peer id, which hashes fast.
        self._silence = Suspicion[bytes](_SILENT_S, _SILENT_MOST_S, _SUSPECTS)
        self._liars = Suspicion[bytes](_SHUN_LIARS_S, _SHUN_LIARS_S, _SUSPECTS)
        self._greeted = BoundedDict[PeerId, float](_GREETED)
        self._near = BoundedDict[Key, _Near](_NEAR_KEYS)
        self._former = BoundedDict[PeerId, Contact](_FORMER)
        self._resigned = BoundedDict[PeerId, None](_GREETED)  # peers that stated that they cannot be dialed
        self._given = BoundedDict[tuple[PeerId, Key], float](_NEAR_KEYS)

    def usable(self, now: float, peer: PeerId) -> bool:
        """Return True if this peer may be asked, and reported to others."""
        return not (self._silence.is_aside(now, peer.raw) or self.is_liar(now, peer))

    def believed(self, now: float, contacts: Iterable[Contact]) -> list[Contact]:
        """The usable ones of the contacts that a peer reported: not ourselves, no silent and no lying peers."""
        others = [contact for contact in contacts if contact.peer.raw != self._own.raw]
        return others if self._calm else [contact for contact in others if self.usable(now, contact.peer)]

    def closest(self, now: float, target: int, count: int) -> list[Contact]:
        """Usable peers of the table, nearest to `target` first."""
        return self.table.closest(target, count, None if self._calm else lambda peer: self.usable(now, peer))

    def welcome(self, now: float, contact: Contact) -> tuple[bool, Contact | None]:
        """Record a message from a dialable peer. Returns whether it newly entered the table, and a peer to probe."""
        self._silence.forgive(contact.peer.raw)
        self._resigned.pop(contact.peer, None)
        if self.is_liar(now, contact.peer):
            return False, None
        seated, oldest = self.table.add(now, contact)
        if seated:
            self._former.pop(contact.peer, None)
        if oldest is not None:
            seen = self.table.seen_at(oldest.peer)
            if seen is not None and now - seen < self._stale_s:
                oldest = None  # it was alive a moment ago
        return seated, oldest

    def answered(self, now: float, peer: PeerId) -> None:
        """Record a sign of life."""
        self._silence.forgive(peer.raw)
        self.table.seen(now, peer)

    def silent(self, now: float, peer: PeerId) -> Contact | None:
        """Record that the peer did not answer. If that removes it from the table, returns a newcomer to probe."""
        if self._silence.failed(now, peer.raw) < 2:
            return None
        return self._remove(peer)

    def lost(self, now: float, peer: PeerId) -> None:
        """Record that the peer's connection closed: it is not used until it has been probed."""
        self._greeted.pop(peer, None)
        self._silence.failed(now, peer.raw)

    def lied(self, now: float, peer: PeerId) -> Contact | None:
        """Record that the peer violated the protocol. Returns a newcomer to probe, which may replace it."""
        self._liars.put_aside(peer.raw, now + _SHUN_LIARS_S)
        newcomer = self._remove(peer)
        self._former.pop(peer, None)
        return newcomer

    def resigned(self, peer: PeerId) -> Contact | None:
        """Record that the peer states that it cannot be dialed. Returns a newcomer to probe, which may replace it."""
        self._resigned[peer] = None
        newcomer = self._remove(peer)
        self._former.pop(peer, None)
        return newcomer

    def has_resigned(self, peer: PeerId) -> bool:
        """Return True if the peer's own last statement was that it cannot be dialed, even if others report it."""
        return peer in self._resigned

    def is_liar(self, now: float, peer: PeerId) -> bool:
        return self._liars.is_aside(now, peer.raw)

    def greets(self, now: float, peer: PeerId) -> bool:
        """Return True if the next message to `peer` should contain our introduction; records that it does."""
        greeted = self._greeted.get(peer)
        if greeted is not None and now - greeted < self._greet_again_s:
            return False
        self._greeted[peer] = now
        return True

    def ungreeted(self, peer: PeerId) -> None:
        """Record that the introduction did not arrive."""
        self._greeted.pop(peer, None)

    def greet_all_again(self) -> None:
        """Introduce ourselves to all peers again, because our addresses have changed."""
        self._greeted.clear()

    def found_near(self, now: float, key: Key, contacts: Iterable[Contact]) -> None:
        """Store the result of a search, nearest peers first."""
        self._near[key] = _Near(now, tuple(contacts))

    def seeds(self, now: float, key: Key, target: int) -> list[Contact]:
        """Contacts to start a lookup of `key` with: from the table, and from the last lookup of this key."""
        contacts = self.closest(now, target, self._k)
        near = self._near.get(key)
        if near is None or now - near.found_at > self._stale_s:
            return contacts
        known = {contact.peer for contact in contacts} | {self._own}
        return contacts + [c for c in near.contacts if c.peer not in known and self.usable(now, c.peer)]

    def near_is_fresh(self, now: float, key: Key) -> bool:
        """Return True if a lookup of `key` ended so recently that its result, with the table, can be used."""
        near = self._near.get(key)
        return near is not None and now - near.found_at <= self._near_s

    def may_give(self, now: float, peer: PeerId, key: Key) -> bool:
        """Return True, once per `near_s`, if `peer` may be offered the records that it lacks under `key`."""
        given = self._given.get((peer, key))
        if given is not None and now - given < self._near_s:
            return False
        self._given[peer, key] = now
        return True

    def probes(self, now: float) -> list[Contact]:
        """Contacts to ping now: suspects after a pause, peers long without a message, former ones if few are left."""
        cooled = [c for raw in self._silence.ripe(now) if (c := self.table.contact(PeerId(raw))) is not None]
        unseen = sorted(self.table.longest_unseen(), key=lambda seen: seen[0])[:_PROBES]
        stale = [contact for seen, contact in unseen if now - seen > self._stale_s]
        former: list[Contact] = []
        if len(self.table) - len(cooled) < _LONELY:
            former = [contact for contact in self._former.values() if self.usable(now, contact.peer)]
        wanted = [contact for contact in [*cooled, *stale, *former[-_PROBES:]] if self.usable(now, contact.peer)]
        return list({contact.peer: contact for contact in wanted}.values())

    @property
    def _calm(self) -> bool:
        """True if no peer is under suspicion, which is the usual case and allows a shortcut."""
        return not self._silence and not self._liars

    def _remove(self, peer: PeerId) -> Contact | None:
        contact = self.table.contact(peer)
        if contact is None:
            return None
        self._former[peer] = contact
        return self.table.remove(peer)
