"""Calls over real hosts: the same cases, through TCP, Noise and yamux on loopback."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.role.peer_stack import peer_stack
from peerd.wire.clock import RealClock
from peerd.wire.faults import Faults
from peerd.wire.host.host import Host
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.kit.declared import ANY
from tests.worlds.machines import rpc_growing_cases, rpc_stream_cases
from tests.worlds.machines.fakehost import leaves
from tests.worlds.machines.rpc_cases import CASES, Case, Pair, Text, ask, echo

pytestmark = pytest.mark.socket
assert rpc_growing_cases.case is rpc_stream_cases.case  # their cases have joined by importing


class Crashes(logging.Handler):
    """The log of hosts on peers that broke a protocol, and of their supervisors, as (text, exception)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, BaseException | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and isinstance(record.args, tuple):
            error = next((arg for arg in record.args if isinstance(arg, BaseException)), None)
            self.seen.append((record.getMessage(), error))


class Noted(Faults):
    """Faults that are told each time; the log tells what repeats itself more and more rarely."""

    def __init__(self, crashes: Crashes) -> None:
        super().__init__()
        self._crashes = crashes

    def note(self, where: str, error: BaseException) -> None:
        super().note(where, error)
        self._crashes.seen += [(where, each) for each in leaves(error)]


@asynccontextmanager
async def tcp_pair() -> AsyncIterator[Pair]:
    crashes, log = Crashes(), logging.getLogger("peerd.wire")
    log.addHandler(crashes)
    log.propagate = False
    clock = RealClock(1)
    a, b = (peer_stack(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()]) for _ in range(2))
    try:
        async with trio.open_nursery() as nursery:
            for stack in (a, b):
                stack.host.faults = Noted(crashes)
                await nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
            a.host.learn(b.host.id, b.host.addrs())
            yield Pair(a.rpc, b.rpc, a.host, b.host, crashes.seen, lambda: cut(a.host))
            nursery.cancel_scope.cancel()
    finally:
        log.removeHandler(crashes)
        log.propagate = True


def cut(host: Host) -> None:
    for link in list(host.links):
        link.abort("the test cut it")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.slow
async def test_over_tcp(case: Case) -> None:
    async with tcp_pair() as pair:
        with trio.fail_after(60):
            await case(pair)


async def test_a_call_over_tcp_and_one_after_the_link_was_lost() -> None:
    async with tcp_pair() as pair:
        pair.b.serve("t/1/echo", Text, echo, declared=ANY)
        with trio.fail_after(60):
            assert await ask(pair) == "hi"
            pair.cut()
            while pair.a.status()["channels"]:
                await trio.lowlevel.checkpoint()
            assert await ask(pair) == "hi"
