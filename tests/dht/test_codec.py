"""The DHT's messages come back from the wire as they were, and what is too long or senseless does not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.addr import parse_addr
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import Key, PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import (
    ADDRS_PER_PEER,
    DHT_BYTES_PER_KEY,
    DHT_CONTACTS_PER_REPLY,
    DHT_KEYS_PER_CALL,
    DHT_RECORDS_PER_STORE,
    DHT_TAGS_PER_CALL,
    RECORD_TAG_BYTES,
)
from peerd.core.record import MAX_RECORD_BYTES, Record
from peerd.dht import codec as wire
from peerd.dht.node import messages as q
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict
from peerd.messages.encoding import decode, encode

KEYS = Keypair.from_seed(b"k" * 32)
ADDR = parse_addr("/ip4/198.51.100.7/tcp/4001").to_bytes()

hellos = st.none() | st.builds(q.Hello, st.lists(st.just(ADDR), max_size=2).map(tuple))
keys = st.binary(min_size=32, max_size=32).map(Key)
records = st.builds(
    lambda key, value, version: Record(key, KEYS.peer_id, b"s", value, version, 1_800_000_000_000).signed(KEYS),
    keys,
    st.binary(max_size=40),
    st.integers(0, 2**63 - 1),
)
contacts = st.builds(
    lambda public, addrs: Contact(PeerId.from_public_key(public), tuple(addrs)),
    st.binary(min_size=32, max_size=32),
    st.lists(st.binary(max_size=40), max_size=3),
)
sizes, ages = st.integers(0, DHT_BYTES_PER_KEY), st.integers(0, wire.MAX_AGE_S)
tags = st.lists(st.binary(min_size=RECORD_TAG_BYTES, max_size=RECORD_TAG_BYTES), max_size=3).map(tuple)
requests = (
    st.builds(q.Ping, hellos)
    | st.builds(
        q.Find, st.lists(keys, min_size=1, max_size=5, unique=True).map(tuple), st.booleans(), hellos, sizes, ages, tags
    )
    | st.builds(q.StoreRecords, st.lists(records, min_size=1, max_size=3).map(tuple), hellos)
)
verdicts = st.tuples(st.sampled_from(Verdict), st.integers(0, 2**63 - 1))


@given(requests)
def test_a_request_comes_back_from_the_wire(request: q.Request) -> None:
    method, body, _ = wire.request_to_wire(request, 1.5)
    assert body == decode(type(body), encode(body))
    values = method == "dht/4/get"
    assert wire.request_from_wire(decode(type(body), encode(body)), values=values) == request


@given(
    st.builds(q.PongReply, hellos)
    | st.builds(q.Stored, st.lists(verdicts, max_size=4).map(tuple), hellos)
    | st.builds(
        q.Found,
        st.lists(st.lists(records, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
        st.lists(contacts, max_size=3).map(tuple),
        hellos,
    )
)
def test_a_reply_comes_back_from_the_wire(reply: q.Reply) -> None:
    body = wire.reply_to_wire(reply, 1.5, values=True)
    assert wire.reply_from_wire(decode(type(body), encode(body)), 3) == reply


@given(st.builds(q.Found, st.just(((), ())), st.just(()), hellos, st.tuples(tags, tags)))
def test_the_tags_of_records_that_the_asker_has_come_back_from_the_wire(reply: q.Found) -> None:
    back = wire.reply_from_wire(wire.reply_to_wire(reply, 1.5, values=True), 2)
    assert isinstance(back, q.Found)
    assert [back.named_of(index) for index in range(3)] == [*reply.named, ()]


def test_an_answer_without_values_holds_none_for_each_key() -> None:
    found = q.Found(((), ()), (), None)
    body = wire.reply_to_wire(found, 0.0, values=False)
    assert isinstance(body, wire.NearMessage)
    assert wire.reply_from_wire(body, 2) == found


@pytest.mark.parametrize(
    "message",
    [
        wire.FindMessage([], None),
        wire.FindMessage([bytes(32)], None, 0, -1),
        wire.FindMessage([bytes(32)], None, 0, wire.MAX_AGE_S + 1),
        wire.FindMessage([bytes(32)] * (DHT_KEYS_PER_CALL + 1), None),
        wire.FindMessage([bytes(31)], None),
        wire.FindMessage([bytes(32)], None, has=[bytes(RECORD_TAG_BYTES + 1)]),
        wire.FindMessage([bytes(32)], None, has=[bytes(RECORD_TAG_BYTES)] * (DHT_TAGS_PER_CALL + 1)),
        wire.StoreMessage([], None),
        wire.StoreMessage([b""] * (DHT_RECORDS_PER_STORE + 1), None),
        wire.StoreMessage([bytes(MAX_RECORD_BYTES + 1)], None),
        wire.NearMessage([wire.ContactMessage(bytes(38), [])] * (DHT_CONTACTS_PER_REPLY + 1), None),
        wire.NearMessage([wire.ContactMessage(bytes(37), [])], None),
        wire.PingMessage(wire.HelloMessage([b""] * (ADDRS_PER_PEER + 1), 0.0)),
        wire.PingMessage(wire.HelloMessage([bytes(513)], 0.0)),
        wire.StoredMessage([wire.VerdictMessage(-1, 0)], None),
        wire.StoredMessage([wire.VerdictMessage(0, -1)], None),
    ],
)
def test_what_is_too_long_or_out_of_range_is_not_decoded(message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolViolation):
        decode(type(message), encode(message))


@pytest.mark.parametrize(
    "message",
    [
        wire.StoreMessage([b"no record"], None),
        wire.PingMessage(wire.HelloMessage([], float("nan"))),
        wire.PingMessage(wire.HelloMessage([], float("inf"))),
    ],
)
def test_what_decodes_but_makes_no_sense_is_a_violation(message: wire.RequestMessage) -> None:
    with pytest.raises(ProtocolViolation):
        wire.request_from_wire(message)


def test_a_contact_with_another_kind_of_id_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        wire.reply_from_wire(wire.NearMessage([wire.ContactMessage(bytes(38), [])], None), 1)


def test_a_verdict_of_a_later_version_is_a_refusal() -> None:
    reply = wire.reply_from_wire(wire.StoredMessage([wire.VerdictMessage(63, 0)], None), 0)
    assert reply == q.Stored(((Verdict.OVER_QUOTA, 0),), None)


def test_addresses_that_make_no_sense_here_are_left_out() -> None:
    odd = [b"", b"\xff\xff", parse_addr("/ip4/0.0.0.0/tcp/1").to_bytes(), parse_addr("/ip4/9.9.9.9/tcp/0").to_bytes()]
    assert wire.addrs_from_wire([*odd, ADDR]) == [parse_addr("/ip4/198.51.100.7/tcp/4001")]
    hello = wire.request_from_wire(wire.PingMessage(wire.HelloMessage([*odd, ADDR], 0.0))).hello
    assert hello == q.Hello((ADDR,))


def test_we_name_loopback_only_when_there_is_nothing_else() -> None:
    loopback, home = parse_addr("/ip4/127.0.0.1/tcp/1"), parse_addr("/ip4/192.168.1.2/tcp/1")
    with_id = parse_addr(f"/ip4/192.168.1.2/tcp/1/p2p/{KEYS.peer_id}")
    assert wire.addrs_to_wire([loopback, with_id, home]) == (home.to_bytes(),)
    assert wire.addrs_to_wire([loopback]) == (loopback.to_bytes(),)
    assert wire.addrs_to_wire([]) == ()
