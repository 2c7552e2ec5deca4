"""Memory for incoming messages: bytes that we store for peers, accounted in the host's book, and tasks that wait for
free memory.

Memory is reserved as bytes arrive, at most a step ahead of them, so a message's declared size alone reserves nothing.
Answers that we requested are accounted separately from unrequested data, so neither uses up the other's memory (see
`asked`).
"""

from __future__ import annotations

import trio

from peerd.core.errors import Overloaded
from peerd.core.limits import RPC_BUDGET_WAIT_S
from peerd.rpc.rpc_types import RpcStream
from peerd.wire.budget.book import Book, Resource, User, user_at


def user_of(stream: RpcStream) -> User:
    """The user under which the book accounts the peer of `stream`.

    For a peer without an address, as on a stream to oneself, the peer id replaces the address block.
    """
    peer, link = stream.peer.text, stream.link
    return User(peer, peer, peer) if link is None else user_at(peer, link.remote)


def asked(user: User) -> User:
    """The user for data that we requested: unrequested data from its address block does not count against it."""
    return User(user.peer, f"asked {user.place}", f"asked {user.region}")


class Room:
    """Reserves memory for incoming messages, within the limits of the host's book. One per host."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._waiting = trio.lowlevel.ParkingLot()

    def take(self, user: User, count: int) -> str | None:
        """Reserve `count` bytes for `user`. Returns None, or the reason why they cannot be reserved."""
        return self.book.take(Resource.RECEIVING, user, count)

    @property
    def held(self) -> int:
        """Number of bytes reserved for all users together."""
        return self.book.used(Resource.RECEIVING)

    async def wait(self, user: User, count: int) -> None:
        """Reserve `count` bytes for `user`. Raises Overloaded if they do not become free soon."""
        closed = self.take(user, count)
        if closed is None:
            return
        with trio.move_on_after(RPC_BUDGET_WAIT_S):
            while (closed := self.take(user, count)) is not None:
                await self._waiting.park()
            return
        raise Overloaded(f"too many bytes are being received: {closed}", RPC_BUDGET_WAIT_S)

    def give(self, user: User, count: int) -> None:
        """Release `count` bytes."""
        if count:
            self.book.give(Resource.RECEIVING, user, count)
            self._waiting.unpark_all()


class Share:
    """Reserves memory for the incoming messages of one stream, for the user to which the stream belongs."""

    __slots__ = ("_demanding", "_room", "_user")

    def __init__(self, room: Room, user: User, *, demanding: bool) -> None:
        """`demanding`: bytes must arrive at a minimum rate, because they were not requested."""
        self._room, self._user, self._demanding = room, user, demanding

    def take(self, count: int) -> str | None:
        return self._room.take(self._user, count)

    async def wait(self, count: int) -> None:
        """Reserve `count` bytes. Raises Overloaded if they do not become free soon."""
        await self._room.wait(self._user, count)

    def give(self, count: int) -> None:
        self._room.give(self._user, count)

    @property
    def patient(self) -> bool:
        """True if the peer may send at any rate until its deadline."""
        return not self._demanding
