"""Yamux: order, windows, fairness, ends, floods; every rule of the machine without a socket."""

from __future__ import annotations

from collections import deque

import pytest

from peerd.core import limits
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.wire.buffers import BufferPool
from peerd.wire.yamux import session
from peerd.wire.yamux.session import ACK, DATA, FIN, HEADER, PING, RST, SYN, WINDOW, Dead, GoneAway, Pong, YamuxSession
from peerd.wire.yamux.stream import INITIAL_WINDOW, WindowBudget, YamuxConfig, YamuxStream
from tests.worlds.machines.muxpair import MuxPair, Side


def frame(kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, stream, length) + body


def opened(pair: MuxPair) -> tuple[YamuxStream, YamuxStream]:
    """A stream opened by `a`, seen from both sides."""
    ours = pair.a.mux.open(pair.now)
    pair.carry()
    return ours, pair.b.accepted[-1]


def whole(data: bytes) -> memoryview:
    return memoryview(data)


@pytest.mark.parametrize("piece_bytes", [1, 7, 12, 13, 65519])
def test_data_arrives_whole_in_pieces_of_any_size(piece_bytes: int) -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.a.mux.write(ours, b"hello ")
    pair.a.mux.write(ours, whole(bytes(range(256)) * 20))
    pair.a.mux.close_write(ours)
    pair.carry(piece_bytes)
    assert pair.read(pair.b, theirs) == b"hello " + bytes(range(256)) * 20
    assert theirs.fin_received
    pair.b.mux.write(theirs, b"bye")
    pair.b.mux.close_write(theirs)
    pair.carry(piece_bytes)
    assert pair.read(pair.a, ours) == b"bye"
    pair.b.mux.abandon(theirs)
    assert not pair.a.mux.streams
    assert not pair.b.mux.streams
    assert pair.b.mux.inbound == pair.a.mux.outbound == 0
    pair.check()


def test_few_streams_are_opened_before_a_peer_of_another_kind_uses_one() -> None:
    pair = MuxPair(YamuxConfig(streams_early=3))
    pair.a.mux.ready = False
    unheard = [pair.a.mux.open(0.0) for _ in range(3)]
    assert not pair.a.mux.can_open
    for stream in unheard:
        pair.a.mux.reset(stream)  # the peer never hears of it, so it does not count
    ours = [pair.a.mux.open(0.0) for _ in range(3)]
    pair.carry()  # with acknowledgements
    pair.a.mux.reset(ours[0])
    pair.carry()
    assert not pair.a.mux.can_open, "a stream that ended was one of the first few, too"
    pair.b.mux.write(pair.b.accepted[2], b"hello")
    pair.carry()
    assert pair.a.mux.can_open


def test_small_writes_of_one_moment_share_a_frame() -> None:
    pair = MuxPair()
    ours, _ = opened(pair)
    for _ in range(10):
        pair.a.mux.write(ours, b"x" * 10)
    assert pair.send(pair.a) == HEADER.size + 100


def test_the_opening_travels_with_the_first_data() -> None:
    pair = MuxPair()
    ours = pair.a.mux.open(0.0)
    pair.a.mux.write(ours, b"first")
    assert pair.send(pair.a) == HEADER.size + 5
    pair.hear(pair.b)
    assert pair.b.accepted[0].take(9) == b"first"


def test_a_full_frame_and_its_header_fill_one_noise_frame() -> None:
    pair = MuxPair()
    ours, _ = opened(pair)
    pair.a.mux.write(ours, whole(bytes(200_000)))
    assert pair.send(pair.a, batches=1) == 65519


