"""Hedged calls: if the first peer is late, a second one gets the call as well, and the first good answer counts.

The called peers detect duplicates themselves. The losing call is cancelled. This module knows neither stages nor
messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from peerd.core.errors import PeerdError

T = TypeVar("T")

_AGAIN_S = 0.5  # between two searches for a mate


class Hedged(Generic[T]):
    """One call, made by `ask` to a named peer and, once that peer is late, also to a mate.

    `mate` returns a peer that can do the same, or None if there is none now or no call may be sent twice.
    """

    def __init__(self, ask: Callable[[str], Awaitable[T]], mate: Callable[[], str | None]) -> None:
        self._ask, self._mate = ask, mate
        self._won: tuple[str, T] | None = None
        self._failed: dict[str, PeerdError] = {}
        self._asked = 0  # calls without an answer yet

    async def first(self, name: str, late_after_s: float | None) -> tuple[str, T]:
        """The first good answer and its peer; if there is none, raises the error of the peer `name`.

        A mate is called after `late_after_s` seconds, or never if that is None.
        """
        if late_after_s is None:
            return name, await self._ask(name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_mate, late_after_s, nursery.cancel_scope)
            await self._ask_one(name, nursery.cancel_scope)
        if self._won is None:
            raise self._failed[name]
        return self._won

    async def _ask_mate(self, late_after_s: float, scope: trio.CancelScope) -> None:
        pause_s = late_after_s
        while True:
            await trio.sleep(pause_s)
            if (mate := self._mate()) is not None:
                await self._ask_one(mate, scope)
                return
            pause_s = _AGAIN_S

    async def _ask_one(self, name: str, scope: trio.CancelScope) -> None:
        """Call a peer. Ends the race on a good answer, or when no call is left."""
        self._asked += 1
        try:
            answer = await self._ask(name)
        except PeerdError as error:
            self._failed[name] = error
        else:
            self._won = self._won or (name, answer)
        finally:
            self._asked -= 1
        if self._won is not None or not self._asked:
            scope.cancel()
