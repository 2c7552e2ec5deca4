"""Streams striped over several connections: in order, bounded, and independent of each other, whatever happens."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from peerd.core import limits
from peerd.core.errors import ProtocolViolation
from peerd.wire.noise.noise import PLAIN_BYTES
from peerd.wire.yamux.frames import FIN, GO_AWAY, HEADER, RST, SYN, WINDOW
from peerd.wire.yamux.session import Changed, Opened, YamuxSession, YamuxStream
from peerd.wire.yamux.stream import WindowBudget, YamuxConfig
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER, StripedLane
from tests.kit.amount import examples

GOLDEN = Path(__file__).parents[2] / "golden" / "rail_v1.bin"
RAILS = 3
LARGE = 200_000


class Striped:
    """Two sessions with a first connection and rails in each direction; the test decides what arrives when."""

    def __init__(self, config: YamuxConfig | None = None) -> None:
        self.a = YamuxSession(initiator=True, now=0.0, config=config, budget=WindowBudget(1 << 22))
        self.b = YamuxSession(initiator=False, now=0.0, config=config, budget=WindowBudget(1 << 22))
        self.now = 0.0
        self.spill_bytes = 2 * PLAIN_BYTES
        self.lanes: dict[tuple[bool, int], StripedLane | None] = {}
        self.ways: dict[tuple[bool, int], deque[bytes]] = {}
        self.heard: list[object] = []
        for to_b in (True, False):
            for number in range(RAILS + 1):
                self.lanes[to_b, number] = StripedLane(main=False) if number else None
                self.ways[to_b, number] = deque()
        for mux in (self.a, self.b):
            mux.takes_placed = True
            mux.rtt_s = mux.rtt_min_s = 0.01
            mux.set_rails(RAILS, helping=False)

    def send(self, to_b: bool, number: int) -> int:
        """One batch onto one connection."""
        mux, into = self.a if to_b else self.b, memoryview(bytearray(PLAIN_BYTES))
        size = (mux.fill_rail if number else mux.fill)(into, self.spill_bytes)
        if size:
            self.ways[to_b, number].append(bytes(into[:size]) + bytes(mux.spill or b""))
        return size

    def hear(self, to_b: bool, number: int, max_bytes: int = 1 << 30) -> None:
        way, mux = self.ways[to_b, number], self.b if to_b else self.a
        if way:
            data = way.popleft()
            if len(data) > max_bytes:
                way.appendleft(data[max_bytes:])
            self.heard += mux.receive(data[:max_bytes], self.now, self.lanes[to_b, number])

    def carry(self) -> None:
        """Everything that is ready goes across."""
        moved = 1
        while moved:
            moved = 0
            for key in self.ways:
                moved += self.send(*key) + len(self.ways[key])
                self.hear(*key)

    def opened(self) -> tuple[YamuxStream, YamuxStream]:
        """A stream of `a` that both sides know."""
        ours = self.a.open(self.now)
        self.a.write(ours, b".")
        self.carry()
        theirs = self.b.streams[ours.id]
        assert theirs.take(1) == b"."
        return ours, theirs


def placed(stream: int, at: int, data: bytes = b"", flags: int = 0, length: int | None = None) -> bytes:
    return PLACED_HEADER.pack(0, PLACED, flags, stream, len(data) if length is None else length, at) + data


def hear_all(pair: Striped, frames: list[bytes]) -> None:
    """All of them reach `b` on one rail."""
    lane = StripedLane(main=False)
    for frame in frames:
        pair.b.receive(frame, 0.0, lane)


def test_the_frames_of_a_rail_are_what_they_were() -> None:
    pair = Striped()
    ours, _ = pair.opened()
    pair.a.write(ours, bytes(range(256)) * 100)
    into = memoryview(bytearray(1000))
    wire = bytes(into[: pair.a.fill_rail(into)])
    pair.a.reset(ours)
    wire += bytes(into[: pair.a.fill(into)])
    assert wire == GOLDEN.read_bytes()


def test_bulk_goes_out_on_rails_and_arrives_in_order_however_they_differ() -> None:
    pair = Striped()
    ours, theirs = pair.opened()
    pair.spill_bytes = 0
    data = random.Random(1).randbytes(LARGE)
    pair.a.write(ours, data)
    numbers = [number for number in (1, 2, 3) if pair.send(True, number)]
    assert numbers == [1, 2, 3]
    for number in (3, 2):
        pair.hear(True, number)
    assert theirs.inbox_bytes == 0
    assert theirs.held is not None
    assert theirs.held.bytes > 0
    pair.carry()
    assert theirs.take(LARGE) == data


def test_a_small_message_goes_on_the_first_connection_and_does_not_wait_for_bulk() -> None:
    pair = Striped()
    bulk, _ = pair.opened()
    small, read = pair.opened()
    pair.a.write(bulk, bytes(LARGE))
    pair.send(True, 1)
    pair.a.write(small, b"quick")
    pair.send(True, 0)
    pair.hear(True, 0)  # and nothing of the rails
    assert read.take(10) == b"quick"


def test_a_stalled_rail_stops_only_streams_that_it_carries() -> None:
    pair = Striped()
    first, one = pair.opened()
    second, other = pair.opened()
    pair.a.write(first, bytes(60_000))
    pair.send(True, 1)  # and there it stays
    pair.a.write(second, bytes(60_000))
    pair.send(True, 2)
    pair.send(True, 0)
    pair.hear(True, 2)
    pair.hear(True, 0)
    assert one.inbox_bytes == 0
    assert other.inbox_bytes == 60_000


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_the_end_of_a_striped_stream_overtakes_nothing(end: str) -> None:
    pair = Striped()
    ours, theirs = pair.opened()
    pair.a.write(ours, bytes(60_000))
    pair.send(True, 1)
    pair.a.close_write(ours) if end == "fin" else pair.a.reset(ours)
    pair.send(True, 0)
    pair.hear(True, 0)
    assert not theirs.fin_received
    assert not theirs.was_reset
    pair.hear(True, 1)
    assert theirs.inbox_bytes == 60_000
    assert (theirs.fin_received, theirs.was_reset) == (end == "fin", end == "reset")


def test_without_rails_a_striped_stream_goes_on_on_the_first_connection() -> None:
    pair = Striped()
    ours, theirs = pair.opened()
    data = random.Random(2).randbytes(LARGE)
    pair.a.write(ours, data)
    pair.send(True, 1)
    pair.a.set_rails(0, helping=False)
    while pair.send(True, 0):
        pair.hear(True, 0)
    pair.hear(True, 1)
    assert theirs.take(LARGE) == data


def test_while_rails_are_young_the_first_connection_helps() -> None:
    pair = Striped()
    ours, theirs = pair.opened()
    data = random.Random(3).randbytes(LARGE)
    pair.a.write(ours, data)
    pair.a.set_rails(RAILS, helping=True)
    pair.send(True, 1)
    while pair.send(True, 0):
        pass
    assert ours.out_bytes == 0
    pair.carry()
    assert theirs.take(LARGE) == data


def test_a_stream_is_not_striped_before_the_peer_knows_it() -> None:
    pair = Striped()
    ours = pair.a.open(0.0)
    pair.a.write(ours, bytes(LARGE))
    assert not pair.send(True, 1)
    pair.send(True, 0)
    assert not ours.striped


@pytest.mark.parametrize(
    "frames",
    [
        [placed(1, 5, b"ab"), placed(1, 6, b"cd")],
        [placed(1, 5, b"abc"), placed(1, 4, b"xy")],
        [placed(1, 5, b"ab"), placed(1, 5, b"ab")],
        [placed(1, 0, b"a")],
        [placed(1, 1 << 40, b"a")],
        [placed(1, (1 << 64) - 1, b"a")],
        [placed(1, 1, length=1 << 31)],
        [placed(1, 1, flags=SYN)],
        [placed(1, 1, b"a", flags=FIN)],
        [placed(1, 1, flags=RST | 16)],
        [placed(1, 1 << 30, flags=FIN)],
        [placed(1, 1, flags=FIN), placed(1, 1, b"a")],
        [HEADER.pack(0, WINDOW, 0, 1, 100)],
        [HEADER.pack(0, 0, 0, 1, 4) + b"data"],
    ],
    ids=[
        "overlap behind",
        "overlap before",
        "twice",
        "read already",
        "far off",
        "wraps",
        "too long",
        "opens",
        "end with data",
        "unknown flag",
        "end far off",
        "data after the end",
        "window on a rail",
        "plain data on a rail",
    ],
)
def test_what_breaks_the_rules_of_a_rail_is_a_violation(frames: list[bytes]) -> None:
    pair = Striped()
    pair.opened()
    with pytest.raises(ProtocolViolation):
        hear_all(pair, frames)


def test_frames_with_a_place_are_a_violation_where_no_rails_were_agreed() -> None:
    pair = Striped()
    pair.opened()
    pair.b.takes_placed = False
    with pytest.raises(ProtocolViolation):
        pair.b.receive(placed(1, 1, b"a"), 0.0)


@pytest.mark.parametrize("budget_bytes", [0, 1 << 22])
def test_what_scattered_crumbs_cost_is_a_quarter_of_the_window_at_most(budget_bytes: int) -> None:
    pair = Striped()
    pair.b.budget.limit_bytes = budget_bytes
    _, theirs = pair.opened()
    lane, most = StripedLane(main=False), theirs.target // 4 // limits.HELD_PIECE_BYTES
    if budget_bytes:
        most = 3 * (1 << 20) // 4 // limits.HELD_PIECE_BYTES  # it grows with the first piece
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(most):
            pair.b.receive(placed(1, 3 + 2 * number, b"x"), 0.0, lane)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < theirs.target // 4
    with pytest.raises(ProtocolViolation, match="scattered"):
        pair.b.receive(placed(1, 3 + 2 * most, b"x"), 0.0, lane)


def test_crumbs_side_by_side_are_joined() -> None:
    pair = Striped()
    _, theirs = pair.opened()
    lane = StripedLane(main=False)
    for number in range(2 * limits.HELD_PIECES):
        pair.b.receive(placed(1, 2 + number, b"x"), 0.0, lane)
    pair.b.receive(placed(1, 1, b"y"), 0.0, lane)
    assert theirs.inbox_bytes == 2 * limits.HELD_PIECES + 1


def test_all_lanes_together_keep_to_the_window() -> None:
    pair = Striped()
    _, theirs = pair.opened()
    lanes = [StripedLane(main=False), StripedLane(main=False)]
    half = theirs.credit // 2 + 1000
    for number, lane in enumerate(lanes):
        pair.b.receive(placed(1, 1 + number * 100, length=half), 0.0, lane)  # either alone would be within it
    theirs.credit = 150
    pair.b.receive(bytes(100), 0.0, lanes[0])
    theirs.credit = min(theirs.credit, 50)
    with pytest.raises(ProtocolViolation):
        pair.b.receive(bytes(100), 0.0, lanes[1])


def test_a_rail_says_when_nothing_more_comes() -> None:
    lane = StripedLane(main=False)
    Striped().b.receive(HEADER.pack(0, GO_AWAY, 0, 0, 0), 0.0, lane)
    assert lane.ended


class World:
    """Random writes, sends and arrivals over a pair with rails."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pair = Striped(YamuxConfig(window_bytes_max=1 << 20))
        self.sent: dict[tuple[int, bool], bytearray] = {}  # by stream and whether `a` writes
        self.got: dict[tuple[int, bool], bytearray] = {}
        for _ in range(4):
            ours, _ = self.pair.opened()
            for by_a in (True, False):
                self.sent[ours.id, by_a], self.got[ours.id, by_a] = bytearray(), bytearray()

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        to_b, number = rng.random() < 0.5, rng.randrange(RAILS + 1)
        action = rng.choice(("write", "send", "send", "hear", "hear", "read", "rails", "time"))
        if action == "write":
            key = rng.choice(list(self.sent))
            data = rng.randbytes(rng.choice((1, 500, 20_000, 300_000)))
            self.sent[key] += data
            mux = pair.a if key[1] else pair.b
            mux.write(mux.streams[key[0]], memoryview(data))
        elif action == "send":
            pair.send(to_b, number)
        elif action == "hear":
            pair.hear(to_b, number, rng.choice((7, 5000, 1 << 20)))
        elif action == "read":
            self.read(rng.choice((1000, 1 << 20)))
        elif action == "rails":
            mux = pair.a if to_b else pair.b
            mux.set_rails(rng.randrange(RAILS + 1), helping=rng.random() < 0.5)
        else:
            pair.now += rng.choice((0.001, 0.02, 1.0))
        self.check()

    def read(self, max_bytes: int) -> None:
        for number, by_a in self.got:
            mux = self.pair.b if by_a else self.pair.a
            stream = mux.streams[number]
            self.got[number, by_a] += stream.take(max_bytes)
            mux.consumed(stream, self.pair.now)

    def check(self) -> None:
        for key, data in self.got.items():
            assert self.sent[key].startswith(data)
        for mux in (self.pair.a, self.pair.b):
            for stream in mux.streams.values():
                held = stream.held.bytes if stream.held else 0
                assert stream.credit >= 0 <= stream.send_credit
                assert stream.inbox_bytes + held + stream.credit <= stream.target
                assert stream.inbox_bytes == sum(map(len, stream.inbox))

    def finishes(self) -> bool:
        """True when all sent bytes arrive once both sides read: no stream starves."""
        for _ in range(3000):
            for mux in (self.pair.a, self.pair.b):
                mux.set_rails(RAILS, helping=False)
            self.pair.carry()
            self.pair.now += 0.01
            self.read(1 << 20)
            self.check()
            if self.got == self.sent:
                return True
        return False


@given(st.integers(0, 2**32), st.integers(20, 300))
@pytest.mark.slow
@settings(max_examples=examples(60), phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_every_byte_arrives_in_order_over_any_connections(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
    assert world.finishes()


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), max_size=30), st.randoms())
def test_pieces_in_any_order_are_one_stream_or_a_violation(pieces: list[tuple[int, int]], rng: random.Random) -> None:
    pair = Striped()
    _, theirs = pair.opened()
    whole = bytes(range(200))
    seen: set[int] = set()
    for at, size in pieces:
        new = set(range(at, at + size))
        lane = StripedLane(main=False)
        frame = placed(1, 1 + at, whole[at : at + size])
        cut = rng.randrange(len(frame) + 1)
        if seen & new:
            with pytest.raises(ProtocolViolation):
                pair.b.receive(frame, 0.0, lane)
            return
        heard = pair.b.receive(frame[:cut], 0.0, lane) + pair.b.receive(frame[cut:], 0.0, lane)
        assert all(isinstance(event, Changed | Opened) for event in heard)
        seen |= new
        ready = next((n for n in range(201) if n not in seen), 201)
        assert theirs.inbox_bytes == ready
    assert theirs.take(1000) == whole[: theirs.received_bytes - 1]
