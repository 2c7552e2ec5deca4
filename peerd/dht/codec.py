"""The DHT's messages on the wire, and their translation to the values of `dht/node/kademlia`.

Bodies of the calls dht/4/ping, dht/4/find, dht/4/get and dht/4/store. The types bound all lengths, so that decoding
refuses what is too long. The translation refuses other invalid input (records, ids of other key types, clocks that are
not finite) with ProtocolViolation. Signatures are not checked here. Invalid addresses are dropped, not refused: a later
version may have kinds of addresses that are unknown here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from multiaddr import Multiaddr

from peerd.core.addr import decode_addr, is_dialable, reach, split_peer
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PEER_ID_BYTES, Key, PeerId
from peerd.core.limits import (
    ADDR_BYTES,
    ADDRS_PER_PEER,
    DHT_BYTES_PER_KEY,
    DHT_CONTACTS_PER_REPLY,
    DHT_KEYS_PER_CALL,
    DHT_RECORDS_PER_KEY,
    DHT_RECORDS_PER_STORE,
    DHT_TAGS_PER_CALL,
    RECORD_TAG_BYTES,
)
from peerd.core.record import MAX_RECORD_BYTES, Record
from peerd.dht.node import messages as q
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict
from peerd.messages.encoding import Message

KeyBytes = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
PeerBytes = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
TagBytes = Annotated[bytes, msgspec.Meta(min_length=RECORD_TAG_BYTES, max_length=RECORD_TAG_BYTES)]
RecordBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
Addrs = Annotated[list[Annotated[bytes, msgspec.Meta(max_length=ADDR_BYTES)]], msgspec.Meta(max_length=ADDRS_PER_PEER)]
MAX_AGE_S = 3600  # of a cached copy; no peer keeps older ones
Version = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class HelloMessage(Message, frozen=True):
    """Introduction: the sender's addresses (none if it cannot be dialed), and the time of its uncorrected clock."""

    addrs: Addrs
    wall: float


class ContactMessage(Message, frozen=True):
    """A peer that the sender knows."""

    peer: PeerBytes
    addrs: Addrs


Contacts = Annotated[list[ContactMessage], msgspec.Meta(max_length=DHT_CONTACTS_PER_REPLY)]
KeyRecords = Annotated[list[RecordBytes], msgspec.Meta(max_length=DHT_RECORDS_PER_KEY)]


class PingMessage(Message, frozen=True):
    hello: HelloMessage | None


class PongMessage(Message, frozen=True):
    hello: HelloMessage | None


class FindMessage(Message, frozen=True):
    """Request of dht/4/find and dht/4/get. `keys`: distinct, since a repeated key gets no answer of its own.

    `most_bytes`: limit for the records of one key; 0: none. `max_age_s`: limit for the age of cached copies. `has`:
    tags of records that the caller has already.
    """

    keys: Annotated[list[KeyBytes], msgspec.Meta(min_length=1, max_length=DHT_KEYS_PER_CALL)]
    hello: HelloMessage | None
    most_bytes: Annotated[int, msgspec.Meta(ge=0, le=DHT_BYTES_PER_KEY)] = 0
    max_age_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_AGE_S)] = 0
    has: Annotated[list[TagBytes], msgspec.Meta(max_length=DHT_TAGS_PER_CALL)] = msgspec.field(default_factory=list)


class NearMessage(Message, frozen=True):
    """Answer of dht/4/find: contacts near any of the keys."""

    contacts: Contacts
    hello: HelloMessage | None


class RecordsMessage(Message, frozen=True):
    """Answer of dht/4/get: the records of as many keys as fit, in the order of the request, and contacts near them.

    A record that the caller has already is replaced by its tag.
    """

    records: Annotated[list[KeyRecords], msgspec.Meta(min_length=1, max_length=DHT_KEYS_PER_CALL)]
    contacts: Contacts
    hello: HelloMessage | None


class StoreMessage(Message, frozen=True):
    records: Annotated[list[RecordBytes], msgspec.Meta(min_length=1, max_length=DHT_RECORDS_PER_STORE)]
    hello: HelloMessage | None


class VerdictMessage(Message, frozen=True):
    verdict: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    version: Version


class StoredMessage(Message, frozen=True):
    verdicts: Annotated[list[VerdictMessage], msgspec.Meta(max_length=DHT_RECORDS_PER_STORE)]
    hello: HelloMessage | None


RequestMessage = PingMessage | FindMessage | StoreMessage
ReplyMessage = PongMessage | NearMessage | RecordsMessage | StoredMessage


