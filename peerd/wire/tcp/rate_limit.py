"""TCP connections with rate limits: `wire.rate.limiter` decides; this module waits and counts.

A LinePace is one direction of this machine's internet connection, shared by all TCP connections, or the rate of a
relay, shared by its circuits; one of those that wait sleeps until the next grant for all of them, so there is no task
or timer per packet. A RateLimitedLink sends and reads in quanta. Data that it does not read fills the receive window,
which is kept small, so that TCP slows the sender down.

Payload is counted when it is sent or read. TCP's overhead (headers, acknowledgements, retransmissions) is charged
afterwards, from the system's counters or else by an estimate, so that the total on the line keeps the limit. Members
of the run have priority (by the host's book); all other peers share one turn per place. Unlimited connections are plain
TcpLinks.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

import trio
from multiaddr import Multiaddr

from peerd.core.work import RateLimitedRead, read_at_once
from peerd.run.runfile import BYTES_PER_MBIT, LimitsSection
from peerd.wire.budget.book import user_at
from peerd.wire.rate.limiter import SLACK_S, Account, Flow, Limiter, Rank
from peerd.wire.tcp.tcp_transport import TcpLink, TcpTransport
from peerd.wire.tcp_info import TcpInfo, header_bytes, tcp_info

_RANK_S: Final = 0.1  # interval of checks whether a connection has priority
_SETTLE_S: Final = 0.05  # interval of reading a connection's counters from the system
_PACKET_BYTES: Final = 1448  # assumed payload of a full packet, for estimates
_PER_ACK: Final = 2  # packets per acknowledgement, for estimates
_WINDOW_BYTES_LEAST: Final = 64 << 10
_WINDOW_RTT_MOST_S: Final = 0.5


class LimitedLine:
    """The rate limits `limits.upload_mbit` and `limits.download_mbit`, for TCP links and for other reads."""

    def __init__(self, limits: LimitsSection | None = None) -> None:
        limits = limits or LimitsSection()
        self._up, self._down = (
            LinePace(mbit * BYTES_PER_MBIT) if mbit else None for mbit in (limits.upload_mbit, limits.download_mbit)
        )

    def tcp(self) -> TcpTransport:
        """A transport whose links keep the limits; its links are plain TcpLinks if there are none."""
        up, down = self._up, self._down
        if up is None and down is None:
            return TcpTransport()
        return TcpTransport(lambda sock, remote, lent: RateLimitedLink(sock, remote, lent, up, down))

    def reads(self) -> RateLimitedRead:
        """Return a function that reads at a limited rate, for threads that use a library's own connections.

        Call `reads` itself in the event loop. The protocols' overhead on top of the payload is estimated. The sender
        slows down as for any slow reader.
        """
        up, down = self._up, self._down
        if down is None:
            return read_at_once
        token = trio.lowlevel.current_trio_token()

        def settle(turn: LineTurn, granted: int, came: int) -> None:
            down.limiter.give_back(turn, granted - came)
            out, into = _estimated(0, came, socket.AF_INET)
            down.limiter.charge(into)
            if up is not None:
                up.limiter.charge(out)

        def read_in_turn(read: Callable[[int], bytes], most: int) -> bytes:
            turn, came = LineTurn(), 0
            granted = trio.from_thread.run(down.take, turn, most, trio_token=token)
            try:
                data = read(granted)
                came = len(data)
                return data
            finally:
                with contextlib.suppress(trio.RunFinishedError):
                    trio.from_thread.run_sync(settle, turn, granted, came, trio_token=token)

        return read_in_turn


class LineTurn(Flow):
    """A connection's flow in one LinePace. `shared` is the account of all strangers at its address block, which it uses
    unless it has priority.
    """

    __slots__ = ("_look_at", "_own", "_shared", "closed", "event", "granted", "is_first")

    def __init__(self, shared: Account | None = None) -> None:
        super().__init__()
        self.closed = False
        self.granted = 0
        self.event: trio.Event | None = None
        self.is_first: Callable[[], bool] | None = None
        self._own, self._shared, self._look_at = self.account, shared, -math.inf

    def queue_up(self, now: float) -> None:
        """Update the rank and account, at most every _RANK_S; called before each request."""
        if self._shared is None or self.waits or now < self._look_at:
            return
        self._look_at = now + _RANK_S
        first = self.is_first is not None and self.is_first()
        self.rank, self.account = (Rank.FIRST, self._own) if first else (Rank.REST, self._shared)


class LinePace:
    """A rate limit that many flows share, such as all TCP connections in one direction."""

    def __init__(self, bytes_per_s: float) -> None:
        self.limiter = Limiter(bytes_per_s)
        self._waiting: dict[LineTurn, None] = {}
        self._places: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._keeper: trio.CancelScope | None = None  # of the task that sleeps until the next grant

    def at(self, place: str) -> Account:
        """The account that all strangers at one place (address block) share."""
        account = self._places.get(place)
        if account is None:
            account = self._places[place] = Account()
        return account

    async def take(self, turn: LineTurn, wanted: int) -> int:
        """Wait for this connection's turn; returns the granted bytes, 1 to `wanted`. ClosedResourceError if closed."""
        if turn.closed:
            raise trio.ClosedResourceError("the connection is closed")
        await trio.lowlevel.checkpoint_if_cancelled()
        now = trio.current_time()
        turn.queue_up(now)
        if count := self.limiter.ask(now, turn, wanted):
            return count
        turn.granted = 0
        self._waiting[turn] = None
        self._hand_out()
        try:
            while not turn.granted and not turn.closed:
                turn.event = trio.Event()
                if self._keeper is None:
                    await self._keep_time(turn.event)
                else:
                    await turn.event.wait()
            if turn.closed:
                raise trio.ClosedResourceError("the connection is closed")
            count, turn.granted = turn.granted, 0
            return count
        finally:
            self._leave(turn)

    async def take_all(self, turn: LineTurn, count: int) -> None:
        """Wait until all `count` bytes are granted, in as many turns as that takes."""
        while count:
            count -= await self.take(turn, count)

    def try_take(self, turn: LineTurn, wanted: int) -> bool:
        """Take all `wanted` bytes without waiting, or none; returns whether they were taken."""
        now = trio.current_time()
        turn.queue_up(now)
        return self.limiter.try_ask(now, turn, wanted)

    @property
    def busy(self) -> int:
        """Number of connections that are waiting now; at least 1."""
        return max(len(self._waiting), 1)

    def close(self, turn: LineTurn) -> None:
        """Mark the connection as closed; a waiting `take` raises ClosedResourceError."""
        turn.closed = True
        if turn.event is not None:
            turn.event.set()

    async def _keep_time(self, event: trio.Event) -> None:
        with trio.CancelScope(deadline=self.limiter.wake_at()) as self._keeper:
            try:
                await event.wait()
            finally:
                self._keeper = None
        self._hand_out()

    def _hand_out(self) -> None:
        for turn, count in self.limiter.wake(trio.current_time()):
            assert isinstance(turn, LineTurn)
            turn.granted = count
            if turn.event is not None:
                turn.event.set()
        if self._keeper is not None:
            self._keeper.deadline = self.limiter.wake_at()

    def _leave(self, turn: LineTurn) -> None:
        self.limiter.leave(turn)
        if turn.granted:
            self.limiter.give_back(turn, turn.granted)
            turn.granted = 0
        del self._waiting[turn]
        turn.event = None
        if self._keeper is None:
            heir = next((one for one in self._waiting if not one.granted), None)
            if heir is not None and heir.event is not None:
                heir.event.set()  # it has no grant, so it becomes the keeper


