"""Hand-off between a user's thread and the event loop: takes a gradient and lets the thread compute the next one.

The user's thread is either inside (it waits here, and the loop may access its tensors) or outside (it computes, and no
other thread accesses them). When it is released, the position of its parameters is recorded. A gradient counts only
while the swarm is at that position, or one step further in a delayed run; else it is late and dropped. Invariants:
parameters change only while the thread is inside, and it is not released meanwhile; each gradient is taken once. All
state belongs to the loop's thread. The user's thread sends requests through the loop's entry queue and waits on a queue
of its own, so that Ctrl+C reaches it at any time (`bridge`).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from torch import Tensor

from peerd.core.errors import Refused
from peerd.core.signals import Signal
from peerd.library.roles.bridge import LoopBridge
from peerd.messages.swarm import Position

Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class HandedGradient:
    """One gradient of the user's: the mean over `samples` samples."""

    gradients: Gradients
    samples: int
    position: Position | None  # of the parameters it was computed with


@dataclass(slots=True)
class HandoffCounts:
    """Numbers of gradients that did not count, by reason."""

    late: int = 0  # the swarm had made the step without them
    not_finite: int = 0


class GradientHandoff:
    """The gradient hand-off of one user.

    `patience_s` is how long a change of the parameters waits for the user's thread to come inside. `delay` is the
    number of steps by which a gradient's parameters may be older than the step in which it counts.
    """

    def __init__(self, patience_s: float, delay: int = 0) -> None:
        self.counts = HandoffCounts()
        self.told: Callable[[], None] = lambda: None  # called on the loop when the user's thread comes inside
        self._patience_s = patience_s
        self._delay = delay
        self._bridge = LoopBridge(self._leave)
        self._inside = True  # the user's thread first waits for the start
        self._stays = False
        self._changing = self._reading = False
        self._granted: Position | None = None
        self._pending: HandedGradient | None = None
        self._moved = Signal()
        self._turn = trio.Lock()
        self._leavers: list[threading.Event] = []

    # --- the user's thread --------------------------------------------------------------------------------------

    def open(self, token: trio.lowlevel.TrioToken) -> None:
        """Bind to the loop of `token`. Call it on that loop before the other methods."""
        self._bridge.open(token)

    def wait(self) -> None:
        """Wait until the user may compute. Raises the failure that ended the loop."""
        self._bridge.wait()

    def hand_in(self, gradients: Gradients, samples: int) -> None:
        """Hand in a gradient, the mean over `samples` samples, and wait until the next one may be computed."""
        self._bridge.call(lambda: self._come_in(gradients, samples))
        self._bridge.wait()

    def come_to_stay(self) -> None:
        """Keep the user's thread inside from now on: the user computes nothing more."""
        self._bridge.send(self._stay)

    def end(self, failure: BaseException) -> None:
        """Report that the loop has ended: the user's current wait, or the next one, raises `failure`."""
        self._bridge.fail(failure)

    # --- the loop -----------------------------------------------------------------------------------------------

    @property
    def useful(self) -> bool:
        """True if a gradient may come soon: the user waits, or computes with parameters that it was released with."""
        return not self._stays and (self._inside or self._granted is not None)

    def fail(self, failure: BaseException) -> None:
        """Make the user's current wait, or the next one, raise `failure`."""
        self._bridge.fail(failure)

    def look_again(self) -> None:
        """Wake the waiting tasks, because something they wait for may have changed."""
        self._moved.notify()

    @asynccontextmanager
    async def gradients(self, origins: Callable[[], list[Position]], step: int) -> AsyncIterator[HandedGradient]:
        """Yield a gradient computed with parameters that are valid for `step`; the user stays inside until the block
        ends.

        `origins` returns the positions of parameters that gradients may be of, the current position first. Waits while
        none of them is valid for `step`.
        """
        async with self._turn:
            found = await self._fetch(origins, step)
            self._reading = True
            try:
                yield found
            finally:
                self._reading = False
                self._let_leave()

    async def _fetch(self, origins: Callable[[], list[Position]], step: int) -> HandedGradient:
        while True:
            good = [p for p in origins() if 0 <= step - p.step <= self._delay]
            here = origins()[0]
            if self._pending is not None:
                found, self._pending = self._pending, None
                if found.position in good:
                    return found
                self.counts.late += 1
            elif self._inside and not self._stays and not self._changing and here in good:
                self._inside, self._granted = False, here
                self._bridge.let_go()
            else:
                await self._moved.wait()

    @asynccontextmanager
    async def changing(self, patient: bool) -> AsyncIterator[None]:
        """Context manager around a change of the user's parameters. Refused if the user's thread stays outside."""
        with trio.move_on_after(float("inf") if patient else self._patience_s) as limit:
            while self._changing or not self._inside:
                await self._moved.wait()
        if limit.cancelled_caught:
            raise Refused(f"the user's own code has not come back for {self._patience_s:g} s")
        self._changing = True
        try:
            yield
        finally:
            self._changing = False
            self._let_leave()
            self.look_again()

    def _come_in(self, gradients: Gradients, samples: int) -> None:
        self._pending = HandedGradient(gradients, samples, self._granted)
        self._inside, self._granted = True, None
        self.told()
        self.look_again()

    def _stay(self) -> None:
        self._inside = self._stays = True
        self._pending = None
        self.look_again()

    def _leave(self, gone: threading.Event) -> None:
        self._leavers.append(gone)
        self._let_leave()

    def _let_leave(self) -> None:
        """Release an interrupted thread once no task uses its tensors. Its permission to compute and its gradient are
        dropped.
        """
        if self._changing or self._reading or not self._leavers:
            return
        self._inside, self._granted, self._pending = False, None, None
        self._bridge.take_back()
        for gone in self._leavers:
            gone.set()
        self._leavers.clear()
