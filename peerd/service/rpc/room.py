"""Room for what comes: bytes that peers have us hold, in the host's book, and tasks that wait for some.

Room is taken as bytes come, a step ahead of them at most: what a message declares costs nobody anything. What we asked
for ourselves has a share beside what others send unasked: neither takes the other's place (see `asked`).
"""

from __future__ import annotations

import trio

from peerd.core.errors import Overloaded
from peerd.core.limits import RPC_BUDGET_WAIT_S
from peerd.machine.budget.book import Book, Means, User, user_at
from peerd.service.rpc.types import RpcStream


def user_of(stream: RpcStream) -> User:
    """The user that the book knows the peer of `stream` as. What has no address, such as a stream to oneself, is its
    own place.
    """
    peer, link = stream.peer.text, stream.link
    return User(peer, peer, peer) if link is None else user_at(peer, link.remote)


def asked(user: User) -> User:
    """`user` as one that we asked: peers at its place that send unasked do not use up what its answers need."""
    return User(user.peer, f"asked {user.place}", f"asked {user.region}")


class Room:
    """All bytes that are held of messages in. One for a host's calls."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._waiting = trio.lowlevel.ParkingLot()

    def take(self, user: User, count: int) -> str | None:
        """Hold `count` bytes for `user`, if there is room; else say why there is none."""
        return self.book.take(Means.RECEIVING, user, count)

    @property
    def held(self) -> int:
        """Bytes that all together have."""
        return self.book.used(Means.RECEIVING)

    async def wait(self, user: User, count: int) -> None:
        """Hold `count` bytes for `user`; Overloaded when there is no room for them soon."""
        closed = self.take(user, count)
        if closed is None:
            return
        with trio.move_on_after(RPC_BUDGET_WAIT_S):
            while (closed := self.take(user, count)) is not None:
                await self._waiting.park()
            return
        raise Overloaded(f"too many bytes are being received: {closed}", RPC_BUDGET_WAIT_S)

    def give(self, user: User, count: int) -> None:
        """Let go of `count` bytes."""
        if count:
            self.book.give(Means.RECEIVING, user, count)
            self._waiting.unpark_all()


class Share:
    """One stream's share of the room."""

    __slots__ = ("_demanding", "_room", "_user")

    def __init__(self, room: Room, user: User, *, demanding: bool) -> None:
        """`demanding`: bytes must come at a least rate, for nobody has asked for them."""
        self._room, self._user, self._demanding = room, user, demanding

    def take(self, count: int) -> str | None:
        return self._room.take(self._user, count)

    async def wait(self, count: int) -> None:
        """As `Room.wait`."""
        await self._room.wait(self._user, count)

    def give(self, count: int) -> None:
        self._room.give(self._user, count)

    @property
    def patient(self) -> bool:
        """True when it may send as slowly as it likes, until its deadline."""
        return not self._demanding
