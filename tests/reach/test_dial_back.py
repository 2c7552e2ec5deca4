"""Dial-backs go to the asker's own address and nowhere else, and never to many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core import limits
from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.core.keys import Keypair
from peerd.reach.dial_back import Asker, DialBackRefusal, DialBacks
from peerd.reach.messages.autonat_message import DialRequest, DialStatus
from peerd.wire.path_selection import PathKind

PEER, OTHER = (Keypair.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
REMOTE = tcp_addr("81.2.3.4", 50000)
ASKER = Asker(PEER, REMOTE, PathKind.DIRECT)
AT_HOME = tcp_addr("81.2.3.4", 31337)


def question(*texts: str) -> DialRequest:
    return DialRequest(peer=PEER, addrs=tuple(parse_addr(text).to_bytes() for text in texts))


def test_only_addresses_where_the_asker_is_are_dialed() -> None:
    others = ["/ip4/9.9.9.9/tcp/31337", "/ip4/192.168.1.1/tcp/80", "/dns4/example.org/tcp/80", "/ip4/81.2.3.4/udp/9"]
    relayed = f"/ip4/81.2.3.4/tcp/31337/p2p/{OTHER}/p2p-circuit"
    mine = f"/ip4/81.2.3.4/tcp/31337/p2p/{PEER}"
    begun = DialBacks().begin(0.0, ASKER, question(*others, relayed, mine, "/ip4/81.2.3.4/tcp/0"))
    assert begun == (1, [AT_HOME])


@pytest.mark.parametrize(
    ("asker", "asked", "why"),
    [
        (ASKER, DialRequest(peer=OTHER, addrs=(AT_HOME.to_bytes(),)), "peer itself"),
        (Asker(PEER, REMOTE, PathKind.RELAYED), question(str(AT_HOME)), "does not show"),
        (Asker(PEER, with_peer(REMOTE, OTHER), PathKind.PUNCHED), question(str(AT_HOME)), "does not show"),
        (Asker(PEER, tcp_addr("192.168.1.5", 9), PathKind.LOCAL), question("/ip4/192.168.1.5/tcp/9"), "public"),
        (ASKER, question("/ip4/9.9.9.9/tcp/31337"), "no address"),
        (ASKER, DialRequest(peer=None, addrs=(b"\xff\xff",)), "no address"),
    ],
)
def test_what_could_hit_somebody_else_is_refused(asker: Asker, asked: DialRequest, why: str) -> None:
    refused = DialBacks().begin(0.0, asker, asked)
    assert isinstance(refused, DialBackRefusal)
    assert why in refused.why


def test_a_question_makes_few_dials() -> None:
    begun = DialBacks().begin(0.0, ASKER, question(*(f"/ip4/81.2.3.4/tcp/{port}" for port in range(1, 17))))
    assert not isinstance(begun, DialBackRefusal)
    assert len(begun[1]) == limits.AUTONAT_DIALS


def test_a_peer_may_ask_again_after_a_minute() -> None:
    backs = DialBacks()
    for _ in range(limits.AUTONAT_PER_MINUTE_PER_PEER):
        begun = backs.begin(0.0, ASKER, question(str(AT_HOME)))
        assert not isinstance(begun, DialBackRefusal)
        backs.end(begun[0])
    refused = backs.begin(59.0, ASKER, question(str(AT_HOME)))
    assert isinstance(refused, DialBackRefusal)
    assert (refused.status, refused.why) == (DialStatus.DIAL_REFUSED, "you ask too often")
    assert not isinstance(backs.begin(60.1, ASKER, question(str(AT_HOME))), DialBackRefusal)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.booleans(), st.floats(0, 2)), max_size=300))
def test_a_flood_stays_within_the_bounds(steps: list[tuple[int, int, bool, float]]) -> None:
    backs, now, open_ = DialBacks(), 0.0, list[tuple[int, str]]()
    for peer, host, ends, pause_s in steps:
        now += pause_s
        if ends and open_:
            backs.end(open_.pop(0)[0])
            continue
        ip = f"81.2.3.{host}"
        asker = Asker(Keypair.from_seed(bytes([peer]) * 32).peer_id, tcp_addr(ip, 7), PathKind.DIRECT)
        begun = backs.begin(now, asker, DialRequest(peer=None, addrs=(tcp_addr(ip, 31337).to_bytes(),)))
        if not isinstance(begun, DialBackRefusal):
            open_.append((begun[0], ip))
        backs.check()
        assert backs.under_way == len(open_)
        assert all([at for _, at in open_].count(ip) <= limits.AUTONAT_AT_ONCE_PER_IP for _, ip in open_)
