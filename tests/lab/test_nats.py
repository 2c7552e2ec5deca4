"""The wide lab: every kind of router maps and filters as its name says, lines have their delays, rates and losses."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scripts import lab as module
from scripts.lab import Kind, Space, Unexpected, WideHost, WideLab, why_not_wide
from scripts.waiting import eventually

pytestmark = [pytest.mark.lab, pytest.mark.socket, pytest.mark.slow]

NATS: list[Kind] = ["full-cone", "addr-restricted", "port-restricted", "symmetric"]
CLOSED: list[Kind] = ["port-restricted", "symmetric", "firewall"]
PORT = 31337
ANSWERED_S = 1.0  # two that call each other over a fifth of a second have had the kernels' first answers
ESTABLISHED = 1  # of Linux's TCP states
ROUNDS = 20  # of forgetting
SOON_S = 0.3  # what does not come through a network without delay by then was dropped
Address = tuple[str, int]


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def bound(stack: contextlib.ExitStack, space: Space, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    made = stack.enter_context(space.socket(kind=kind))
    made.settimeout(10)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("", port))
    return made


def listening(stack: contextlib.ExitStack, space: Space, port: int = PORT) -> socket.socket:
    made = bound(stack, space, port)
    made.listen(16)
    return made


def connected(stack: contextlib.ExitStack, space: Space, to: Address, port: int = 0) -> socket.socket:
    made = bound(stack, space, port)
    made.connect(to)
    return made


def accepted(stack: contextlib.ExitStack, listener: socket.socket) -> tuple[socket.socket, Address]:
    connection, address = listener.accept()
    connection.settimeout(10)
    return stack.enter_context(connection), address


def tried(space: Space, to: Address, port: int = 0) -> str:
    """The outcome of a connection attempt: "open", "refused" or "silence"."""
    with contextlib.ExitStack() as stack:
        attempt = bound(stack, space, port)
        attempt.settimeout(SOON_S)
        try:
            attempt.connect(to)
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "silence"
        return "open"


def outside(stack: contextlib.ExitStack, host: WideHost, server: WideHost, port: int = PORT) -> Address:
    """Open a connection from a port of `host` and leave it open: what the server sees."""
    with listening(stack, server, 6000) as listener:
        connected(stack, host, (server.ip, 6000), port)
        return accepted(stack, listener)[1]


@pytest.mark.parametrize("kind", NATS)
def test_a_nat_gives_one_outside_port_to_a_socket_unless_it_is_symmetric(
    wide: WideLab, sockets: contextlib.ExitStack, kind: Kind
) -> None:
    host, servers = wide.host("host", kind), [wide.host(f"s{i}") for i in range(4)]
    seen = [outside(sockets, host, server) for server in servers]
    assert {ip for ip, _ in seen} == {host.public_ip}
    assert host.public_ip != host.ip
    assert len({port for _, port in seen}) == (4 if kind == "symmetric" else 1)
    assert PORT not in {port for _, port in seen}


@pytest.mark.parametrize("kind", ["none", "firewall"])
def test_hosts_behind_a_router_that_does_not_translate_have_public_addresses(
    wide: WideLab, sockets: contextlib.ExitStack, kind: Kind
) -> None:
    home, server = wide.router("home", kind), wide.host("server")
    hosts = [wide.host(name, home) for name in ("a", "b")]
    assert [outside(sockets, host, server) for host in hosts] == [(host.ip, PORT) for host in hosts]


@pytest.mark.parametrize(
    ("kind", "same_host", "stranger"),
    [
        ("none", "open", "open"),
        ("full-cone", "open", "open"),
        ("addr-restricted", "open", "silence"),
        ("port-restricted", "silence", "silence"),
        ("symmetric", "silence", "silence"),
        ("firewall", "silence", "silence"),
    ],
)
def test_a_router_lets_in_whom_its_kind_does(
    wide: WideLab, sockets: contextlib.ExitStack, kind: Kind, same_host: str, stranger: str
) -> None:
    host, server, other = wide.host("host", kind), wide.host("server"), wide.host("other")
    listening(sockets, host)
    assert tried(server, (host.public_ip, PORT)) == ("open" if kind == "none" else "silence")
    mapped = outside(sockets, host, server)
    assert tried(other, mapped) == stranger
    assert tried(server, mapped) == same_host


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize(("unexpected", "answer"), [("drop", "silence"), ("reset", "refused")])
def test_an_unexpected_syn_is_dropped_or_refused_as_was_chosen(
    wide: WideLab, sockets: contextlib.ExitStack, kind: Kind, unexpected: Unexpected, answer: str
) -> None:
    host, server, other = wide.host("host", kind, unexpected), wide.host("server"), wide.host("other")
    listening(sockets, host)
    mapped = outside(sockets, host, server)
    assert tried(other, mapped) == answer
    assert tried(other, (host.public_ip, 4321)) == answer


@pytest.mark.parametrize("unexpected", ["drop", "reset"])
@pytest.mark.parametrize(
    ("a_kind", "b_kind", "opens"),
    [
        ("port-restricted", "port-restricted", True),
        ("port-restricted", "firewall", True),
        ("addr-restricted", "firewall", True),
        ("port-restricted", "symmetric", False),
    ],
)
def test_two_that_call_each_other_at_once_meet_where_both_keep_their_ports(
    wide: WideLab, sockets: contextlib.ExitStack, a_kind: Kind, b_kind: Kind, opens: bool, unexpected: Unexpected
) -> None:
    """The lines are so long that both calls are under way before one can be refused."""
    server = wide.host("server")
    hosts = [wide.host(n, kind, unexpected, delay_ms=100) for n, kind in (("a", a_kind), ("b", b_kind))]
    places = [outside(sockets, host, server) for host in hosts]
    calls = [bound(sockets, host, PORT) for host in hosts]
    for call, place in zip(calls, reversed(places), strict=True):
        call.setblocking(False)
        assert call.connect_ex(place) != 0

    def states() -> set[int]:
        return {call.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for call in calls}

    assert eventually(lambda: states() == {ESTABLISHED}, ANSWERED_S) is opens, states()


def test_neighbours_meet_on_their_lan_and_not_through_the_outside_of_their_router(
    wide: WideLab, sockets: contextlib.ExitStack
) -> None:
    home, server = wide.router("home", "full-cone"), wide.host("server")
    a, b = wide.host("a", home), wide.host("b", home)
    listening(sockets, a)
    mapped = outside(sockets, a, server)
    assert tried(server, mapped) == "open"
    assert tried(b, mapped) == "silence"
    assert tried(b, (a.ip, PORT)) == "open"
    places = {outside(sockets, host, server, port) for host, port in ((a, 5001), (b, 5001), (b, 5002))}
    assert len(places) == 3


@pytest.mark.parametrize("kind", NATS)
def test_a_router_that_forgot_its_mappings_gives_other_ports_and_ends_old_connections(
    wide: WideLab, sockets: contextlib.ExitStack, kind: Kind
) -> None:
    host, server, other = wide.host("host", kind), wide.host("server"), wide.host("other")
    listening(sockets, host)
    with listening(sockets, server, 6000) as listener:
        call = connected(sockets, host, (server.ip, 6000), PORT)
        served, before = accepted(sockets, listener)
    assert host.router is not None
    host.router.forget()
    assert tried(other, before) == "silence"
    call.sendall(b"lost")
    with pytest.raises(ConnectionResetError):  # the server sees a packet from a port that it does not know
        call.recv(4)
    served.settimeout(SOON_S)
    with pytest.raises(TimeoutError):
        served.recv(4)
    assert outside(sockets, host, other)[1] != before[1]


def test_a_cone_that_forgot_gives_one_outside_port_to_calls_that_are_all_made_again_at_once(
    wide: WideLab, sockets: contextlib.ExitStack
) -> None:
    host, servers = wide.host("host", "port-restricted"), [wide.host(f"s{i}") for i in range(6)]
    listeners = [listening(sockets, server) for server in servers]
    places = [(server.ip, PORT) for server in servers]
    calls = [connected(sockets, host, place, PORT) for place in places]
    before = [accepted(sockets, listener)[1] for listener in listeners]
    assert host.router is not None
    together = threading.Barrier(len(servers))

    def again(number: int) -> None:
        together.wait()
        with contextlib.suppress(OSError):
            calls[number].sendall(b"lost")
            calls[number].recv(4)
        calls[number].close()
        calls[number] = connected(sockets, host, places[number], PORT)

    for _ in range(ROUNDS):
        host.router.forget()
        threads = [threading.Thread(target=again, args=(number,)) for number in range(len(servers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [accepted(sockets, listener)[1] for listener in listeners]
        assert len(set(seen)) == 1
        assert seen != before
        before = seen


@pytest.mark.parametrize("kind", ["port-restricted", "symmetric", "firewall"])
def test_a_forwarded_port_leads_to_its_host(wide: WideLab, sockets: contextlib.ExitStack, kind: Kind) -> None:
    home, stranger = wide.router("home", kind), wide.host("stranger")
    host = wide.host("host", home)
    listening(sockets, host)
    assert tried(stranger, (host.public_ip, PORT)) == "silence"
    home.forward("tcp", PORT, host)
    assert tried(stranger, (host.public_ip, PORT)) == "open"
    assert tried(stranger, (host.public_ip, PORT + 1)) == "silence"


def test_a_private_address_leads_nowhere_on_the_wan(wide: WideLab, sockets: contextlib.ExitStack) -> None:
    host, stranger = wide.host("host", "full-cone"), wide.host("stranger")
    listening(sockets, host)
    assert tried(stranger, (host.ip, PORT)) == "silence"


@pytest.mark.alone
def test_round_trips_take_both_delays_twice(wide: WideLab, sockets: contextlib.ExitStack) -> None:
    a, b = wide.host("a", "port-restricted", delay_ms=30), wide.host("b", delay_ms=20)
    listening(sockets, b)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        connected(sockets, a, (b.ip, PORT))
        took.append(time.perf_counter() - began)
    assert 0.1 <= min(took) < 0.12, took
    assert a.line is not None
    a.line.change(delay_ms=80)
    began = time.perf_counter()
    connected(sockets, a, (b.ip, PORT))
    assert time.perf_counter() - began >= 0.2


@pytest.mark.alone
def test_a_line_that_is_down_loses_all_and_then_goes_on(wide: WideLab, sockets: contextlib.ExitStack) -> None:
    a, b = wide.host("a"), wide.host("b", "port-restricted")
    with listening(sockets, a) as listener:
        call = connected(sockets, b, (a.ip, PORT))
        served, _ = accepted(sockets, listener)
    b.line.cut(1.0)
    began = time.perf_counter()
    served.sendall(b"late")
    assert call.recv(4) == b"late"
    assert 1.0 <= time.perf_counter() - began < 9
    b.line.cut()
    assert tried(b, (a.ip, PORT)) == "silence"
    b.line.mend()
    assert tried(b, (a.ip, PORT)) == "refused"  # nobody listens there any more, and says so


@pytest.mark.parametrize(("at_sender", "at_receiver", "share"), [({"loss": 0.2}, {}, 0.8), ({}, {"twice": 0.2}, 1.2)])
@pytest.mark.alone
def test_frames_are_lost_or_come_twice_as_often_as_was_chosen(
    wide: WideLab,
    sockets: contextlib.ExitStack,
    at_sender: dict[str, float],
    at_receiver: dict[str, float],
    share: float,
) -> None:
    a, b = wide.host("a", **at_sender), wide.host("b", **at_receiver)
    sender, receiver = bound(sockets, a, 0, socket.SOCK_DGRAM), bound(sockets, b, PORT, socket.SOCK_DGRAM)
    receiver.settimeout(0.05)
    arrived = 0
    for _ in range(20):  # a receiver's buffer holds about 250
        for _ in range(100):
            sender.sendto(b"?", (b.ip, PORT))
        with contextlib.suppress(TimeoutError):
            while receiver.recv(10):
                arrived += 1
    assert abs(arrived - 2000 * share) < 5 * 18  # five times the spread of 2000 throws


@pytest.mark.parametrize(("rate_mbit", "delay_ms", "loss"), [(20, 0, 0), (100, 10, 0), (100, 1, 0.0005)])
@pytest.mark.alone
def test_a_transfer_takes_nearly_all_of_a_line(
    wide: WideLab, sockets: contextlib.ExitStack, rate_mbit: float, delay_ms: float, loss: float
) -> None:
    a, b = wide.host("a", up_mbit=rate_mbit, delay_ms=delay_ms, loss=loss), wide.host("b", "firewall")
    with listening(sockets, a) as listener:
        call = connected(sockets, b, (a.ip, PORT))
        served, _ = accepted(sockets, listener)
    amount = int(rate_mbit * 1e6 / 8 * 3)

    def send() -> None:
        served.sendall(bytes(amount))

    before = b.line.traffic()
    sender = threading.Thread(target=send)
    sender.start()
    began, received = time.perf_counter(), 0
    while received < amount:
        received += len(call.recv(1 << 18))
    share = amount * 8e-6 / (time.perf_counter() - began) / rate_mbit
    sender.join()
    assert 0.75 <= share <= 1.0, share
    crossed = b.line.traffic().since(before)
    assert amount <= crossed.received <= 1.1 * amount
    assert 0 < crossed.sent < 0.1 * amount


def test_killing_a_host_ends_its_processes_and_their_connections(wide: WideLab, sockets: contextlib.ExitStack) -> None:
    a, b = wide.host("a", "port-restricted"), wide.host("b")
    listener = listening(sockets, b)
    script = f"import socket; s = socket.create_connection(({b.ip!r}, {PORT})); s.recv(1)"
    process = a.popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    served, _ = accepted(sockets, listener)
    a.kill()
    assert served.recv(1) == b""
    assert process.wait(timeout=10) != 0
    assert not a.pids()


@pytest.mark.usefixtures("_needs_a_wide_lab")
def test_nothing_is_left_of_a_wide_lab() -> None:
    with WideLab() as lab:
        host = lab.host("host", "symmetric")
        names, running = lab.labels(), lab.wan.pids()
        assert len(names) == 3
        assert host.label in names
        assert len(running) == 1
    assert not set(names) & set(module.labels())
    assert not any(module.born(pid) for pid in running)


def test_why_there_can_be_no_wide_lab_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not_wide.cache_clear()
    have = module.shutil.which
    monkeypatch.setattr(module.shutil, "which", lambda name: None if name in ("gcc", "nft") else have(name))
    try:
        assert why_not_wide() == "a wide network lab needs nft of nftables and gcc"
    finally:
        why_not_wide.cache_clear()
