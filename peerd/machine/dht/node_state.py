"""State shared by the parts of one DHT node: settings, contact, neighbours, records, clock and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.core.ids import PeerId
from peerd.core.record import Record, Signer, Verifier
from peerd.machine.budget.book import Book
from peerd.machine.dht.hot_keys import HotKeys
from peerd.machine.dht.messages import Hello
from peerd.machine.dht.neighbours import Neighbours
from peerd.machine.dht.publisher import Publisher
from peerd.machine.dht.responder import Responder
from peerd.machine.dht.routing_table import Contact, Table
from peerd.machine.dht.store import Store, StoreLimits, Verdict
from peerd.machine.rate.round_trips import RoundTrips


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
