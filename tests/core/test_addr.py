"""Addresses: what users type, what peers send."""

from __future__ import annotations

import base64
import contextlib

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.addr import (
    CircuitPlace,
    circuit_addr,
    circuit_place,
    decode_addr,
    is_dialable,
    is_relayed,
    normal,
    parse_addr,
    reach,
    split_peer,
    tcp_addr,
    tcp_place,
    with_peer,
)
from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.keys import Keypair
from peerd.core.limits import ADDR_BYTES
from peerd.core.varint import encode_varint

PEER = Keypair.from_seed(bytes(32)).peer_id
RELAY = Keypair.from_seed(b"r" * 32).peer_id


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/198.51.100.7/tcp/31337",
        "/ip6/::1/tcp/0",
        "/dns4/backbone.example.org/tcp/4001",
        "/dns/localhost/tcp/4001",
        "/memory/17",
        "/ip4/1.2.3.4/udp/4001/quic-v1",
    ],
)
def test_an_address_survives_text_bytes_and_a_peer_id(text: str) -> None:
    addr = parse_addr(text)
    assert str(addr) == text
    assert decode_addr(addr.to_bytes()) == addr
    full = with_peer(addr, PEER)
    assert str(full) == f"{text}/p2p/{PEER}"
    assert parse_addr(str(full)) == full
    assert split_peer(full) == (addr, PEER)
    assert split_peer(addr) == (addr, None)
    assert with_peer(full, PEER) == full
    assert tcp_place(full) == tcp_place(addr)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "127.0.0.1:4000",
        "/ip4/300.1.1.1/tcp/1",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3.4/tcp/70000",
        "/ip4/1.2.3.4/tpc/80",
        "/dns4/bad name/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/ip4/1.2.3.4/tcp/1/p2p/nonsense",
        "/unix/tmp/x",
        "/ip4/1.2.3.4/" + "x" * 600,
        "/ip4/1.2.3.4/tcp/1\n",
    ],
)
def test_a_wrong_address_is_named_in_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_addr(text)
    assert "is not an address" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_cut_anywhere_is_a_violation_or_a_shorter_address() -> None:
    raw = with_peer(parse_addr("/dns4/a.example/tcp/4001"), PEER).to_bytes()
    for end in range(len(raw)):
        with contextlib.suppress(ProtocolViolation):
            assert raw.startswith(decode_addr(raw[:end]).to_bytes())


