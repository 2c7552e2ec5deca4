"""A signed record that is played back by somebody else, over real sockets: refused, named, and nothing is changed.

Old versions while a newer one stands and after it has ended, what was withdrawn, and records under another key, of
another run, or as another's own; offered to the peer that stores them, and given as answers to whoever reads.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.core.messages.progress import progress_key, stage_key
from peerd.core.record import Record
from peerd.machine.dht.store import Verdict
from peerd.net.clock import RealClock
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.service.dht import codec as wire
from peerd.service.peer_stack import PeerStack, peer_stack
from peerd.service.rpc.types import Answer, Incoming

pytestmark = pytest.mark.socket

KEY, OTHER_RUN = stage_key("a", 0), stage_key("b", 0)
TTL_S = 600.0


class Calendar:
    """Everybody's wall clock, which the test can put forward."""

    ahead_s = 0.0


class CalendarClock(RealClock):
    def __init__(self, calendar: Calendar) -> None:
        super().__init__(1)
        self._calendar = calendar

    def wall(self) -> float:
        return super().wall() + self._calendar.ahead_s


async def values(peer: PeerStack) -> list[bytes]:
    return [record.value for record in await peer.dht.get(KEY)]


@dataclass
class Cast:
    """`holder` stores what `publisher` announces; `mallory` speaks the DHT's protocol and plays records back."""

    calendar: Calendar
    publisher: PeerStack
    holder: PeerStack
    mallory: PeerStack

    async def put(self, value: bytes, ttl_s: float = TTL_S) -> Record:
        """The publisher announces `value`; the record as everybody can read it."""
        await self.publisher.dht.put(KEY, value, ttl_s=ttl_s)
        (record,) = await self.holder.dht.get(KEY)
        return record

    async def replay(self, *records: Record) -> list[Verdict]:
        body = wire.StoreMessage([record.encode() for record in records], None)
        peer = self.holder.host.id
        answer = await self.mallory.rpc.call(peer, "dht/3/store", body, wire.StoredMessage, timeout_s=5)
        return [Verdict(said.verdict) for said in answer.body.verdicts]


@asynccontextmanager
async def cast() -> AsyncIterator[Cast]:
    calendar = Calendar()
    async with trio.open_nursery() as nursery:
        peers: list[PeerStack] = []
        for name in ("holder", "publisher", "mallory"):
            keypair = Keypair.from_seed(name.encode().ljust(32, b"."))
            stack = peer_stack(keypair, CalendarClock(calendar), [TcpTransport()])
            bootstrap = peers[0].host.addrs() if peers else []
            await nursery.start(
                stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")], None if name == "mallory" else bootstrap
            )
            peers.append(stack)
        holder, publisher, mallory = peers
        await mallory.host.connect_addr(holder.host.addrs()[0])
        yield Cast(calendar, publisher, holder, mallory)
        nursery.cancel_scope.cancel()


async def test_an_older_version_does_not_replace_the_newer_one_and_its_bearer_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cast() as c:
        old = await c.put(b"old")
        await c.put(b"new")
        with caplog.at_level(logging.DEBUG, "peerd.dht"):
            assert await c.replay(old) == await c.replay(old) == [Verdict.STALE]
        said = [line for line in caplog.messages if c.mallory.host.id.text in line]
        assert len(said) == 1  # once a minute is enough
        assert "outdated" in said[0]
        assert c.publisher.host.id.text in said[0]
        assert await values(c.holder) == await values(c.publisher) == [b"new"]


async def test_an_older_version_does_not_come_back_after_the_newer_one_has_ended() -> None:
    async with cast() as c:
        old = await c.put(b"old")
        await c.put(b"new")
        c.calendar.ahead_s = TTL_S + 60
        assert await c.replay(old) == [Verdict.UNTIMELY]
        assert await values(c.holder) == []


async def test_an_older_version_with_a_longer_lease_ends_with_the_newer_one() -> None:
    async with cast() as c:
        old = await c.put(b"old", ttl_s=TTL_S)
        await c.put(b"new", ttl_s=60)
        c.calendar.ahead_s = 120.0
        # Its publisher has withdrawn the newer one at its end, for as long as a copy of the older one could count.
        await c.publisher.dht.withdraw(KEY)
        assert await c.replay(old) == [Verdict.STALE]
        assert await values(c.holder) == []
        c.calendar.ahead_s = TTL_S + 60
        assert await c.replay(old) == [Verdict.UNTIMELY]
        assert await values(c.holder) == []


async def test_what_was_withdrawn_does_not_come_back() -> None:
    async with cast() as c:
        old = await c.put(b"old")
        await c.publisher.dht.withdraw(KEY)
        assert await c.replay(old) == [Verdict.STALE]
        assert await values(c.holder) == []


@pytest.mark.parametrize("key", [OTHER_RUN, progress_key("a")], ids=["another run", "another key"])
async def test_a_record_under_another_key_is_refused_and_its_bearer_named_and_dropped(
    key: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with cast() as c:
        genuine = await c.put(b"mine")
        moved = replace(genuine, key=key)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "peerd.dht"):
            assert await c.replay(moved) == [Verdict.FORGED]
        assert c.mallory.host.id.text in caplog.text
        assert await c.holder.dht.get(moved.key) == []
        assert await values(c.holder) == [b"mine"]


async def test_a_record_as_ones_own_or_with_a_later_version_or_lease_is_forged() -> None:
    for change in ("publisher", "version", "expires_ms"):
        async with cast() as c:
            genuine = await c.put(b"mine")
            changed = c.mallory.host.id if change == "publisher" else getattr(genuine, change) + 1000
            assert await c.replay(replace(genuine, **{change: changed})) == [Verdict.FORGED]
            assert await values(c.holder) == [b"mine"]


@pytest.mark.parametrize("other_run", [False, True])
async def test_a_reader_is_not_deceived_by_a_holder_that_answers_with_old_or_foreign_records(
    other_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with cast() as c:
        old = await c.put(b"old")
        await c.publisher.dht.put(OTHER_RUN, b"of another run", ttl_s=TTL_S)
        (foreign,) = await c.holder.dht.get(OTHER_RUN)
        await c.put(b"new")
        asked = trio.Event()

        async def answer(incoming: Incoming[wire.FindMessage]) -> Answer[wire.RecordsMessage]:
            asked.set()
            return Answer(wire.RecordsMessage([[(foreign if other_run else old).encode()]], [], None))

        async def pong(incoming: Incoming[wire.PingMessage]) -> Answer[wire.PongMessage]:
            return Answer(wire.PongMessage(None))

        c.mallory.rpc.serve("dht/3/get", wire.FindMessage, answer)
        c.mallory.rpc.serve("dht/3/ping", wire.PingMessage, pong)
        hello = wire.HelloMessage([addr.to_bytes() for addr in c.mallory.host.addrs()], RealClock().wall())
        to = c.holder.host.id
        await c.mallory.rpc.call(to, "dht/3/ping", wire.PingMessage(hello), wire.PongMessage, timeout_s=5)
        with caplog.at_level(logging.WARNING, "peerd.dht"):
            assert await values(c.holder) == [b"new"]
        assert asked.is_set()
        assert (c.mallory.host.id.text in caplog.text) == other_run  # an old record may be an honest one
