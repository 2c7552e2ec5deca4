"""Identify messages of peers: read in parts, within bounds, and a peer that sends nonsense keeps its link."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr
from peerd.core.errors import Unreachable
from peerd.core.limits import IDENTIFY_BYTES, IDENTIFY_PARTS
from peerd.core.varint import encode_varint
from peerd.wire.host.identify import IDENTIFY, IDENTIFY_PUSH, send_identify
from peerd.wire.identify_message import Identify
from peerd.wire.link.link_stream import Stream
from peerd.wire.protobuf import bytes_field
from tests.worlds.network.hosts import ask, echo, running_hosts

LARGE = bytes_field(99, bytes(IDENTIFY_BYTES // 2))  # of a kind that is not known here


def part(raw: bytes) -> bytes:
    return encode_varint(len(raw)) + raw


async def told(said: bytes) -> tuple[bool, str]:
    """True, with its agent version, when a peer with this identify message is introduced; its link works always."""

    async def say(stream: Stream) -> None:
        await stream.send(said)
        await stream.aclose()

    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        a.unhandle(IDENTIFY_PUSH)
        b.handle(IDENTIFY, say)
        b.handle("/echo/1", echo)
        await a.connect(b.id, [hosts.addr("b")])
        info = await a.introduction(b.id, 10.0)
        assert await ask(a, b, b"still there") == b"still there"
        return info is not None, "" if info is None else info.agent


async def test_a_message_in_parts_is_read_as_one(autojump_clock: trio.testing.MockClock) -> None:
    parts = [Identify(agent_version=agent).encode() for agent in ("first", "second")]
    assert await told(b"".join(map(part, parts))) == (True, "second")


async def test_no_more_parts_are_read_than_are_allowed(autojump_clock: trio.testing.MockClock) -> None:
    parts = [Identify(agent_version=f"number {number}").encode() for number in range(IDENTIFY_PARTS + 5)]
    assert await told(b"".join(map(part, parts))) == (True, f"number {IDENTIFY_PARTS - 1}")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (encode_varint(IDENTIFY_BYTES + 1), "allowed"),
        (part(LARGE) + part(LARGE), "allowed"),
        (b"\xff" * 20, "longer"),
        (part(b"\x0a\x01")[:-1], "early"),
    ],
    ids=["too long", "too long together", "a length without end", "cut"],
)
async def test_what_is_no_introduction_is_logged_with_the_peers_name(
    said: bytes, why: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "peerd.wire"):
        assert await told(said) == (False, "")
    assert "violated the identify protocol" in caplog.text
    assert why in caplog.text


@pytest.mark.parametrize("name", ["my_node", "a..b", "a" * 64, "xn--a", "ab--c"])
async def test_a_peer_that_names_hosts_which_cannot_be_printed_spoils_nobodys_status(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    place = b"\x36" + encode_varint(len(name)) + name.encode() + b"\x06\x0f\xa1"
    other = parse_addr("/ip4/10.0.0.77/tcp/4001")
    said = part(Identify(listen_addrs=(place, other.to_bytes()), observed_addr=place).encode())

    async def say(stream: Stream) -> None:
        await stream.send(said)
        await stream.aclose()

    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        a.unhandle(IDENTIFY_PUSH)
        b.handle(IDENTIFY, say)
        await b.connect(a.id, [hosts.addr("a")])  # so that b is known by its own word alone
        info = await a.introduction(b.id, 10.0)
        assert info is not None
        assert [str(addr) for addr in info.addrs] == [str(addr) for addr in a.known_addrs(b.id)] == [str(other)]
        assert info.observed is None
        await hosts.stop("b")
        with pytest.raises(Unreachable, match=re.escape(str(other))):
            await a.connect(b.id)


async def test_a_push_changes_what_it_names_and_nothing_else(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        await a.connect(b.id, [hosts.addr("b")])
        before = await a.introduction(b.id, 10.0)
        assert before is not None
        assert before.observed is not None
        await trio.sleep(1)
        for update in (Identify(protocols=("/new/1",)), Identify(agent_version="new"), Identify()):
            await send_identify(await b.open_stream(a.id, IDENTIFY_PUSH), update)
            await trio.sleep(1)
        assert a.info(b.id) == replace(before, agent="new", protocols=("/new/1",))
        seen_anew = Identify(observed_addr=b"\x04\x01\x02\x03\x04\x06\x00\x01")
        await send_identify(await b.open_stream(a.id, IDENTIFY_PUSH), seen_anew)
        await trio.sleep(1)
        after = a.info(b.id)
        assert after is not None
        assert str(after.observed) == "/ip4/1.2.3.4/tcp/1"
