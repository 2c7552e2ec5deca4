"""Incoming connections until they are authenticated.

Accepts connections and bounds their number and the time of each one's handshake; the Host authenticates (`prove`).
Hostile input: strangers that connect and send nothing, from one address or many. If the limit is reached, the gate
finds the region (a /24, an IPv6 /48) with the most connections, and in it the place (an address, an IPv6 /64) with the
most, and closes that place's oldest connection. So nobody can block all others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import trio

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.wire.budget.book import User, user_at
from peerd.wire.faults import Faults
from peerd.wire.transport import Listener, RawLink, close_surely

_log = logging.getLogger("peerd.wire")


class InboundGate:
    """Accepts incoming connections of one host, for all its listeners."""

    def __init__(
        self,
        places: int,
        within_s: float,
        prove: Callable[[RawLink], Awaitable[None]],
        faults: Faults | None = None,
    ) -> None:
        """`places`: maximum number of unauthenticated connections, each for at most `within_s` seconds.

        `prove` authenticates a connection and becomes its owner, or raises RemoteError. On an error or timeout the
        connection is closed.
        """
        self._places, self._within_s, self._prove = places, within_s, prove
        self._faults = faults or Faults()
        self._half_open: dict[RawLink, tuple[User, trio.CancelScope]] = {}  # oldest first

    async def serve(self, listener: Listener) -> None:
        """Accept connections until the listener is closed."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    raw = await listener.accept()
                except trio.ClosedResourceError:
                    return
                self._make_room()
                scope = trio.CancelScope()
                self._half_open[raw] = (user_at("", raw.remote), scope)
                nursery.start_soon(self._supervise, raw, scope)

    def _make_room(self) -> None:
        if len(self._half_open) >= self._places:
            users = [user for user, _ in self._half_open.values()]
            regions, places = Counter(user.region for user in users), Counter(user.place for user in users)
            most = max(users, key=lambda user: (regions[user.region], places[user.place]))
            oldest = next(raw for raw, (user, _) in self._half_open.items() if user == most)
            self._half_open.pop(oldest)[1].cancel()  # removed at once, before its task has ended

    async def _supervise(self, raw: RawLink, scope: trio.CancelScope) -> None:
        await self._faults.contain(lambda: self._welcome(raw, scope), lambda: f"the connection from {raw.remote}")

    async def _welcome(self, raw: RawLink, scope: trio.CancelScope) -> None:
        kept = False
        try:
            with scope:
                scope.deadline = trio.current_time() + self._within_s
                await self._prove(raw)
                kept = True
        except ProtocolViolation as error:
            _log.info("handshake from %s failed: %s", raw.remote, error)
        except RemoteError as error:
            _log.debug("handshake from %s failed: %s", raw.remote, error)
        finally:
            self._half_open.pop(raw, None)
            if not kept:
                await close_surely(raw)
