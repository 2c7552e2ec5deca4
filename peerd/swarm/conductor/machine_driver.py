"""Driver of a conductor's machine: feeds it events, executes its outputs, and wakes it at its deadlines.

While this peer has a tenure, reports and results of orders go to the machine as events. The machine's outputs become
calls to members (`Orders`), probes and notes. Waiting reports are woken when something that their senders may see has
changed. A peer that has not reported for 12 s is removed, as is a peer that neither members nor we can reach. While its
bytes arrive, its report may be queued behind them, so the limit is 30 s then. Makes no decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from peerd.core.ids import PeerId
from peerd.core.signals import Signal
from peerd.swarm.conductor.orders import OrderContext, Orders
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.conductor.waiting_reports import WaitingReports
from peerd.swarm.events import (
    CancelAttempt,
    Event,
    MemberGone,
    Note,
    Output,
    Probe,
    SendMove,
    SendPrepare,
    SendTransfer,
    TrainerGone,
)
from peerd.swarm.posts import peer_of, short
from peerd.swarm.steps.conductor import Conductor

_SILENT_S = 12.0  # members report at least every few seconds
_REPORT_S = 3.5  # longest normal time from one report to the next
_ANSWER_S = 1.5  # normal time for an answer to an order; after it the member is pinged
_SILENT_ON_FULL_LINE_S = 30.0
_SILENCE_LOOK_S = 0.5
_IDLE_S = 5.0  # between checks while there is no machine
_CALLS_AT_ONCE = 128  # started before other tasks may run
MEMBERS: Final = ""  # group of all members, which need the same news; each trainer is a group of its own


class MachineDriver:
    """Drives a tenure's state machine. `answers`: True if a peer answers a call; `notes`, `warnings`: log functions."""

    def __init__(
        self,
        orders: Orders,
        answers: Callable[[PeerId], Awaitable[bool]],
        notes: Callable[[str], None],
        sends: Callable[[str], bool] = lambda peer: False,
        doubt: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`sends`: True while bytes of a peer arrive. `doubt` pings a peer, and its link ends if it does not answer."""
        self._orders, self._answers, self.notes, self._sends, self._doubt = orders, answers, notes, sends, doubt
        self._awaited: dict[str, float] = {}  # post with an unanswered order -> when we first saw that
        self.warnings = notes
        self.tenure: Tenure | None = None
        self.heard: dict[str, float] = {}  # post or trainer that reports -> when it was last known to be alive
        self._came: dict[str, float] = {}  # the same -> when its last report arrived, even if the report still waits
        self.helpers: set[str] = set()  # those of `heard` that only help with averaging
        self.nursery: trio.Nursery | None = None  # for a tenure's tasks, or None if not running
        self._changed_to: tuple[Conductor | None, int] = None, 0  # the machine, and its version for members
        self._due = 0.0  # the machine's next deadline
        self._awaited_until = 0.0  # until when `keep_time` sleeps
        self._sooner = Signal()  # notified if a deadline becomes earlier than that
        self._waiting = WaitingReports(self._sooner.notify)

    @property
    def machine(self) -> Conductor | None:
        """The machine that decides, or None while this peer does not conduct."""
        return self.tenure.machine if self.tenure is not None else None

    # --- begin and end of a tenure -----------------------------------------------------------------------------

    def begin(self, tenure: Tenure) -> None:
        """Drive this tenure's machine from now on."""
        self.tenure = tenure

    def end(self) -> None:
        """Drop the machine, cancel all that it ordered, and wake the waiting reports."""
        self.tenure = None
        self._orders.cancel_all()
        self.heard.clear()
        self._came.clear()
        self.helpers.clear()
        self.wake_waiting()

    # --- events and outputs -----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Pass an event to the machine, if there is one."""
        if self.tenure is not None:
            self._carry_out(self.tenure, self.tenure.machine.handle(trio.current_time(), event))

    def gone(self, names: Iterable[str]) -> None:
        """Notify the machine that these posts and trainers are gone."""
        for name in names:
            if self.tenure is not None and self.heard.pop(name, None) is not None:
                self.helpers.discard(name)
                self._came.pop(name, None)
                self.feed(MemberGone(name))
                self.feed(TrainerGone(name))

    def peer_gone(self, peer: PeerId) -> None:
        """Notify the machine that a peer is gone, with all its posts and as a trainer."""
        self.gone(name for name in list(self.heard) if peer_of(name) == peer.text)

    def still_heard(self, name: str) -> None:
        """Record that the sender of a report that waited here is alive, unless it was lost meanwhile."""
        if name in self.heard:
            self.heard[name] = trio.current_time()

    def report_came(self, name: str) -> None:
        """Record that a post or trainer has reported."""
        self.heard[name] = self._came[name] = trio.current_time()

    def _carry_out(self, tenure: Tenure, outputs: list[Output]) -> None:
        if outputs:  # most events have no outputs
            self._order(tenure, outputs)
        self.wake_waiting()

    def _order(self, tenure: Tenure, outputs: list[Output]) -> None:
        assert self.nursery is not None
        reign = OrderContext(
            tenure.term, tenure.step, lambda event: self.feed(event) if self.tenure is tenure else None
        )
        prepares, moves = list[SendPrepare](), list[SendMove]()
        for output in outputs:
            match output:
                case SendPrepare():
                    prepares.append(output)
                case SendMove():
                    moves.append(output)
                case SendTransfer():
                    self.nursery.start_soon(self._orders.transfer, output, reign)
                case CancelAttempt(attempt):
                    self._orders.cancel(attempt)
                case Probe(peer):
                    self.nursery.start_soon(self._probe, tenure, peer)
                case Note(text, warning):
                    (self.warnings if warning else self.notes)(text)
        self._orders.begin(self.nursery, prepares, reign)
        if moves:
            self.nursery.start_soon(self._move_all, moves, reign, name="conductor orders moves")

    async def _move_all(self, moves: list[SendMove], reign: OrderContext) -> None:
        """Start the calls of these orders, 128 in each turn: starting a thousand tasks takes milliseconds."""
        assert self.nursery is not None
        for at, order in enumerate(moves, 1):
            self.nursery.start_soon(self._orders.move, order, reign)
            if at % _CALLS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    async def _probe(self, tenure: Tenure, name: str) -> None:
        """Call a member that others cannot reach; remove it if we cannot reach it either."""
        try:
            answers = await self._answers(PeerId.parse(peer_of(name)))
        except ValueError:
            return
        if not answers and tenure is self.tenure:
            self.notes(f"peer {short(name)} does not answer")
            self.gone([name])

    # --- deadlines and news-------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Wake the machine at each of its deadlines, until cancelled.

        Each report moves the deadline, usually to a later time. A later deadline is read only when the earlier one has
        passed.
        """
        self._read_deadline()
        while True:
            self._awaited_until = min(self._due, self._waiting.look_at)
            with trio.move_on_at(self._awaited_until):
                await self._sooner.wait()
            now = trio.current_time()
            self._waiting.end(now)
            if now < self._due:
                continue
            if self.tenure is not None:
                self._carry_out(self.tenure, self.tenure.machine.wake(now))
            else:
                self._read_deadline()

    def _read_deadline(self) -> None:
        machine, now = self.machine, trio.current_time()
        self._due = machine.wake_at(now) if machine is not None else now + _IDLE_S
        if self._due < self._awaited_until:
            self._sooner.notify()

    async def watch_silence(self) -> None:
        """Remove posts and trainers that no longer report, and ping those that are late, until cancelled."""
        while True:
            await trio.sleep(_SILENCE_LOOK_S)
            now = trio.current_time()
            self._ask_the_late(now)
            for name in [n for n, heard in self.heard.items() if self._is_silent(n, now - heard)]:
                self.notes(f"peer {short(name)} is silent")
                self.gone([name])

    def _ask_the_late(self, now: float) -> None:
        """Ping members that owe a report or an answer to an order: a stopped process does not answer."""
        awaited = self.machine.awaited() if self.machine is not None else set()
        self._awaited = {name: self._awaited.get(name, now) for name in awaited}
        late = {name for name, since in self._awaited.items() if now - since > _ANSWER_S}
        # A peer that stops while its report waits here counts as late from the arrival of that report.
        late.update(name for name, heard in self.heard.items() if now - self._came.get(name, heard) > _REPORT_S)
        for peer in sorted({peer_of(name) for name in late}):
            self._doubt(peer)

    def _is_silent(self, name: str, for_s: float) -> bool:
        if for_s <= _SILENT_S:
            return False
        return for_s > _SILENT_ON_FULL_LINE_S or not self._sends(peer_of(name))

    def wake_waiting(self) -> None:
        """Read the next deadline again, and wake the waiting reports whose senders may have news."""
        self._read_deadline()
        machine = self.machine
        news = machine, machine.members_version if machine is not None else 0
        if news != self._changed_to:
            self._changed_to = news
            self._waiting.news(MEMBERS)
        concerned = machine.concerned() if machine is not None else None
        if concerned is None:
            self._waiting.news_but_for(MEMBERS)
            return
        for name in concerned:
            self._waiting.news(name)

    async def wait_for_news(self, group: str, news: Callable[[], bool], tenure: Tenure, wait_s: float) -> None:
        """Wait until the group (MEMBERS, or one trainer) has `news`, the tenure ends, or `wait_s` have passed."""
        if not wait_s:  # the usual case: saves a turn of the scheduler
            return
        until = trio.current_time() + wait_s
        while self.tenure is tenure and not news() and trio.current_time() < until:
            await self._waiting.wait(group, until)