def test_an_overlong_address_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        decode_addr(b"\x04\x01\x02\x03\x04" * (ADDR_BYTES // 5 + 1))


def test_reach_and_dialable_tell_kinds_apart() -> None:
    assert [reach(parse_addr(f"/ip4/{ip}/tcp/1")) for ip in ("127.0.0.1", "192.168.1.1", "8.8.8.8")] == [0, 1, 2]
    assert reach(parse_addr("/dns4/example.org/tcp/1")) == 2
    assert not is_dialable(parse_addr("/ip4/0.0.0.0/tcp/1"))
    assert not is_dialable(parse_addr("/ip4/1.2.3.4/tcp/0"))
    assert is_dialable(parse_addr("/memory/3"))
    assert not is_dialable(parse_addr("/ip6/fe80::1/tcp/1"))  # on which interface?
    assert reach(parse_addr("/ip4/100.64.0.1/tcp/1")) == 1  # a provider's inside


def test_an_ipv4_address_in_ipv6_clothes_is_known_as_what_it_is() -> None:
    mapped = with_peer(parse_addr("/ip6/::ffff:1.2.3.4/tcp/4001"), PEER)
    assert normal(mapped) == with_peer(tcp_addr("1.2.3.4", 4001), PEER)
    assert tcp_addr("::ffff:1.2.3.4", 4001) == tcp_addr("1.2.3.4", 4001)
    unlike = parse_addr("/ip6/2600::ffff:1.2.3.4/tcp/4001")
    assert normal(unlike) == unlike
    assert is_relayed(parse_addr(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit"))


def test_tcp_places_are_read_and_written() -> None:
    assert tcp_place(tcp_addr("1.2.3.4", 80)) == ("ip4", "1.2.3.4", 80)
    assert tcp_place(tcp_addr("fe80::1%eth0", 80)) == ("ip6", "fe80::1", 80)
    assert tcp_place(parse_addr("/dns6/x.org/tcp/9")) == ("dns6", "x.org", 9)
    assert tcp_place(parse_addr("/ip4/1.2.3.4/udp/80")) is None
    assert tcp_place(parse_addr("/ip4/1.2.3.4/tcp/80/ws")) is None


def test_a_circuit_address_names_its_relay_with_and_without_the_peer_behind_it() -> None:
    begin = parse_addr("/ip4/1.2.3.4/tcp/4001")
    circuit = circuit_addr(begin, RELAY)
    assert str(circuit) == f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit"
    assert circuit_addr(with_peer(begin, RELAY), RELAY) == circuit
    assert circuit_place(circuit) == circuit_place(with_peer(circuit, PEER)) == CircuitPlace(RELAY, begin)
    assert split_peer(with_peer(circuit, PEER)) == (circuit, PEER)
    unplaced = circuit_addr(None, RELAY)
    assert str(unplaced) == f"/p2p/{RELAY}/p2p-circuit"
    assert circuit_place(unplaced) == circuit_place(with_peer(unplaced, PEER)) == CircuitPlace(RELAY, None)
    assert [is_dialable(addr) for addr in (circuit, with_peer(circuit, PEER), unplaced)] == [True] * 3


def test_chains_of_relays_and_relays_without_a_place_are_not_dialed() -> None:
    circuit = with_peer(circuit_addr(parse_addr("/ip4/1.2.3.4/tcp/4001"), RELAY), PEER)
    others = [
        f"{circuit}/p2p-circuit",
        "/p2p-circuit",
        "/ip4/1.2.3.4/tcp/4001/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{RELAY}/p2p-circuit/ip4/1.2.3.4",
        f"/ip4/0.0.0.0/tcp/4001/p2p/{RELAY}/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/0/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ]
    assert [is_dialable(parse_addr(text)) for text in others] == [False] * len(others)
    assert [circuit_place(parse_addr(text)) for text in others[:4]] == [None] * 4
    assert all(is_relayed(parse_addr(text)) for text in others)


def test_a_port_that_looks_like_a_circuit_is_a_port() -> None:
    addr = parse_addr("/ip4/1.2.3.4/tcp/41474")
    assert addr.to_bytes().endswith(b"\xa2\x02")
    assert (is_relayed(addr), circuit_place(addr), is_dialable(addr)) == (False, None, True)


PIECES = ["xn--", "a", ".", "-", "_", "b" * 63, "nxasmq6b", "99999999999", "A1", "ws"]
NAMES = st.text("aZ0_-.xn", max_size=70) | st.builds("".join, st.lists(st.sampled_from(PIECES), max_size=7))


@given(NAMES, st.sampled_from([0x35, 0x36, 0x37, 0x38]))
def test_each_name_that_a_peer_sends_is_refused_or_printed_and_read_again(name: str, family: int) -> None:
    raw = bytes([family, len(name)]) + name.encode() + b"\x06\x0f\xa1" if len(name) < 0x80 else b""
    with contextlib.suppress(ProtocolViolation):
        addr = decode_addr(raw)
        assert addr.to_bytes() == raw
        assert parse_addr(str(addr)) == addr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_backbone", "'my_backbone' has an underscore, which no host name may have: give that machine another name"),
        ("a..b", "'a..b' is not a host name: it needs parts of 1 to 63 letters, digits and '-'"),
        ("a" * 64, "parts of 1 to 63"),
        ("-a", "letters, digits and '-'"),
        (".".join("abcdefgh" for _ in range(29)), "is not a host name"),
        ("ab--c", "'ab--c' is not accepted as a host name: it has '--', and is no valid 'xn--' name"),
        ("tcp", "'tcp' is not accepted as a host name: it names a protocol: write 'tcp.' or its IP"),
    ],
)
def test_a_name_that_no_machine_can_have_is_refused_with_one_reason(name: str, why: str) -> None:
    raw = b"\x36" + encode_varint(len(name)) + name.encode() + b"\x06\x0f\xa1"
    with pytest.raises(ProtocolViolation) as sent:
        decode_addr(raw)
    with pytest.raises(ConfigError) as typed:
        parse_addr(f"/dns4/{name}/tcp/4001/p2p/{PEER}")
    assert why in str(sent.value)
    assert str(sent.value) in str(typed.value)
    assert "odepoint" not in str(typed.value)


@pytest.mark.parametrize("name", ["a", "a.", "A.b-c.D9", "xn--nxasmq6b", "1.2.3.4", "b" * 63, "ws.", "tcp.dns4"])
def test_a_name_that_a_machine_can_have_is_taken(name: str) -> None:
    addr = parse_addr(f"/dns4/{name}/tcp/4001/p2p/{PEER}")
    assert str(decode_addr(addr.to_bytes())) == f"/dns4/{name}/tcp/4001/p2p/{PEER}"


def test_a_peer_id_as_a_cid_is_the_same_peer() -> None:
    cid, usual = b"\x01\x72" + PEER.raw, with_peer(parse_addr("/ip4/1.2.3.4/tcp/1"), PEER)
    base32 = "b" + base64.b32encode(cid).decode().lower().rstrip("=")
    for text in (base32, "z" + base58.b58encode(cid).decode(), "f" + cid.hex()):
        assert parse_addr(f"/ip4/1.2.3.4/tcp/1/p2p/{text}") == usual
    sent = b"\x04\x01\x02\x03\x04\x06\x00\x01\xa5\x03" + bytes([len(cid)]) + cid
    assert decode_addr(sent) == usual
    assert split_peer(decode_addr(sent)) == (parse_addr("/ip4/1.2.3.4/tcp/1"), PEER)
    circuit = sent + b"\xa2\x02" + sent[8:]
    assert circuit_place(decode_addr(circuit)) == CircuitPlace(PEER, parse_addr("/ip4/1.2.3.4/tcp/1"))
    other = sent[:11] + b"\x01\x70" + sent[13:]  # the CID of another kind of content
    with pytest.raises(ProtocolViolation, match="Ed25519"):
        decode_addr(other)