def request_to_wire(request: q.Request, wall: float) -> tuple[str, RequestMessage, type[ReplyMessage]]:
    """The method, its body, and the type of its answer. `wall`: time of our uncorrected clock."""
    hello = hello_to_wire(request.hello, wall)
    match request:
        case q.Find(keys, values, _, most_bytes, max_age_s, has):
            body = FindMessage([key.raw for key in keys], hello, most_bytes, max_age_s, list(has))
            return ("dht/4/get", body, RecordsMessage) if values else ("dht/4/find", body, NearMessage)
        case q.StoreRecords(records):
            return "dht/4/store", StoreMessage([record.encode() for record in records], hello), StoredMessage
        case q.Ping():
            return "dht/4/ping", PingMessage(hello), PongMessage


def request_from_wire(message: RequestMessage, *, values: bool = False) -> q.Request:
    """The request of a message. Raises ProtocolViolation."""
    hello = _hello(message.hello)
    match message:
        case PingMessage():
            return q.Ping(hello)
        case FindMessage(keys, _, most_bytes, max_age_s, has):
            asked = tuple(dict.fromkeys(Key(key) for key in keys))
            return q.Find(asked, values, hello, most_bytes, max_age_s, tuple(has))
        case StoreMessage(records):
            return q.StoreRecords(tuple(Record.decode(record) for record in records), hello)


def reply_to_wire(reply: q.Reply, wall: float, *, values: bool = False) -> ReplyMessage:
    """The message of a reply. `wall`: time of our uncorrected clock."""
    hello = hello_to_wire(reply.hello, wall)
    match reply:
        case q.Found(records, contacts):
            near = [ContactMessage(contact.peer.raw, list(contact.addrs)) for contact in contacts]
            if not values:
                return NearMessage(near, hello)
            per_key = [
                [*(record.encode() for record in some), *reply.named_of(index)] for index, some in enumerate(records)
            ]
            return RecordsMessage(per_key, near, hello)
        case q.Stored(verdicts):
            return StoredMessage([VerdictMessage(int(verdict), version) for verdict, version in verdicts], hello)
        case q.PongReply():
            return PongMessage(hello)


def reply_from_wire(message: ReplyMessage, asked: int) -> q.Reply:
    """The reply of a message. `asked`: number of keys in the request. Raises ProtocolViolation."""
    hello = _hello(message.hello)
    match message:
        case RecordsMessage(records, contacts):
            decoded = tuple(
                tuple(Record.decode(one) for one in some if len(one) != RECORD_TAG_BYTES) for some in records
            )
            named = tuple(tuple(one for one in some if len(one) == RECORD_TAG_BYTES) for some in records)
            return q.Found(decoded, _contacts(contacts), hello, named if any(named) else ())
        case NearMessage(contacts):
            return q.Found(((),) * asked, _contacts(contacts), hello)
        case StoredMessage(verdicts):
            return q.Stored(tuple((_verdict(v.verdict), v.version) for v in verdicts), hello)
        case PongMessage():
            return q.PongReply(hello)


def hello_to_wire(hello: q.Hello | None, wall: float) -> HelloMessage | None:
    return HelloMessage(list(hello.addrs), wall) if hello is not None else None


def addrs_to_wire(addrs: Iterable[Multiaddr]) -> tuple[bytes, ...]:
    """Our addresses as we announce them: dialable, without our peer id, loopback only if there are no others."""
    bare = [addr for addr in dict.fromkeys(split_peer(addr)[0] for addr in addrs) if is_dialable(addr)]
    outside = [addr for addr in bare if reach(addr) > 0]
    return tuple(addr.to_bytes() for addr in (outside or bare)[:ADDRS_PER_PEER])


def addrs_from_wire(addrs: Iterable[bytes]) -> list[Multiaddr]:
    """The addresses that are valid and can be dialed."""
    found = []
    for raw in addrs:
        try:
            addr = split_peer(decode_addr(raw))[0]
        except ProtocolViolation:
            continue
        if addr.to_bytes() and is_dialable(addr):
            found.append(addr)
    return found


def _hello(message: HelloMessage | None) -> q.Hello | None:
    if message is None:
        return None
    if not math.isfinite(message.wall):
        raise ProtocolViolation("a clock whose time is not a finite number")
    return q.Hello(tuple(addr.to_bytes() for addr in addrs_from_wire(message.addrs)))


def _contacts(messages: Iterable[ContactMessage]) -> tuple[Contact, ...]:
    try:
        return tuple(_contact(message.peer, tuple(message.addrs)) for message in messages)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from None


@functools.lru_cache(maxsize=4096)  # answers often name the same peers; making a contact costs two hashes
def _contact(peer: bytes, addrs: tuple[bytes, ...]) -> Contact:
    return Contact(PeerId(peer), addrs)


def _verdict(number: int) -> Verdict:
    """The verdict of a number. An unknown one counts as a refusal."""
    try:
        return Verdict(number)
    except ValueError:
        return Verdict.OVER_QUOTA
