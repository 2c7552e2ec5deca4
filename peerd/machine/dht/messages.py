"""Messages between DHT nodes, and the inputs and outputs of `Kademlia`: values only, already decoded.

The wire forms and their bounds are in service/dht/codec.py; the simulator passes these objects as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from peerd.core.ids import Key, PeerId
from peerd.core.record import Record
from peerd.machine.dht.routing_table import Contact
from peerd.machine.dht.store import Verdict

# --- between nodes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of the sender; sent when the other side may not know it yet."""

    addrs: tuple[bytes, ...] = ()  # where it can be dialled; none: a client, which belongs in nobody's table


@dataclass(frozen=True, slots=True)
class Find:
    """Request for the peers near these keys and, with `values`, for the records held under them."""

    keys: tuple[Key, ...]
    values: bool
    hello: Hello | None = None
    most_bytes: int = 0  # wanted of one key, in an answer; 0: all of it
    max_age_s: int = 0  # of a copy of what others hold that will do as an answer; 0: none will
    has: tuple[bytes, ...] = ()  # tags of records that the asker has: they need not be sent again


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to Find: records per key in the order of asking; if that is shorter, the other keys had no room and may be
    asked again.

    The contacts are those near any of the keys, together: a few too many do a look-up no harm.
    """

    records: tuple[tuple[Record, ...], ...]
    contacts: tuple[Contact, ...]
    hello: Hello | None = None
    named: tuple[tuple[bytes, ...], ...] = ()  # per key, tags of records that the asker has; shorter: none of the rest

    def named_of(self, index: int) -> tuple[bytes, ...]:
        """The tags for the key of this number."""
        return self.named[index] if index < len(self.named) else ()


@dataclass(frozen=True, slots=True)
class StoreRecords:
    """Request to store these records."""

    records: tuple[Record, ...]
    hello: Hello | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Answer to StoreRecords: per record the verdict, and the version that is held now (0: none)."""

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


NOWHERE: Final = ("", "")  # not known; all who are there share what one place may have


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer asks us; answered by `Respond` with the same token, at once."""

    token: int
    peer: PeerId
    request: Request
    where: tuple[str, str] = NOWHERE  # the place and the region that it connects from


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the `Ask` of this id."""

    ask: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class AskFailed:
    """The `Ask` of this id got no answer. `lied`: what came back broke the protocol."""

    ask: int
    lied: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """We are connected to this peer, by whatever way; it may become part of the table."""

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
    most_bytes: int = 0  # of one key, in one answer; 0: all of it
    max_age_s: int = 0  # of copies on the way that will do; 0: none will


@dataclass(frozen=True, slots=True)
class Put:
    """Publish a value under our sub-key and keep it published for `ttl_s`; ends with `PutDone`."""

    op: int
    key: Key
    suffix: bytes
    value: bytes
    ttl_s: float
    stays: bool = False  # True for a record that others need after we have left


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take back what we published: one sub-key, or all that does not stay when `key` is None; ends with `PutDone`."""

    op: int
    key: Key | None = None
    suffix: bytes = b""


@dataclass(frozen=True, slots=True)
class Stop:
    """No longer wait for this operation: it ends now, with what it has."""

    op: int


Input = Asked | Answered | AskFailed | Met | Lost | Get | Put | Withdraw | Stop

# --- out of Kademlia -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this request; report `Answered` or `AskFailed` with its id, whatever happens."""

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
    """Per key the live records, one per sub-key and in their order; and why the search ended.

    `answered`: True if at least one other peer answered for each of the keys: else no records mean nothing.
    """

    op: int
    records: dict[Key, list[Record]]
    why: str
    answered: bool = True


@dataclass(frozen=True, slots=True)
class PutDone:
    """Result of a put: the number of peers that hold the record, ourselves included if we hold it for others; of
    several records, the fewest.
    """

    op: int
    peers: int
    why: str
    verdicts: Sequence[Verdict] = field(default=())  # what those that refused said


@dataclass(frozen=True, slots=True)
class BlamePeer:
    """This peer broke the protocol; it is left alone for a while."""

    peer: PeerId
    why: str


Output = Ask | Respond | GetDone | PutDone | BlamePeer
