"""Runs concurrent attempts at several addresses, started and dropped as `wire/happy_eyeballs.py` says.

Does not depend on peers or sockets. Invariants: the reason of each failed attempt is kept; when `run` returns, no
attempt is running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio
from multiaddr import Multiaddr

from peerd.core.addr import is_relayed
from peerd.core.errors import Unreachable
from peerd.core.signals import Signal
from peerd.wire.happy_eyeballs import GIVE_WAY_S, DropAttempt, HappyEyeballs, Try

Attempt = Callable[[Multiaddr], Awaitable[None]]
Order = Callable[[], Sequence[Multiaddr]]


class RaceRun:
    """Concurrent attempts at one peer's addresses. `attempt` returns on success, or raises Unreachable."""

    def __init__(self, order: Order, attempt: Attempt, failed: Callable[[Multiaddr], None] | None = None) -> None:
        """`order` returns the addresses known now, best first. `failed` is called with each address that failed."""
        self._order, self._attempt, self._failed = order, attempt, failed
        self._scopes: dict[Multiaddr, trio.CancelScope] = {}
        self._news = Signal()
        self._over = False
        self.awaits_more = False  # more addresses are being looked up, so the race continues without any
        self.reasons: list[str] = []

    def learned(self) -> None:
        """Notify the race that the result of `order`, or `awaits_more`, has changed."""
        self._news.notify()

    def stop(self, *, direct_may_end: bool = False) -> None:
        """End the race: start no further attempts and cancel the running ones.

        `direct_may_end`: do not cancel attempts at direct addresses, since the successful one was over a relay.
        """
        self._over = True
        for addr, scope in self._scopes.items():
            if not direct_may_end or is_relayed(addr):
                scope.cancel()
        self._news.notify()

    async def run(self) -> None:
        """Run attempts until `stop` is called or all addresses have failed."""
        race = HappyEyeballs(trio.current_time())
        async with trio.open_nursery() as nursery:
            while not self._over:
                step = race.next(trio.current_time(), self._order())
                if isinstance(step, Try):
                    scope = self._scopes[step.addr] = trio.CancelScope()
                    nursery.start_soon(self._try, race, step.addr, scope)
                elif isinstance(step, DropAttempt):
                    self._note(step.addr, f"no answer within {GIVE_WAY_S:g} s")
                    self._scopes[step.addr].cancel()
                elif race.idle and step.until_s == float("inf") and not self.awaits_more:
                    return
                else:
                    with trio.CancelScope(deadline=step.until_s):
                        await self._news.wait()

    async def _try(self, race: HappyEyeballs, addr: Multiaddr, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._attempt(addr)
        except Unreachable as error:
            self._note(addr, error.args[0])
        finally:
            del self._scopes[addr]
            race.ended(trio.current_time(), addr)
            self._news.notify()

    def _note(self, addr: Multiaddr, reason: str) -> None:
        self.reasons.append(f"{addr}: {reason}")
        if self._failed is not None:
            self._failed(addr)
