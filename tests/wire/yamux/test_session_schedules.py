"""Yamux under random schedules: whatever is written, read and closed, bytes arrive in order, none starves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from peerd.wire.yamux.session import YamuxStream
from peerd.wire.yamux.stream import WindowBudget, YamuxConfig
from tests.kit.amount import examples
from tests.worlds.machines.muxpair import MuxPair, Side

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a seed does not shrink to anything simpler
CONFIG = YamuxConfig(streams_inbound=1000, streams_outbound=6, window_bytes_max=1 << 20)


@dataclass
class Way:
    """One direction of one stream: what was written on one side, and what the other has read."""

    source: Side
    target: Side
    stream: YamuxStream
    sent: bytearray = field(default_factory=bytearray)
    got: bytearray = field(default_factory=bytearray)
    closed: bool = False


class World:
    """A pair and a random schedule over it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pair = MuxPair(CONFIG, WindowBudget(1 << 21))
        self.ways: dict[tuple[int, bool], Way] = {}  # by stream and whether `a` writes
        self.pair.a.mux.rtt_s = self.pair.b.mux.rtt_s = 0.01

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        side = rng.choice((pair.a, pair.b))
        action = rng.choice(("open", "write", "write", "read", "send", "hear", "hear", "close", "time"))
        if action == "open" and side.mux.can_open:
            self._track(side, side.mux.open(pair.now))
        elif action == "write":
            self._write(side)
        elif action == "read":
            self._read(side, rng.choice((1, 1000, 1 << 20)))
        elif action == "send":
            pair.send(side, rng.randrange(1, 4))
        elif action == "hear":
            pair.hear(side, rng.choice((1 << 20, 4096, 100)), rng.choice((20, 5000, 1 << 20)))
            for stream in side.accepted:
                self._track(side, stream)
        elif action == "close":
            for way in self._open_ways(side)[:1]:
                way.closed = True
                side.mux.close_write(way.stream)
        elif action == "time":
            pair.now += rng.choice((0.0001, 0.02, 1.0))
        pair.check()

    def _track(self, side: Side, stream: YamuxStream) -> None:
        other = self.pair.b if side is self.pair.a else self.pair.a
        self.ways.setdefault((stream.id, side is self.pair.a), Way(side, other, stream))

    def _open_ways(self, side: Side) -> list[Way]:
        ways = [
            way for way in self.ways.values() if way.source is side and not (way.stream.fin_due or way.stream.was_reset)
        ]
        self.rng.shuffle(ways)
        return ways

    def _write(self, side: Side) -> None:
        for way in self._open_ways(side)[:1]:
            data = self.rng.randbytes(self.rng.choice((1, 100, 5000, 200_000)))
            way.sent += data
            side.mux.write(way.stream, memoryview(data) if len(data) > 1000 else data)

    def _read(self, side: Side, max_bytes: int) -> None:
        for (number, by_a), way in self.ways.items():
            if way.target is side:
                mine = self.ways.get((number, not by_a))
                if mine is not None:
                    way.got += self.pair.read(side, mine.stream, max_bytes)

    def finish(self) -> None:
        """Readers read on: now everything must arrive within bounded work."""
        for way in self.ways.values():
            if not way.closed:
                way.closed = True
                way.source.mux.close_write(way.stream)
        for _ in range(3000):
            self.pair.carry()
            for side in (self.pair.a, self.pair.b):
                for stream in side.accepted:
                    self._track(side, stream)
                self._read(side, 1 << 20)
            self.pair.check()
            if all(way.got == way.sent for way in self.ways.values()) and not self._moving():
                return
        raise AssertionError("some stream starves")

    def _moving(self) -> bool:
        return any(side.mux.has_output or side.arriving for side in (self.pair.a, self.pair.b))


@given(st.integers(0, 2**32), st.integers(50, 400))
@pytest.mark.slow
@settings(max_examples=examples(60), phases=PHASES)
def test_every_byte_arrives_in_order_under_any_schedule(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
        for way in world.ways.values():
            assert way.sent.startswith(way.got)
    world.finish()


@given(st.integers(0, 2**32))
@pytest.mark.slow
@settings(max_examples=examples(40), phases=PHASES)
def test_resets_at_any_moment_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(150):
        world.step()
        if rng.random() < 0.05 and world.ways:
            way = rng.choice(list(world.ways.values()))
            way.source.mux.reset(way.stream)
            for key in [key for key, other in world.ways.items() if key[0] == way.stream.id]:
                world.ways.pop(key).closed = True
    for side in (world.pair.a, world.pair.b):
        for stream in [*side.mux.streams.values(), *side.accepted]:
            side.mux.reset(stream)
    world.pair.carry()
    for side in (world.pair.a, world.pair.b):
        for stream in side.accepted:
            side.mux.reset(stream)
        assert not side.mux.streams
        assert side.mux.inbound == side.mux.outbound == side.mux.unacked == 0
        assert side.mux.budget.used_bytes == 0
