"""Answers of routers over real sockets: NAT-PMP byte for byte, and UPnP through the library."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from peerd.reach.gateway.natpmp import NatPmp, external_request, map_request, parse_external, parse_mapped
from peerd.reach.gateway.router import Mapped, NoMapping
from peerd.reach.gateway.upnp import UpnpRouter
from tests.worlds.processes.fakerouter import igd_router, natpmp_router

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("miniupnpc") is None, reason="the extra peerd[portmap] is not installed"
)
PUBLIC = ipaddress.IPv4Address("9.8.7.6")


def test_requests_are_those_of_rfc_6886() -> None:
    assert external_request().hex() == "0000"
    assert map_request(31337, 31337, 3600).hex() == "000200007a697a6900000e10"
    assert map_request(31337, 0, 0).hex() == "000200007a69000000000000"


def test_answers_are_read_strictly() -> None:
    assert parse_external(bytes.fromhex("008000000000004d09080706")) == PUBLIC
    assert parse_mapped(bytes.fromhex("008200000000004d7a697a6a00000e10"), 31337) == (31338, 3600)
    for raw, why in [
        ("", "is not NAT-PMP"),
        ("0081000000000000", "is not NAT-PMP"),
        ("0080000200000000", "switched off"),
        ("008000ff", "error 255"),
        ("008000000000004d090807", "has 11 bytes"),
        ("008000000000004d0908070600", "has 13 bytes"),
    ]:
        with pytest.raises(NoMapping, match=why):
            parse_external(bytes.fromhex(raw))
    with pytest.raises(NoMapping, match="port 31337 instead of 1"):
        parse_mapped(bytes.fromhex("008200000000004d7a697a6a00000e10"), 1)


@given(st.binary(max_size=20))
def test_whatever_answers_no_other_error_comes_of_it(raw: bytes) -> None:
    for head in (b"", b"\x00\x80\x00\x00", b"\x00\x82\x00\x00"):
        with contextlib.suppress(NoMapping):
            assert parse_external(head + raw).packed in raw
        with contextlib.suppress(NoMapping):
            outside, lease_s = parse_mapped(head + raw, 5)
            assert outside.to_bytes(2, "big") + lease_s.to_bytes(4, "big") in raw


@pytest.mark.socket
async def test_natpmp_maps_and_takes_back_though_packets_are_lost() -> None:
    async with natpmp_router() as router:
        router.silent, router.taken = 1, {4001}
        client = NatPmp(lambda: "127.0.0.1", router.port)
        with trio.fail_after(30):
            assert await client.map(4001, 3600) == Mapped(PUBLIC, 4002, 1200)
            assert router.mapped == {4001: 4002}
            await client.unmap(4001)
        assert router.mapped == {}
        router.result = 2
        with pytest.raises(NoMapping, match="switched off"):
            await client.map(4001, 3600)


@pytest.mark.socket
@pytest.mark.parametrize(("port", "lease_s"), [(0, 1200), (4001, 0)], ids=["no port", "no time"])
async def test_a_natpmp_router_that_promises_nothing_is_not_believed(port: int, lease_s: int) -> None:
    async with natpmp_router() as router:
        router.promise = port, lease_s
        with trio.fail_after(30), pytest.raises(NoMapping, match="no port, or no lease"):
            await NatPmp(lambda: "127.0.0.1", router.port).map(4001, 3600)


@pytest.mark.socket
async def test_without_a_natpmp_router_it_says_so() -> None:
    with pytest.raises(NoMapping, match="no router is known"):
        await NatPmp(lambda: None).map(1, 1)
    async with natpmp_router() as router:
        port = router.port
    with pytest.raises(NoMapping, match=r"no NAT-PMP at 127\.0\.0\.1: [Cc]onnection refused"):
        await NatPmp(lambda: "127.0.0.1", port).map(1, 1)


@needs_library
@pytest.mark.socket
async def test_upnp_maps_and_takes_back() -> None:
    with igd_router() as router, trio.fail_after(30):
        client = UpnpRouter(random.Random(1), router.url)
        assert await client.map(4001, 3600) == Mapped(PUBLIC, 4001, 3600)
        assert router.mapped == {4001: (4001, 3600)}
        await client.unmap(4001)
        assert router.mapped == {}


@needs_library
@pytest.mark.socket
async def test_upnp_takes_another_port_where_the_first_is_taken_and_keeps_to_it() -> None:
    with igd_router() as router, trio.fail_after(30):
        router.faults[4001] = "718 ConflictInMappingEntry"
        client = UpnpRouter(random.Random(1), router.url)
        mapped = await client.map(4001, 3600)
        assert mapped.port != 4001
        assert router.mapped == {mapped.port: (4001, 3600)}
        assert await client.map(4001, 3600) == mapped


@needs_library
@pytest.mark.socket
async def test_upnp_makes_do_with_a_router_that_maps_for_ever_only() -> None:
    with igd_router() as router, trio.fail_after(30):
        router.for_ever_only = True
        assert (await UpnpRouter(random.Random(1), router.url).map(4001, 3600)).lease_s == 0
        assert router.mapped == {4001: (4001, 0)}


@needs_library
@pytest.mark.socket
async def test_upnp_tells_the_routers_reason() -> None:
    with igd_router() as router, trio.fail_after(30):
        router.faults[4001] = "606 ActionNotAuthorized"
        with pytest.raises(NoMapping, match="Action not authorized"):
            await UpnpRouter(random.Random(1), router.url).map(4001, 3600)
        router.faults.clear()
        router.ip = ""
        with pytest.raises(NoMapping, match=r"UPnP"):
            await UpnpRouter(random.Random(1), router.url).map(4001, 3600)
    with pytest.raises(NoMapping, match=r"UPnP"):
        await UpnpRouter(random.Random(1), router.url).map(4001, 3600)