def test_the_window_stops_the_writer_and_reading_half_of_it_moves_it_on() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.a.mux.write(ours, whole(bytes(INITIAL_WINDOW * 2)))
    pair.carry()
    assert theirs.inbox_bytes == INITIAL_WINDOW
    assert ours.out_bytes == INITIAL_WINDOW
    pair.read(pair.b, theirs, INITIAL_WINDOW // 2 - 1)
    pair.carry()
    assert ours.out_bytes == INITIAL_WINDOW
    pair.read(pair.b, theirs, 1)
    pair.carry()
    assert ours.out_bytes == INITIAL_WINDOW // 2
    pair.check()


def test_more_than_the_window_is_a_violation() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    mux.receive(frame(DATA, SYN, 1, INITIAL_WINDOW, bytes(INITIAL_WINDOW)), 0.0)
    with pytest.raises(ProtocolViolation, match="window"):
        mux.receive(frame(DATA, 0, 1, 1), 0.0)


def test_a_frame_longer_than_the_window_is_refused_at_its_header() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    with pytest.raises(ProtocolViolation, match="window"):
        mux.receive(frame(DATA, SYN, 1, INITIAL_WINDOW + 1), 0.0)


def test_credit_counts_only_what_has_arrived_of_a_frame() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    mux.receive(frame(DATA, SYN, 1, INITIAL_WINDOW), 0.0)
    stream = mux.streams[1]
    for _ in range(4):
        mux.receive(bytes(INITIAL_WINDOW // 4), 0.0)
        stream.take(INITIAL_WINDOW)
        mux.consumed(stream, 0.0)
        assert stream.credit + stream.inbox_bytes <= stream.target
    assert stream.credit == INITIAL_WINDOW


def test_a_bulk_stream_never_keeps_a_small_one_waiting() -> None:
    pair = MuxPair()
    bulk, _ = opened(pair)
    small, _ = opened(pair)
    bulk.send_credit = 1 << 30
    pair.a.mux.write(bulk, whole(bytes(1 << 22)))
    pair.send(pair.a, batches=1)
    pair.a.mux.write(small, b"quick")
    sent = pair.send(pair.a, batches=2)
    assert sent <= 2 * 65519
    assert small.out_bytes == 0


def test_many_bulk_streams_take_turns() -> None:
    pair = MuxPair()
    streams = [opened(pair)[0] for _ in range(5)]
    for stream in streams:
        stream.send_credit = 1 << 30
        pair.a.mux.write(stream, whole(bytes(1 << 20)))
    pair.send(pair.a, batches=10)
    left = [stream.out_bytes for stream in streams]
    assert max(left) - min(left) <= 65519


def test_control_frames_go_before_data() -> None:
    pair = MuxPair()
    ours, _ = opened(pair)
    pair.a.mux.write(ours, whole(bytes(100_000)))
    pair.a.mux.receive(frame(PING, SYN, 0, 77), 0.0)
    pair.send(pair.a, batches=1)
    assert HEADER.unpack_from(pair.b.arriving) == (0, PING, ACK, 0, 77)


def test_a_fin_waits_for_the_data_before_it() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.a.mux.write(ours, whole(bytes(INITIAL_WINDOW + 10)))
    pair.a.mux.close_write(ours)
    pair.carry()
    assert not theirs.fin_received
    pair.read(pair.b, theirs)
    pair.carry()
    assert theirs.fin_received
    assert theirs.inbox_bytes == 10


def test_writing_after_the_end_is_our_own_bug() -> None:
    pair = MuxPair()
    ours, _ = opened(pair)
    pair.a.mux.close_write(ours)
    with pytest.raises(LocalError):
        pair.a.mux.write(ours, b"x")


def test_a_reset_drops_what_is_queued_and_tells_the_peer() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.a.mux.write(ours, b"never sent")
    pair.a.mux.reset(ours)
    pair.carry()
    assert theirs.was_reset
    assert theirs.inbox_bytes == 0
    assert not pair.a.mux.streams
    assert not pair.b.mux.streams


def test_a_reset_stream_that_the_peer_never_heard_of_leaves_no_trace() -> None:
    pair = MuxPair()
    pair.a.mux.reset(pair.a.mux.open(0.0))
    assert pair.send(pair.a) == 0
    assert pair.a.mux.outbound == pair.a.mux.unacked == 0


def test_a_reset_inbound_stream_keeps_its_place_until_its_handler_lets_go() -> None:
    """Rapid resets must not start more handlers than streams are allowed."""
    mux = YamuxSession(initiator=False, now=0.0, config=YamuxConfig(streams_inbound=4))
    streams = []
    for number in range(1, 9, 2):
        events = mux.receive(frame(DATA, SYN, number, 1, b"x") + frame(WINDOW, RST, number, 0), 0.0)
        streams.append(next(event.stream for event in events if isinstance(event, session.Opened)))
    assert mux.inbound == 4
    assert not [e for e in mux.receive(frame(DATA, SYN, 9, 0), 0.0) if isinstance(e, session.Opened)]
    mux.abandon(streams[0])
    assert mux.inbound == 3
    assert [e for e in mux.receive(frame(DATA, SYN, 11, 0), 0.0) if isinstance(e, session.Opened)]


def test_streams_beyond_the_limit_are_reset_and_their_data_thrown_away() -> None:
    mux = YamuxSession(initiator=False, now=0.0, config=YamuxConfig(streams_inbound=1))
    mux.receive(frame(DATA, SYN, 1, 0) + frame(DATA, SYN, 3, 5, b"aaaaa") + frame(DATA, 0, 1, 2, b"ok"), 0.0)
    assert mux.streams[1].take(9) == b"ok"
    into = memoryview(bytearray(100))
    size = mux.fill(into)
    assert HEADER.unpack_from(into) == (0, WINDOW, RST, 3, 0)
    assert size == 2 * HEADER.size


def test_we_open_no_more_than_the_peer_acknowledges() -> None:
    pair = MuxPair(YamuxConfig(ack_backlog=3))
    for _ in range(3):
        pair.a.mux.open(0.0)
    assert not pair.a.mux.can_open
    with pytest.raises(LocalError):
        pair.a.mux.open(0.0)
    pair.carry()
    assert pair.a.mux.can_open


@pytest.mark.parametrize(
    "raw",
    [
        HEADER.pack(1, DATA, 0, 1, 0),
        HEADER.pack(0, 4, 0, 1, 0),
        frame(DATA, 0, 0, 0),
        frame(DATA, SYN, 0, 0),
        frame(DATA, SYN, 2, 0),
        frame(DATA, SYN, 1, 0) * 2,
        frame(DATA, SYN | FIN, 1, 0) + frame(DATA, 0, 1, 1, b"x"),
        frame(WINDOW, SYN, 1, (1 << 32) - 1),
    ],
    ids=["version", "type", "stream 0", "open 0", "our parity", "twice", "after end", "window overflow"],
)
def test_what_breaks_the_protocol_is_a_violation(raw: bytes) -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    with pytest.raises(ProtocolViolation):
        mux.receive(raw, 0.0)


def test_frames_for_streams_that_are_gone_are_ignored() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    mux.receive(frame(DATA, 0, 1, 3, b"abc") + frame(WINDOW, RST, 1, 0) + frame(WINDOW, 0, 2, 9), 0.0)
    assert not mux.has_output


def test_a_flood_of_pings_that_are_not_read_is_a_violation() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    mux.receive(frame(PING, SYN, 0, 1) * 5000, 0.0)
    with pytest.raises(ProtocolViolation, match="replies unread"):
        mux.receive(frame(PING, SYN, 0, 1) * 5000, 0.0)


def test_a_window_grows_with_the_path_up_to_its_bound_and_the_budget() -> None:
    budget = WindowBudget(limits.WINDOW_BYTES_LINK, WindowBudget(1 << 40))
    pair = MuxPair(YamuxConfig(window_bytes_max=4 << 20), budget)
    theirs = pair.b.mux.open(0.0)
    pair.carry()
    ours = pair.a.accepted[0]
    pair.a.mux.rtt_s = 0.1
    for _ in range(12):
        pair.b.mux.write(theirs, whole(bytes(ours.target)))
        pair.carry()
        pair.now += 0.1
        while ours.inbox_bytes:
            pair.read(pair.a, ours)
            pair.carry()
        pair.check()
    assert ours.target == 4 << 20
    assert budget.used_bytes == (4 << 20) - INITIAL_WINDOW
    # The next stream starts with a window that others have needed, and the peer learns it with the opening.
    second = pair.a.mux.open(pair.now)
    assert second.target > INITIAL_WINDOW
    pair.carry()
    assert pair.b.accepted[-1].send_credit == second.credit
    for stream, other in ((ours, theirs), (second, pair.b.accepted[-1])):
        pair.a.mux.reset(stream)
        pair.b.mux.reset(other)
    assert budget.used_bytes == 0
    assert budget.parent is not None
    assert budget.parent.used_bytes == 0


def test_a_window_grows_where_round_trips_are_longer_than_they_were() -> None:
    """A path was measured when it was idle. Now bytes wait on it, and the window is used up once a round trip."""
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.b.mux.rtt_s = 0.02
    under_way: deque[int] = deque()  # batches of what `b` sends, each later by a step
    for step in range(1, 31):
        pair.now = step * 0.07
        pair.a.mux.write(ours, whole(bytes(INITIAL_WINDOW // 2)))
        pair.send(pair.a)
        pair.hear(pair.b)
        pair.read(pair.b, theirs)
        under_way.append(pair.send(pair.b))
        if len(under_way) > 2:
            pair.hear(pair.a, limit=under_way.popleft())
        pair.check()
    assert theirs.target > INITIAL_WINDOW
    assert 0.02 < (pair.b.mux.rtt_s or 0.0) < 0.14
    pongs = sum(isinstance(event, Pong) for event in pair.b.events)
    assert 1 <= pongs <= 4 * pair.now  # a few a second


def test_a_window_does_not_grow_for_a_slow_reader() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.b.mux.rtt_s = 0.01
    for _ in range(20):
        pair.a.mux.write(ours, whole(bytes(INITIAL_WINDOW // 2)))
        pair.carry()
        pair.now += 1.0
        pair.read(pair.b, theirs)
    assert theirs.target == INITIAL_WINDOW


def test_an_exhausted_budget_stops_growth_and_nothing_else() -> None:
    pair = MuxPair(budget=WindowBudget(0))
    theirs = pair.b.mux.open(0.0)
    pair.carry()
    ours = pair.a.accepted[0]
    pair.a.mux.rtt_s = 1.0
    for _ in range(4):
        pair.b.mux.write(theirs, whole(bytes(INITIAL_WINDOW)))
        pair.carry()
        assert len(pair.read(pair.a, ours)) == INITIAL_WINDOW
        pair.carry()
    assert ours.target == INITIAL_WINDOW


def test_pings_measure_the_path_and_silence_is_noticed() -> None:
    pair = MuxPair(YamuxConfig(keepalive_s=10.0, dead_after_s=30.0))
    pair.a.mux.wake(0.0)
    pair.send(pair.a)
    pair.hear(pair.b)
    pair.send(pair.b)
    pair.now = 0.25
    pair.hear(pair.a)
    assert pair.a.events == [Pong(0.25)]
    assert pair.a.mux.rtt_s == 0.25
    assert pair.a.mux.wake_at() == 10.0
    for now in (10.0, 20.0, 30.0):
        assert pair.a.mux.wake(now) == []
    assert pair.send(pair.a) == HEADER.size  # one ping in flight at a time
    assert pair.a.mux.wake_at() == 30.25
    assert pair.a.mux.wake(30.25) == [Dead(30.0)]


def test_an_answer_to_no_ping_means_nothing() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    assert mux.receive(frame(PING, ACK, 0, 5), 0.0) == []
    assert mux.rtt_s is None


def test_after_a_go_away_nothing_is_opened_and_the_rest_goes_on() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.b.mux.go_away()
    pair.carry()
    assert GoneAway(0) in pair.a.events
    assert pair.a.mux.exhausted
    assert pair.b.mux.exhausted
    pair.a.mux.write(ours, b"last words")
    pair.carry()
    assert pair.read(pair.b, theirs) == b"last words"
    pair.b.mux.receive(frame(DATA, SYN, 99, 0), 0.0)
    assert 99 not in pair.b.mux.streams


def test_what_came_before_a_fin_survives_a_reset() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    pair.b.mux.write(theirs, b"no, because")
    pair.b.mux.close_write(theirs)
    pair.carry()
    pair.b.mux.abandon(theirs)
    pair.a.mux.write(ours, b"more that nobody wants")
    pair.carry()
    assert ours.was_reset
    assert ours.fin_received
    assert ours.take(100) == b"no, because"


def test_a_stream_that_only_we_have_closed_is_reset_after_a_while() -> None:
    pair = MuxPair(YamuxConfig(linger_s=5.0, dead_after_s=1000.0))
    ours, theirs = opened(pair)
    pair.b.mux.abandon(theirs)
    pair.carry()
    pair.b.mux.wake(1.0)
    assert pair.b.mux.wake_at() <= 6.0
    assert theirs.id in pair.b.mux.streams
    pair.b.mux.wake(6.0)
    assert not pair.b.mux.streams
    pair.carry()
    assert ours.was_reset


def test_a_retracted_write_never_leaves_and_a_started_one_cannot_be_retracted() -> None:
    pair = MuxPair()
    ours, theirs = opened(pair)
    first, second = whole(bytes(INITIAL_WINDOW + 1)), whole(b"second")
    pair.a.mux.write(ours, first)
    pair.a.mux.write(ours, second)
    pair.carry()
    assert ours.retract(second)
    assert not ours.retract(first)
    pair.read(pair.b, theirs)
    pair.carry()
    assert theirs.inbox_bytes == 1


def test_low_water_is_reported_once() -> None:
    pair = MuxPair()
    ours, _ = opened(pair)
    pair.a.mux.write(ours, whole(bytes(100_000)))
    ours.low_water = 50_000
    pair.send(pair.a, batches=1)
    assert pair.a.mux.drained == [ours]
    pair.send(pair.a)
    assert pair.a.mux.drained == [ours]


def test_a_byte_at_a_time_costs_little_memory() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    mux.receive(frame(DATA, SYN, 1, 0), 0.0)
    tiny = frame(DATA, 0, 1, 1, b"x") * 1000
    for _ in range(50):
        mux.receive(tiny, 0.0)
    assert len(mux.streams[1].inbox) <= 4
    assert mux.streams[1].take(1 << 20) == b"x" * 50_000


def test_large_pieces_stay_in_their_buffer_and_give_it_back_when_read() -> None:
    pool = BufferPool(70_000, keep=8)
    mux = YamuxSession(initiator=False, now=0.0, pool=pool)
    mux.receive(frame(DATA, SYN, 1, 0), 0.0)
    buffer = pool.take()
    buffer[: 12 + 60_000] = frame(DATA, 0, 1, 60_000, b"z" * 60_000)
    mux.receive(memoryview(buffer)[: 12 + 60_000], 0.0)
    assert mux.pinned
    stream = mux.streams[1]
    assert stream.take(10) == b"z" * 10
    into = bytearray(59_990)
    assert stream.take_into(memoryview(into)) == 59_990
    assert bytes(into) == b"z" * 59_990
    assert pool.take() is buffer


def test_stream_numbers_run_out_politely() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    mux._next_id = (1 << 32) - 3
    mux.open(0.0)
    assert not mux.exhausted
    mux.open(0.0)
    assert mux.exhausted


def test_both_sides_number_their_own_streams() -> None:
    pair = MuxPair()
    for side in (pair.a, pair.b):
        assert isinstance(side, Side)
        side.mux.open(0.0)
    pair.carry()
    assert {stream.id for stream in pair.a.mux.streams.values()} == {1, 2}
    assert pair.a.mux.streams.keys() == pair.b.mux.streams.keys()
