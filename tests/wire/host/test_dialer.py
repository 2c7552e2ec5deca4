"""The address book and the race: order, bounds, one dial at a time."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, PEERS_KNOWN
from peerd.wire.host.dialer import STAGGER_S, AddressBook, Dialer
from tests.worlds.network.hosts import keypair

PEER, OTHER = keypair("peer").peer_id, keypair("other").peer_id
FAR, NEAR, HERE = (tcp_addr(ip, 4001) for ip in ("8.8.8.8", "192.168.1.5", "127.0.0.1"))


def test_what_worked_comes_first_then_what_is_near() -> None:
    book = AddressBook()
    book.learn(PEER, [FAR, HERE, NEAR, with_peer(FAR, PEER)])
    assert book.addrs(PEER) == [HERE, NEAR, FAR]
    book.worked(PEER, FAR)
    assert book.addrs(PEER) == [FAR, HERE, NEAR]


def test_what_cannot_be_dialed_or_names_another_peer_is_left_out() -> None:
    book = AddressBook()
    book.learn(PEER, [parse_addr("/ip4/0.0.0.0/tcp/1"), parse_addr("/ip4/1.2.3.4/tcp/0"), with_peer(FAR, OTHER)])
    assert book.addrs(PEER) == []


def test_the_book_is_bounded_and_keeps_what_worked() -> None:
    book = AddressBook()
    book.worked(PEER, FAR)
    book.learn(PEER, [tcp_addr("8.8.4.4", port) for port in range(1, 100)])
    assert len(book.addrs(PEER)) == ADDRS_PER_PEER
    assert book.addrs(PEER)[0] == FAR
    for number in range(PEERS_KNOWN + 10):
        book.learn(PeerId.from_public_key(number.to_bytes(32, "big")), [FAR])
    assert book.addrs(PEER) == []


async def test_the_next_address_starts_a_little_later_or_when_one_fails(autojump_clock: trio.testing.MockClock) -> None:
    starts: list[tuple[str, float]] = []

    async def attempt(addr: Multiaddr, peer: PeerId) -> None:
        starts.append((str(addr), trio.current_time()))
        if addr == HERE:
            raise Unreachable("refused")
        await trio.sleep(10 if addr == NEAR else 1)

    book = AddressBook()
    book.learn(PEER, [FAR, NEAR, HERE])
    dialer = Dialer(book, attempt)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        await dialer.reach(PEER, nursery)
    assert [addr for addr, _ in starts] == [str(HERE), str(NEAR), str(FAR)]
    assert [at - begin for _, at in starts] == pytest.approx([0, 0, STAGGER_S])
    assert trio.current_time() - begin == pytest.approx(STAGGER_S + 1)
    assert book.addrs(PEER)[0] == FAR


async def test_an_address_learned_during_the_dial_is_tried_too(autojump_clock: trio.testing.MockClock) -> None:
    book, tried = AddressBook(), []

    async def attempt(addr: Multiaddr, peer: PeerId) -> None:
        tried.append(addr)
        if addr == FAR:
            return
        await trio.sleep(0.1)
        book.learn(PEER, [FAR])
        raise Unreachable("refused")

    book.learn(PEER, [NEAR])
    dialer = Dialer(book, attempt)
    async with trio.open_nursery() as nursery:
        await dialer.reach(PEER, nursery)
    assert tried == [NEAR, FAR]


async def test_every_reason_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async def attempt(addr: Multiaddr, peer: PeerId) -> None:
        raise Unreachable(f"no way over {addr}")

    book = AddressBook()
    book.learn(PEER, [NEAR, FAR])
    dialer = Dialer(book, attempt)
    async with trio.open_nursery() as nursery:
        with pytest.raises(Unreachable) as caught:
            await dialer.reach(PEER, nursery)
    assert all(f"no way over {addr}" in str(caught.value) for addr in (NEAR, FAR))
