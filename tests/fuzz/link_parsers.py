"""A link as a parser of plaintext, with streams and handlers on it, for the table in `tests.fuzz.parsers`.

Unlike the muxer's own parser nobody asks here whether a stream was reset: that is the link's to know.
"""

from __future__ import annotations

import trio
from multiaddr import Multiaddr

from peerd.wire.budget.book import Book
from peerd.wire.faults import Faults
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link import Buffers, Link
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.unread import Unread
from peerd.wire.link.upgrade import UpgradedLink
from peerd.wire.noise.noise import Opener, Sealer, Session
from peerd.wire.yamux import session as yamux
from peerd.wire.yamux.stream import WindowBudget
from peerd.wire.yamux.striping import PROTOCOL as RAIL
from tests.fuzz.parsers import ADDRS, OTHER, PARSERS, YAMUX, Corpus, in_pieces, parser, yamux_check, yamux_frame
from tests.worlds.network.hostile import hello

__all__ = ["PARSERS"]
_BUFFERS = Buffers()


class _Silent:
    """A raw link that is never used: the plaintext comes from the test."""

    remote = Multiaddr(ADDRS[0])

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.sleep_forever()

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.sleep_forever()
        return b""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class _Owner:
    """A host whose handlers answer at once."""

    def __init__(self) -> None:
        self.book = Book()
        self.faults = Faults()
        self.unread = Unread(1 << 20, 1 << 20)
        self.accepted: list[Stream] = []

    def speaks(self, protocol: str) -> bool:
        return protocol == "/echo/1"

    def accept(self, stream: Stream) -> None:
        self.accepted.append(stream)
        stream.send_nowait(b"welcome")

    def link_leaving(self, link: Link, reason: str) -> None:
        pass

    def link_doubted(self, link: Link) -> None:
        pass

    async def open_rail(self, link: Link) -> UpgradedLink:
        raise AssertionError("nobody dials here")


def _talks() -> Corpus:
    opening, header = hello("/echo/1"), hello("/echo/1")[:20]
    opened = yamux_frame(yamux.DATA, yamux.SYN, 1, len(opening), opening)
    both = yamux_frame(yamux.WINDOW, yamux.SYN, 3, 0) + yamux_frame(yamux.WINDOW, yamux.RST, 3, 0)
    return [
        opened + yamux_frame(yamux.DATA, 0, 1, 5, b"hello") + yamux_frame(yamux.WINDOW, yamux.RST, 1, 0),
        opened + both + yamux_frame(yamux.DATA, yamux.FIN, 1, 0),
        yamux_frame(yamux.DATA, yamux.SYN, 1, 20, header) + yamux_frame(yamux.WINDOW, yamux.FIN | yamux.RST, 1, 0),
        yamux_frame(yamux.DATA, yamux.ACK, 2, len(opening), opening) + yamux_frame(yamux.DATA, yamux.FIN, 2, 3, b"end"),
        yamux_frame(yamux.DATA, 0, 2, 20, header) + yamux_frame(yamux.DATA, yamux.RST, 2, 3, b"na\n"),
        both * 20 + yamux_frame(yamux.GO_AWAY, 0, 0, 0) + opened,
    ]


async def _feed(data: bytes) -> None:
    owner, raw = _Owner(), _Silent()
    session = Session(OTHER.peer_id, Sealer(bytes(32)), Opener(bytes(32)), None, b"", (RAIL,), bytes(32))
    secured = UpgradedLink(raw, session, False, [], 0.01)
    link = Link(secured, owner, LinkConfig(yamux=YAMUX), _BUFFERS, WindowBudget(1 << 20))
    await link.open("/echo/1")
    for piece in in_pieces(data):
        link.take([piece])
        assert owner.faults.places == {}
        for stream in owner.accepted:
            stream.send_nowait(b"and more")
        yamux_check(link.mux)
        assert all(not (stream.negotiating and stream.mux.inbound and stream.mux.was_reset) for stream in link.streams)


@parser("plaintext of a link", _talks, share=0.1)
def _link(data: bytes) -> None:
    trio.run(_feed, data)
