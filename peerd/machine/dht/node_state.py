"""State that the parts of one DHT node share: figures, contact, neighbours, records, clock and counts."""

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
    """The figures of the DHT; times in seconds."""

    k: int = 20  # peers of a bucket, and neighbours that a joining peer greets
    wide: tuple[int, ...] = (128, 64, 32)  # peers of the farthest buckets: most look-ups begin there
    copies: int = 8  # peers that hold a record; with 20 % of them gone, all are lost once in 400,000 times
    enough: int = 3  # of these, how many answers make a find
    spare: int = 1  # asked beyond these, for one of them may be slow
    parallel: int = 4  # peers waited for at once while coming nearer
    slow_s: float = 0.6  # a peer that takes longer no longer holds up a search, until round trips have been seen
    silent_s: float = 5.0  # a peer that takes longer has failed
    repeat_s: float = 300.0  # own records are offered again, for their holders may have left
    refresh_s: float = 900.0  # a part of the key space in which nobody searched is searched
    neighbours_s: float = 120.0  # our own neighbourhood is searched
    stale_s: float = 600.0  # a peer not heard from is pinged
    near_s: float = 60.0  # a publisher relies on its last search for a key
    greet_again_s: float = 600.0  # addresses and clocks are told anew
    upkeep_s: float = 5.0
    store: StoreLimits = field(default_factory=StoreLimits)


@dataclass(slots=True)
class Counts:
    """Counters of a node's work, for status and benchmarks."""

    asks: int = 0  # messages sent
    failed: int = 0  # of these, without an answer
    served: int = 0
    searches: int = 0  # ended ones that somebody waited for
    searched_peers: int = 0  # asked in these, together
    copied: int = 0  # keys looked up because others often asked us for them
    lies: int = 0


class NodeState:
    """One node's state; the parts that act on it are Workbench and Kademlia."""

    def __init__(self, signer: Signer, verifier: Verifier, config: KademliaConfig, book: Book | None = None) -> None:
        self.config = config
        self.id: PeerId = signer.peer_id
        self.contact = Contact(signer.peer_id)  # without addresses: a client
        self.clock_ahead_s = 0.0  # corrected Unix time minus monotonic time
        self.joined = False  # a search for our neighbours has ended, and there are some
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
        self.verifier = verifier

    @property
    def hello(self) -> Hello:
        """Our introduction to other nodes."""
        return Hello(self.contact.addrs)

    def wall(self, now: float) -> float:
        """Corrected Unix time."""
        return now + self.clock_ahead_s

    def keep(self, now: float, record: Record) -> bool:
        """Hold a copy ourselves; returns whether we do."""
        return self.store.offer(self.wall(now), record)[0] is Verdict.STORED