class RateLimitedLink(TcpLink):
    """A TcpLink with rate limits; `up` or `down` is None if that direction is unlimited."""

    __slots__ = ("_down", "_down_turn", "_info", "_settled_at", "_up", "_up_turn", "_window_bytes")

    def __init__(
        self,
        sock: trio.socket.SocketType,
        remote: Multiaddr,
        lent: memoryview,
        up: LinePace | None,
        down: LinePace | None,
    ) -> None:
        super().__init__(sock, remote, lent)
        self._up, self._down = up, down
        place = user_at("", remote).place
        self._up_turn, self._down_turn = (LineTurn(None if pace is None else pace.at(place)) for pace in (up, down))
        self._info: TcpInfo | None = None
        self._settled_at = -math.inf
        self._window_bytes = 0
        self._settle(0, 0)

    def rank_by(self, is_first: Callable[[], bool]) -> None:
        self._up_turn.is_first = self._down_turn.is_first = is_first

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        pace = self._up
        if pace is None:
            await super().send_all(data)
            self._settle(len(data), 0)
            return
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                count = await pace.take(self._up_turn, len(view) - at)
                await super().send_all(view[at : at + count])
                at += count
                self._settle(count, 0)

    @property
    def batch_bytes(self) -> int:
        best = super().batch_bytes
        return min(best, self._up.limiter.quantum_bytes) if self._up is not None else best

    def send_nowait(self, data: memoryview) -> int:
        pace, size = self._up, len(data)
        if pace is not None and not pace.try_take(self._up_turn, size):
            return 0
        sent = super().send_nowait(data)
        if pace is not None and sent < size:
            pace.limiter.give_back(self._up_turn, size - sent)
        self._settle(sent, 0)
        return sent

    async def _receive(self, into: memoryview, useful_bytes: int = 1) -> memoryview:
        pace = self._down
        if pace is None:
            got = await super()._receive(into, useful_bytes)
            self._settle(0, len(got))
            return got
        try:
            while True:
                await self._wait_readable(useful_bytes)
                count = await pace.take(self._down_turn, len(into))
                size = 0
                try:
                    size = self._socket.recv_into(into[:count])
                except BlockingIOError:
                    continue
                finally:
                    pace.limiter.give_back(self._down_turn, count - size)
                self._settle(0, size)
                return into[:size]
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    async def aclose(self) -> None:
        if self._socket.fileno() != -1:
            self._settled_at = -math.inf
            self._settle(0, 0)
        for pace, turn in ((self._up, self._up_turn), (self._down, self._down_turn)):
            if pace is not None:
                pace.close(turn)
        await super().aclose()

    # --- TCP's overhead ----------------------------------------------------------------------------------------

    def _settle(self, sent: int, received: int) -> None:
        """Charge the overhead that the system has counted since the last call, or an estimate if it does not count."""
        now = trio.current_time()
        if now - self._settled_at < _SETTLE_S:
            return
        info = tcp_info(self._socket)
        if info is None:
            self._charge(*_estimated(sent, received, self._socket.family))
            return
        self._settled_at = now
        self._charge(*info.overhead_since(self._info))
        self._info = info
        self._fit_window(info)

    def _charge(self, out: int, into: int) -> None:
        if self._up is not None and out:
            self._up.limiter.charge(out)
        if self._down is not None and into:
            self._down.limiter.charge(into)

    def _fit_window(self, info: TcpInfo) -> None:
        """Set the receive window to this connection's share of rate x round trip, since more arrives in bursts."""
        if self._down is None:
            return
        rtt_s = min(info.min_rtt_s, _WINDOW_RTT_MOST_S)
        part = self._down.limiter.bytes_per_s * (1.5 * rtt_s + SLACK_S) / self._down.busy
        window = max(int(part), _WINDOW_BYTES_LEAST)
        if not self._window_bytes or not 0.7 < window / self._window_bytes < 1.4:
            self._window_bytes = window
            with contextlib.suppress(OSError, AttributeError):  # not every system supports it
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, window)


def _estimated(sent: int, received: int, family: int) -> tuple[int, int]:
    """Estimated overhead in bytes, (out, in), for this many bytes of payload sent and received."""
    header = header_bytes(family, timestamps=True)
    out = math.ceil(sent / _PACKET_BYTES) + received // (_PACKET_BYTES * _PER_ACK)
    into = math.ceil(received / _PACKET_BYTES) + sent // (_PACKET_BYTES * _PER_ACK)
    return out * header, into * header
