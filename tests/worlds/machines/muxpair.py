"""Two yamux sessions with a pretend link between them, for tests without sockets, tasks or real time."""

from __future__ import annotations

from peerd.wire.noise.noise import PLAIN_BYTES
from peerd.wire.yamux.session import Changed, Event, Opened, YamuxSession, YamuxStream
from peerd.wire.yamux.stream import WindowBudget, YamuxConfig

_ALL = 1 << 30


class Side:
    """One session, what it has opened and heard, and the bytes on their way to it."""

    def __init__(self, initiator: bool, config: YamuxConfig | None = None, budget: WindowBudget | None = None) -> None:
        self.mux = YamuxSession(initiator=initiator, now=0.0, config=config, budget=budget)
        self.arriving = bytearray()
        self.events: list[Event] = []

    @property
    def accepted(self) -> list[YamuxStream]:
        return [event.stream for event in self.events if isinstance(event, Opened)]

    @property
    def changed(self) -> list[YamuxStream]:
        return [event.stream for event in self.events if isinstance(event, Changed)]


class MuxPair:
    """`a` initiates. `now` is moved by the test; `carry` moves bytes, in batches as a Noise link would."""

    def __init__(self, config: YamuxConfig | None = None, budget: WindowBudget | None = None) -> None:
        self.a, self.b = Side(True, config, budget), Side(False, config)
        self.now = 0.0
        self._plain = memoryview(bytearray(PLAIN_BYTES))

    def send(self, side: Side, batches: int = _ALL) -> int:
        """Let `side` put frames on the link; returns the bytes."""
        other = self.b if side is self.a else self.a
        total = 0
        spill_bytes = 3 * PLAIN_BYTES if batches == _ALL else 0  # counted batches are single frames
        while batches and (size := side.mux.fill(self._plain, spill_bytes)):
            spill = side.mux.spill or b""
            other.arriving += self._plain[:size]
            other.arriving += spill
            total += size + len(spill)
            batches -= 1
        return total

    def hear(self, side: Side, piece_bytes: int = 1 << 30, limit: int = 1 << 30) -> None:
        """Deliver up to `limit` of the bytes on their way to `side`, in pieces."""
        while side.arriving and limit > 0:
            size = min(piece_bytes, limit, len(side.arriving))
            piece = bytes(side.arriving[:size])
            del side.arriving[:size]
            limit -= size
            side.events += side.mux.receive(piece, self.now)

    def carry(self, piece_bytes: int = 1 << 30) -> None:
        """Everything that is ready goes across, both ways, until nothing is left."""
        while self.send(self.a) + self.send(self.b) + len(self.a.arriving) + len(self.b.arriving):
            self.hear(self.b, piece_bytes)
            self.hear(self.a, piece_bytes)

    def read(self, side: Side, stream: YamuxStream, max_bytes: int = 1 << 30) -> bytes:
        """Take from an inbox and give credit."""
        data = stream.take(max_bytes)
        side.mux.consumed(stream, self.now)
        return data

    def check(self) -> None:
        """Check the invariants that hold at every moment."""
        for side in (self.a, self.b):
            mux = side.mux
            assert mux.budget.used_bytes >= 0
            assert mux.inbound >= 0 <= mux.outbound
            assert mux.unacked >= 0
            for stream in mux.streams.values():
                assert stream.credit >= 0
                assert stream.send_credit >= 0
                assert stream.inbox_bytes + stream.credit <= stream.target
                assert stream.inbox_bytes == sum(map(len, stream.inbox))
                assert stream.out_bytes == sum(map(len, stream.out))
