"""Messages between DHT nodes, and the inputs and outputs of `Kademlia`: plain decoded values.

The wire formats and their bounds are in dht/codec.py; the simulator passes these objects directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from peerd.core.ids import Key, PeerId
from peerd.core.record import Record
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict

# --- between nodes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of the sender; sent if the other side may not know it yet."""

    addrs: tuple[bytes, ...] = ()  # where it can be dialed; empty for a client, which is in no routing table


@dataclass(frozen=True, slots=True)
class Find:
    """Request for the peers near these keys and, with `values`, for the records stored under them."""

    keys: tuple[Key, ...]
    values: bool
    hello: Hello | None = None
    most_bytes: int = 0  # most bytes of one key in an answer; 0: no limit
    max_age_s: int = 0  # greatest acceptable age of a cached copy; 0: copies are not accepted
    has: tuple[bytes, ...] = ()  # tags of records that the requester has and that need not be sent again


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to Find: records per key, in the order of the request.

    If `records` is shorter than the request, the other keys did not fit and may be requested again. `contacts` are near
    any of the keys, in one list; additional contacts do no harm to a lookup.
    """

    records: tuple[tuple[Record, ...], ...]
    contacts: tuple[Contact, ...]
    hello: Hello | None = None
    named: tuple[tuple[bytes, ...], ...] = ()  # per key, tags of held records that were not sent; may be shorter

    def named_of(self, index: int) -> tuple[bytes, ...]:
        """The tags for the key at this index."""
        return self.named[index] if index < len(self.named) else ()


@dataclass(frozen=True, slots=True)
class StoreRecords:
    """Request to store these records."""

    records: tuple[Record, ...]
    hello: Hello | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Answer to StoreRecords: per record the verdict, and the version that is stored now (0 if none)."""

    verdicts: tuple[tuple[Verdict, int], ...]
    hello: Hello | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """Liveness probe."""

    hello: Hello | None = None


@dataclass(frozen=True, slots=True)
class PongReply:
    hello: Hello | None = None


Request = Find | StoreRecords | Ping
Reply = Found | Stored | PongReply

# --- into Kademlia ---------------------------------------------------------------------------------------------


NOWHERE: Final = ("", "")  # unknown place and region; all peers there share the bound of one place


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer's request; it is answered at once, by `Respond` with the same token."""

    token: int
    peer: PeerId
    request: Request
    where: tuple[str, str] = NOWHERE  # the place and the region that it connects from


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the `Ask` with this id."""

    ask: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class AskFailed:
    """The `Ask` with this id got no answer. `lied`: the answer violated the protocol."""

    ask: int
    lied: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """We are connected to this peer, on any path; it may enter the table."""

    contact: Contact


@dataclass(frozen=True, slots=True)
class Lost:
    """The last connection to this peer has closed."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Get:
    """Collect the records under these keys; ends with `GetDone`."""

    op: int
    keys: tuple[Key, ...]
    most_bytes: int = 0  # most bytes of one key in one answer; 0: no limit
    max_age_s: int = 0  # greatest acceptable age of cached copies; 0: copies are not accepted


@dataclass(frozen=True, slots=True)
class Put:
    """Publish a value under our sub-key and keep it published for `ttl_s`; ends with `PutDone`."""

    op: int
    key: Key
    suffix: bytes
    value: bytes
    ttl_s: float
    stays: bool = False  # others need the record after we have left


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw our records: one sub-key, or with `key` None all records that do not stay; ends with `PutDone`."""

    op: int
    key: Key | None = None
    suffix: bytes = b""


@dataclass(frozen=True, slots=True)
class Stop:
    """End this operation now, with the results so far."""

    op: int


Input = Asked | Answered | AskFailed | Met | Lost | Get | Put | Withdraw | Stop

# --- out of Kademlia -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this request; report `Answered` or `AskFailed` with its id in any case."""

    id: int
    contact: Contact
    request: Request


@dataclass(frozen=True, slots=True)
class Respond:
    """The answer to `Asked`."""

    token: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class GetDone:
    """Result of a get: per key the live records, one per sub-key and in their order, and why the search ended.

    `answered`: at least one other peer answered for each key; otherwise a lack of records means nothing.
    """

    op: int
    records: dict[Key, list[Record]]
    why: str
    answered: bool = True


@dataclass(frozen=True, slots=True)
class PutDone:
    """Result of a put: the number of peers, including ourselves, that store the record (of several, the least)."""

    op: int
    peers: int
    why: str
    verdicts: Sequence[Verdict] = field(default=())  # of the peers that refused


@dataclass(frozen=True, slots=True)
class BlamePeer:
    """This peer violated the protocol; it is avoided for a while."""

    peer: PeerId
    why: str


Output = Ask | Respond | GetDone | PutDone | BlamePeer
