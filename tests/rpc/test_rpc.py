"""Calls over fake hosts, under a virtual clock: all cases that hold for any host, and what needs a hostile peer."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import (
    Cause,
    LocalError,
    Overloaded,
    ProtocolViolation,
    Refused,
    RemoteError,
    TooSlow,
    Unreachable,
)
from peerd.core.limits import RPC_IDLE_S, RPC_PENDING
from peerd.messages.encoding import Empty, encode
from peerd.rpc.inbound import renewed
from peerd.rpc.loopback import LoopbackStream
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.rpc import Answer, CallStream, Incoming, Rpc
from tests.kit.declared import ANY, declared
from tests.worlds.machines import rpc_growing_cases, rpc_stream_cases
from tests.worlds.machines.fakehost import TrioClock, fake_net
from tests.worlds.machines.rpc_cases import BIG, CASES, FRAMES, Case, Held, Text, ask, ask_empty, echo, fake_pair

Clock = trio.testing.MockClock
assert rpc_growing_cases.case is rpc_stream_cases.case  # their cases have joined by importing


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_over_fake_hosts(case: Case, autojump_clock: Clock) -> None:
    """The case itself, and that it leaves nothing behind: no stream, no byte, no call."""
    async with fake_pair() as (pair, net, *_):
        with trio.fail_after(300):
            await case(pair)
        await trio.sleep(RPC_IDLE_S * 2.5)
        assert all(stream.closed for _, stream in net.streams)
        for rpc in (pair.a, pair.b):
            status = rpc.status()
            assert [status[name] for name in ("waiting", "running", "channels", "held_bytes")] == [0, 0, 0, 0]


async def test_small_calls_share_one_stream_that_opens_once(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, _):
        pair.b.serve("t/1/echo", Text, echo, declared=ANY)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask, pair)
        assert a_host.opened == ["/peerd/t/1"]


async def test_a_call_to_oneself_before_anything_is_served_does_not_spoil_later_ones(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, _):
        with pytest.raises(Refused, match="no such method"):
            await pair.a.call(a_host.id, "t/1/echo", Text("early"), Text, timeout_s=5.0)
        pair.a.serve("t/1/echo", Text, echo, declared=ANY)
        answer = await pair.a.call(a_host.id, "t/1/echo", Text("later"), Text, timeout_s=5.0)
        assert answer.body == Text("later")


async def test_a_method_that_answers_with_frames_leaves_the_shared_stream(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, _):
        case = next(case for case in CASES if case.__name__.startswith("answers_with_frames"))
        await case(pair)
        assert len(a_host.opened) == 2  # the shared one, on which it was learned, and one for the later calls


async def test_large_calls_use_idle_streams_again_and_never_share_one(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, a_host, b_host):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=FRAMES)
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)

        async def large(method: str, timeout_s: float = 5.0) -> None:
            kind = Empty if method == "t/1/held" else Text
            await pair.a.call(b_host.id, method, Text(""), kind, frames=(BIG,), timeout_s=timeout_s)

        for _ in range(3):
            await large("t/1/echo")
        assert len(a_host.opened) == 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(large, "t/1/held")
            await held.entered.wait()
            await large("t/1/echo")
            held.let_go.set()
        assert len(a_host.opened) == 2
        with pytest.raises(Refused):
            await large("t/1/none")  # refused before its frames were sent: that stream is not used again
        held.let_go = trio.Event()
        with pytest.raises(TooSlow):
            await large("t/1/held", 1.0)
        await large("t/1/echo")
        assert len(a_host.opened) == 3
        net.cut(a_host.id, b_host.id)
        net.heal(a_host.id, b_host.id)
        await trio.testing.wait_all_tasks_blocked()
        await large("t/1/echo")
        assert len(a_host.opened) == 4
        await trio.sleep(RPC_IDLE_S * 2.5)
        assert pair.a.status()["channels"] == 0


async def test_a_lost_link_is_replaced_by_the_next_call(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, a_host, b_host):
        pair.b.serve("t/1/echo", Text, echo, declared=ANY)
        assert await ask(pair) == "hi"
        net.cut(a_host.id, b_host.id)
        with pytest.raises(Unreachable) as caught:
            await ask(pair)
        assert caught.value.peer == b_host.id
        net.heal(a_host.id, b_host.id)
        assert await ask(pair) == "hi"


async def test_a_shared_stream_that_nobody_uses_is_closed_and_opened_again(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, _):
        pair.b.serve("t/1/echo", Text, echo, declared=ANY)
        await ask(pair)
        assert pair.a.status()["channels"] == 1
        await trio.sleep(RPC_IDLE_S * 2.5)
        assert pair.a.status()["channels"] == 0
        assert await ask(pair) == "hi"
        assert len(a_host.opened) == 2


async def test_a_long_call_keeps_its_stream_open(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, *_):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=ANY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_empty, pair, "t/1/held", RPC_IDLE_S * 5)
            await trio.sleep(RPC_IDLE_S * 4)
            assert pair.a.status()["channels"] == 1
            held.let_go.set()
        assert held.entries == 1
        assert not held.cancelled.is_set()


@pytest.mark.slow
async def test_calls_that_wait_are_bounded(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, *_):
        pair.b.serve("t/1/held", Text, Held(), declared=ANY)
        failures: list[Exception] = []

        async def call() -> None:
            try:
                await ask_empty(pair, "t/1/held", 1.0)
            except (Overloaded, TooSlow) as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(RPC_PENDING + 5):
                nursery.start_soon(call)
        assert sum("wait already" in str(error) for error in failures) == 5
        assert len(failures) == RPC_PENDING + 5


async def test_a_caller_that_does_not_read_its_answers_is_not_read_any_more(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve("t/1/echo", Text, echo, declared=ANY)
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        body = encode(Text("x" * 10_000))
        sent = 0
        with trio.move_on_after(10):
            for call_id in range(1, 10_000):
                await stream.send(wire.encode_call(wire.REQUEST, call_id, b"echo", 5.0, body))
                sent = call_id
        assert 50 < sent < 150  # two windows, the outbox, and what was in hand
        stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == 0


HOSTILE_CALLERS = {
    "unknown kind": b"\x00\x00\x00\x00\x09\x00" + bytes(8),
    "a reply": wire.encode_message(wire.REPLY, 1),
    "an endless block": b"\xff\xff\xff\xff\x01\x00" + bytes(8),
    "a part before any call": wire.encode_message(wire.PART, 1),
    "a cancel before any call": wire.encode_message(wire.CANCEL, 7),
    "an id of zero": wire.encode_call(wire.REQUEST, 0, b"echo", 1.0, b""),
    "an id twice": wire.encode_call(wire.REQUEST, 1, b"none", 1.0, b"") * 2,
    "a part of a unary call": wire.encode_call(wire.REQUEST, 1, b"held", 9.0, encode(Text("")))
    + wire.encode_message(wire.PART, 1),
    "a part after the end": wire.encode_call(wire.OPEN, 1, b"talk", 9.0, encode(Text("")))
    + wire.encode_message(wire.END, 1)
    + wire.encode_message(wire.PART, 1),
    "an end in mid message": wire.encode_call(wire.REQUEST, 1, b"echo", 1.0, encode(Text("")))[:-1],
    "an end in mid frame": wire.encode_call(
        wire.REQUEST, 1, b"echo", 1.0, encode(Text("")), wire.encode_frames([BIG])[0], 1
    ),
}


async def read_all(stream: LoopbackStream) -> None:
    while await stream.receive_some(1000):
        pass


@pytest.mark.parametrize("sent", HOSTILE_CALLERS.values(), ids=HOSTILE_CALLERS.keys())
async def test_a_hostile_caller_loses_its_stream_and_harms_nobody(sent: bytes, autojump_clock: Clock) -> None:
    async def talk(call: object, parts: object) -> None:
        await trio.sleep_forever()

    async with fake_pair() as (pair, _, a_host, b_host):
        held = Held()
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
        pair.b.serve("t/1/held", Text, held, declared=ANY)
        pair.b.serve_stream("t/1/talk", Text, talk, declared=ANY)
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        await stream.send(sent)
        await stream.close_write()
        with pytest.raises(Unreachable):
            await read_all(stream)
        (_, error) = b_host.crashes[0]
        assert isinstance(error, ProtocolViolation)
        assert error.peer == a_host.id
        await trio.testing.wait_all_tasks_blocked()
        status = pair.b.status()
        assert (status["running"], status["held_bytes"]) == (0, 0)
        assert await ask(pair) == "hi"


HOSTILE_SERVERS = {
    "an answer to no call": wire.encode_message(wire.REPLY, 2, encode(Empty())),
    "a part": wire.encode_message(wire.PART, 1),
    "a request": wire.encode_call(wire.REQUEST, 1, b"echo", 1.0, b""),
    "an error that is none": wire.encode_message(wire.ERROR, 1, b"\x93\xa1x\xa0\x00"),
    "rubbish": b"\xaa" * 20,
    "half an answer": wire.encode_message(wire.REPLY, 1, encode(Empty()))[:-1],
    "a wrong body": wire.encode_message(wire.REPLY, 1, b"\xc1"),
}


@pytest.mark.parametrize("large", [False, True], ids=["shared stream", "own stream"])
@pytest.mark.parametrize("sent", HOSTILE_SERVERS.values(), ids=HOSTILE_SERVERS.keys())
async def test_a_hostile_server_fails_the_call_and_is_named(sent: bytes, large: bool, autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, _, b_host):

        async def answer(stream: object) -> None:
            await stream.receive_some(1 << 20)
            await stream.send(sent)
            await stream.close_write()

        b_host.handle("/peerd/t/1", answer)
        frames = (BIG,) if large else ()
        with pytest.raises(ProtocolViolation) as caught:
            await pair.a.call(b_host.id, "t/1/echo", Text(""), Empty, frames=frames, timeout_s=5)
        assert caught.value.peer == b_host.id
        status = pair.a.status()
        assert (status["waiting"], status["held_bytes"]) == (0, 0)


async def test_a_server_that_closes_its_stream_is_unreachable(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, _, b_host):

        async def close(stream: object) -> None:
            await stream.receive_some(1000)
            await stream.close_write()

        b_host.handle("/peerd/t/1", close)
        for frames in ((), (BIG,)):
            with pytest.raises(Unreachable):
                await pair.a.call(b_host.id, "t/1/echo", Text(""), Empty, frames=frames, timeout_s=5)


async def test_payloads_that_stall_are_given_up_at_the_deadline(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        headers, payloads = wire.encode_frames([BIG])
        await stream.send(wire.encode_call(wire.REQUEST, 1, b"echo", 2.0, encode(Text("")), headers, 1))
        await stream.send(payloads[0][:1000])
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["held_bytes"] == 1 << 20
        await trio.sleep(2.5)
        assert pair.b.status()["held_bytes"] == 0
        assert pair.b.status()["running"] == 0
        await stream.send(payloads[0][1000:])
        await stream.send(wire.encode_call(wire.REQUEST, 2, b"echo", 2.0, encode(Text(""))))
        await trio.testing.wait_all_tasks_blocked()
        parser, answers = wire.MessageParser(), []
        while len(answers) < 2:
            answers += parser.feed(await stream.receive_some(1000))
        late, fine = answers
        assert (late.kind, fine.kind) == (wire.ERROR, wire.REPLY)


async def test_nothing_is_called_before_run_or_after_it(autojump_clock: Clock) -> None:
    async with fake_net() as net:
        rpc = Rpc(net.host("a"), TrioClock())
        with pytest.raises(LocalError):
            await rpc.call(net.host("b").id, "t/1/echo", Text(""), Text, timeout_s=1)
        rpc.serve("t/1/echo", Text, echo, declared=ANY)
        with pytest.raises(LocalError):
            rpc.serve("t/1/echo", Text, echo, declared=ANY)


async def test_calls_that_wait_fail_when_the_service_stops(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=ANY)
        rpc = Rpc(a_host, TrioClock())
        async with trio.open_nursery() as nursery, trio.open_nursery() as running:
            await running.start(rpc.run)

            async def call() -> None:
                with pytest.raises(Unreachable):
                    await rpc.call(b_host.id, "t/1/held", Text(""), Empty, timeout_s=60)

            nursery.start_soon(call)
            await held.entered.wait()
            running.cancel_scope.cancel()
        await held.cancelled.wait()


async def test_callers_learn_at_once_that_the_service_they_wait_for_has_stopped(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, _, b_host):
        held = Held()
        rpc = Rpc(b_host, TrioClock())
        rpc.serve("u/1/held", Text, held, declared=FRAMES)
        start = trio.current_time()
        async with trio.open_nursery() as nursery, trio.open_nursery() as running:
            await running.start(rpc.run)

            async def call(frames: tuple[TensorFrame, ...]) -> None:
                with pytest.raises(Unreachable):
                    await pair.a.call(b_host.id, "u/1/held", Text(""), Empty, frames=frames, timeout_s=60)

            nursery.start_soon(call, ())
            nursery.start_soon(call, (BIG,))
            await trio.testing.wait_all_tasks_blocked()
            assert held.entries == 2
            running.cancel_scope.cancel()
        assert trio.current_time() - start < 1


async def test_a_cancelled_call_keeps_its_place_until_its_handler_has_ended(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, *_):
        let_go = trio.Event()

        async def stubborn(call: Incoming[Text]) -> Answer[Empty]:
            with trio.CancelScope(shield=True):
                await let_go.wait()
            return Answer(Empty())

        pair.b.serve("t/1/stubborn", Text, stubborn, declared=declared(calls_per_peer=2))
        for _ in range(2):
            with pytest.raises(TooSlow):
                await ask_empty(pair, "t/1/stubborn", 1.0)
        with pytest.raises(Overloaded):
            await ask_empty(pair, "t/1/stubborn", 1.0)
        assert pair.b.status()["running"] == 2
        let_go.set()
        await ask_empty(pair, "t/1/stubborn", 1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == 0


async def test_an_answer_that_nobody_takes_holds_its_place_and_then_ends_the_stream(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):

        async def give(call: Incoming[Text]) -> Answer[Empty]:
            return Answer(Empty(), (BIG,))

        pair.b.serve("t/1/give", Text, give, declared=declared(calls_per_peer=1))
        stream = await a_host.open_stream(b_host.id, "/peerd/t/1")
        await stream.send(wire.encode_call(wire.REQUEST, 1, b"give", 3.0, encode(Text(""))))
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == 1
        with pytest.raises(Overloaded):
            await ask_empty(pair, "t/1/give")
        await trio.sleep(3.5)
        assert pair.b.status()["running"] == 0
        with pytest.raises(Unreachable):
            await read_all(stream)
        await ask_empty(pair, "t/1/give")


async def send_and_receive(call: CallStream, part: Text, frames: tuple[TensorFrame, ...]) -> None:
    await call.send(part, frames)
    await call.receive(Text)


async def test_a_part_above_the_limits_ends_the_handler(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, net, _, b_host):
        ended = trio.Event()

        async def listen(call: Incoming[Text], parts: CallStream) -> None:
            try:
                await parts.send(Text("ready"))
                await trio.sleep_forever()
            finally:
                ended.set()

        pair.b.serve_stream("t/1/listen", Text, listen, declared=declared(body_bytes=100))
        for part, frames in ((Text("x" * 200), ()), (Text(""), (BIG,))):
            ended = trio.Event()
            async with pair.a.stream(b_host.id, "t/1/listen", Text(""), timeout_s=60) as call:
                await call.receive(Text)
                with pytest.raises(Refused, match="allowed"):
                    await send_and_receive(call, part, frames)
            await ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert pair.b.status()["running"] == 0
        assert all(stream.closed for _, stream in net.streams)


async def test_a_worker_of_the_crew_outlives_neither_a_crash_nor_a_deadline(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, _, b_host):

        async def odd(call: Incoming[Text]) -> Answer[Text]:
            if call.body.text == "crash":
                raise ZeroDivisionError
            if call.body.text == "sleep":
                await trio.sleep_forever()
            await trio.sleep(0.01)
            return Answer(call.body)

        pair.b.serve("t/1/odd", Text, odd, declared=ANY)
        for text in ("a", "crash", "b", "sleep", "c") * 3:
            if text in ("crash", "sleep"):
                with pytest.raises((Refused, TooSlow)):
                    await ask(pair, "t/1/odd", text, 1.0)
            else:
                assert await ask(pair, "t/1/odd", text, 1.0) == text
            await trio.sleep(5)  # longer than any deadline that an idle worker may still have
        assert len(b_host.crashes) == 3


@pytest.mark.parametrize(
    "error", [Refused("no", cause=Cause.NO_SUCH_PROTOCOL), Unreachable("gone"), Overloaded("x", 2.0)]
)
def test_each_caller_of_a_lost_stream_gets_an_error_of_its_own_with_the_same_cause(error: RemoteError) -> None:
    found = renewed(error)
    assert found is not error
    assert (type(found), found.args, found.cause) == (type(error), error.args, error.cause)
