"""State shared by the parts of one DHT node: settings, contact, neighbours, records, clock and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_BYTES_PER_KEY, DHT_CONTACTS_PER_REPLY
from peerd.core.record import Record, Signer, Verifier
from peerd.dht.node.hot_keys import HotKeys
from peerd.dht.node.messages import Asked, Find, Found, Hello, Stored, StoreRecords
from peerd.dht.node.neighbours import Neighbours
from peerd.dht.node.publisher import Publisher
from peerd.dht.node.routing_table import Contact, Table, place
from peerd.dht.node.store import Store, StoreLimits, Verdict, answer_bytes, is_large
from peerd.wire.budget.book import Book, User
from peerd.wire.rate.round_trips import RoundTrips


@dataclass(frozen=True, slots=True, kw_only=True)
class KademliaConfig:
    """Settings of the DHT; times in seconds."""

    k: int = 20  # peers of a bucket, and neighbours that a joining peer looks up
    wide: tuple[int, ...] = (128, 64, 32)  # peers of the farthest buckets, where most lookups start
    copies: int = 8  # peers that store a record; if 20 % of all peers leave, all 8 are lost once in 400,000 times
    enough: int = 3  # answers of these that end a search with values
    spare: int = 1  # peers asked beyond `enough`, because one may be slow
    parallel: int = 4  # peers waited for at once while approaching a key
    slow_s: float = 0.6  # until round trips are known: time after which a peer no longer holds up a search
    silent_s: float = 5.0  # time after which a peer has failed
    repeat_s: float = 300.0  # interval at which own records are offered again, because holders may have left
    refresh_s: float = 900.0  # time without a search after which a part of the key space is searched
    neighbours_s: float = 120.0  # interval of searches for our own neighbourhood
    stale_s: float = 600.0  # time without a message after which a peer is pinged
    near_s: float = 60.0  # how long a publisher reuses its last search for a key
    greet_again_s: float = 600.0  # interval at which our introduction is repeated
    upkeep_s: float = 5.0  # interval of the maintenance
    store: StoreLimits = field(default_factory=StoreLimits)


@dataclass(slots=True)
class Counts:
    """Counters of a node's work, for status and benchmarks."""

    asks: int = 0  # messages sent
    failed: int = 0  # of these, without an answer
    served: int = 0  # requests of others
    searches: int = 0  # completed searches of commands
    searched_peers: int = 0  # peers asked in these
    copied: int = 0  # keys looked up because others often asked us for them
    lies: int = 0


class NodeState:
    """One node's state; QueryPool and Kademlia act on it."""

    def __init__(self, signer: Signer, verifier: Verifier, config: KademliaConfig, book: Book | None = None) -> None:
        self.config = config
        self.id: PeerId = signer.peer_id
        self.contact = Contact(signer.peer_id)  # without addresses: a client
        self.clock_ahead_s = 0.0  # corrected Unix time minus monotonic time
        self.joined = False  # a search for our neighbours has found some
        self.counts = Counts()
        self.neighbours = Neighbours(
            self.id,
            Table(self.id, config.k, config.wide),
            greet_again_s=config.greet_again_s,
            near_s=config.near_s,
            stale_s=config.stale_s,
        )
        self.round_trips = RoundTrips(config.slow_s, config.silent_s / 2)
        self.store = Store(self.id, verifier, config.store, book)
        self.hot = HotKeys()
        self.publisher = Publisher(signer, config.repeat_s)
        self.responder = Responder(self.id, config.k, self.neighbours, self.store, self.hot)

    @property
    def hello(self) -> Hello:
        """Our introduction to other nodes."""
        return Hello(self.contact.addrs)

    def wall(self, now: float) -> float:
        """Corrected Unix time."""
        return now + self.clock_ahead_s

    def keep(self, now: float, record: Record) -> bool:
        """Store a copy ourselves; returns True if the store accepts it."""
        return self.store.offer(self.wall(now), record)[0] is Verdict.STORED


class Responder:
    """Answers of a DHT node to others' requests, from its table, store and cached copies.

    If a key has more records than the requester wants, every publisher gets its share (see `Store.get`).

    Hostile input: requests for many large keys (the answer stops at `DHT_BYTES_PER_KEY`, and the first key always
    fits), floods of records (the store's quotas), or records that belong elsewhere (refused if we know k nearer peers).
    The number of keys and records in a request is bounded by the decoder.
    """

    def __init__(self, own: PeerId, k: int, neighbours: Neighbours, store: Store, hot: HotKeys) -> None:
        self._place = place(own.key)
        self._k = k
        self._neighbours = neighbours
        self._store = store
        self._hot = hot

    def find(self, now: float, wall: float, asker: PeerId, request: Find, hello: Hello | None) -> Found:
        """Records under as many of the keys as fit, and peers near any of them."""
        contacts: dict[bytes, Contact] = {}
        per_key = max(2, min(self._k, DHT_CONTACTS_PER_REPLY // len(request.keys)))
        records: list[tuple[Record, ...]] = []
        named: list[tuple[bytes, ...]] = []
        room, has = DHT_BYTES_PER_KEY, frozenset(request.has)
        for key in request.keys:
            held = self._held(now, wall, key, request) if request.values else ()
            tags = {record: record.tag for record in held if is_large(record)} if has else {}
            sent = tuple(record for record in held if tags.get(record) not in has)
            size = sum(map(answer_bytes, sent))
            if records and size > room:
                break
            room -= size
            records.append(sent)
            named.append(tuple(tag for tag in tags.values() if tag in has))
            near = self._neighbours.closest(now, place(key), per_key + 1)
            others = [contact for contact in near if contact.peer.raw != asker.raw]
            contacts |= {contact.peer.raw: contact for contact in others[:per_key]}
        near_any = tuple(contacts.values())[:DHT_CONTACTS_PER_REPLY]
        return Found(tuple(records), near_any, hello, tuple(named) if any(named) else ())

    def _held(self, now: float, wall: float, key: Key, request: Find) -> tuple[Record, ...]:
        held = self._store.get(wall, key, request.most_bytes)
        if not held and request.max_age_s:
            held = self._hot.get(now, wall, key, request.max_age_s, request.most_bytes)
        return tuple(held)

    def store(self, now: float, wall: float, asked: Asked, request: StoreRecords, hello: Hello | None) -> Stored:
        """A verdict for each record; after a forged one the rest are refused without a check."""
        verdicts: list[tuple[Verdict, int]] = []
        forged = self._neighbours.is_liar(now, asked.peer)
        sender = User(asked.peer.text, *asked.where)
        for record in request.records:
            verdict = (Verdict.FORGED, 0) if forged else self.keep(now, wall, record, sender)
            forged = verdict[0] is Verdict.FORGED
            verdicts.append(verdict)
        return Stored(tuple(verdicts), hello)

    def keep(self, now: float, wall: float, record: Record, sender: User) -> tuple[Verdict, int]:
        """Offer `record` to our own store, unless other peers are nearer to its key (`is_far`)."""
        if self.is_far(now, record.key):
            return Verdict.FAR, 0
        return self._store.offer(wall, record, sender)

    def is_far(self, now: float, key: Key) -> bool:
        """Return True if k known peers are nearer to `key` than we are."""
        target = place(key)
        nearest = self._neighbours.closest(now, target, self._k)
        return len(nearest) == self._k and nearest[-1].place ^ target < self._place ^ target
