"""A call that is sent to a second peer as well where the first one is late: the first good answer counts.

Whoever is asked finds out by itself that it was done before; the other call ends. Knows neither stages nor messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from peerd.core.errors import PeerdError

T = TypeVar("T")

_AGAIN_S = 0.5  # between looks for a mate


class Hedged(Generic[T]):
    """One call by `ask`, to a peer by name, and to a mate of it once it is late.

    `mate`: names one that can do the same; None: there is none now, or no call may be sent twice.
    """

    def __init__(self, ask: Callable[[str], Awaitable[T]], mate: Callable[[], str | None]) -> None:
        self._ask, self._mate = ask, mate
        self._won: tuple[str, T] | None = None
        self._failed: dict[str, PeerdError] = {}
        self._asked = 0  # peers that have not answered yet

    async def first(self, name: str, late_after_s: float | None) -> tuple[str, T]:
        """The first good answer and who gave it; where there is none, the error of the peer `name`.

        `late_after_s`: seconds until a mate is asked; None: never.
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
        """Ask a peer; with a good answer, or when no other is asked, all is over."""
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
