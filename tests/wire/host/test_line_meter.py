"""Line meter: traffic of real connections is measured, traffic inside the machine does not count as the line's."""

from __future__ import annotations

import functools
import socket

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.run.runfile import LimitsSection
from peerd.wire.clock import RealClock
from peerd.wire.host import line_meter
from peerd.wire.host.host import Host
from peerd.wire.host.line_meter import LineMeter
from peerd.wire.link.link_stream import Stream
from peerd.wire.tcp.rate_limit import LimitedLine
from peerd.wire.tcp_info import tcp_info

LOOPBACK = parse_addr("/ip4/127.0.0.1/tcp/0")
MBIT = 20.0


def known() -> bool:
    with socket.socket() as sock:
        return tcp_info(sock) is not None


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.alone
async def test_both_ends_measure_what_passes_and_not_what_stays_in_the_machine() -> None:
    if not known():
        pytest.skip("this system does not say what was acknowledged")
    limits = LimitsSection(upload_mbit=MBIT)
    hosts = [
        Host(Keypair.from_seed(bytes([number]) * 32), RealClock(number), [LimitedLine(limits).tcp()])
        for number in (1, 2)
    ]

    async def read(stream: Stream) -> None:
        while await stream.receive_some(1 << 16):
            pass

    async def write(stream: Stream) -> None:
        while True:
            await stream.send(bytes(1 << 16))

    async with trio.open_nursery() as nursery:
        for host in hosts:
            host.handle("/sink/1", read)
            await nursery.start(functools.partial(host.run, [LOOPBACK]))
            nursery.start_soon(LineMeter(host, lambda link: True).run)
        sender, taker = hosts
        peer = await sender.connect_addr(taker.addrs()[0])
        nursery.start_soon(write, await sender.open_stream(peer, "/sink/1"))
        meter = LineMeter(sender)
        await trio.sleep(1.6)
        found = sender.line.up.most_bytes_per_s, taker.line.down.most_bytes_per_s
        assert meter._look() == line_meter.Count(0, 0), "loopback was taken for the line"
        nursery.cancel_scope.cancel()
    for rate in found:
        assert 0.4 * MBIT < rate * 8e-6 < 1.15 * MBIT
    assert sender.line.down.most_bytes_per_s == taker.line.up.most_bytes_per_s == 0
