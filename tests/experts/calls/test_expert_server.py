"""Experts answer what the run file allows, in batches of all callers; what a caller does wrong costs it alone."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, Refused, RemoteError
from peerd.experts.calls.expert_server import ExpertServer, ServerConfig
from peerd.messages.experts import Backward, Forward, Gradient, Name, Output
from peerd.rpc.rpc import Rpc
from peerd.run.grid import Uid
from peerd.run.runfile import RunFile, fingerprint
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import WIDTH, FakeExpert, FakeHosted, frame, request_id, rows_of
from tests.worlds.machines.fakehost import FakeHost, FakeNet, TrioClock, fake_net
from tests.worlds.roles.inline_worker import InlineWorker

X, Y = Uid(0, (1, 2)), Uid(1, (3, 0))


@dataclass
class Scene:
    """A host of two experts, and callers."""

    net: FakeNet
    run: RunFile
    host: FakeHost
    server: ExpertServer
    experts: dict[Uid, FakeHosted]
    scope: trio.CancelScope
    callers: dict[str, tuple[FakeHost, Rpc]] = field(default_factory=dict)
    starting: trio.Lock = field(default_factory=trio.Lock)

    async def caller(self, name: str) -> tuple[FakeHost, Rpc]:
        async with self.starting:
            if name not in self.callers:
                host = self.net.host(name)
                self.callers[name] = host, Rpc(host, TrioClock())
                await self.net.nursery.start(self.callers[name][1].run)
        return self.callers[name]

    async def forward(
        self, *frames: TensorFrame, uid: Uid = X, by: str = "alice", timeout_s: float = 60.0, run: bytes = b""
    ) -> tuple[Output, list[float]]:
        body = Forward(run or fingerprint(self.run), Name.of(uid))
        rpc = (await self.caller(by))[1]
        found = await rpc.call(
            self.host.id, "expert/1/forward", body, Output, frames=frames or [frame(1.0)], timeout_s=timeout_s
        )
        return found.body, rows_of(found.frames[0])

    async def backward(
        self, *frames: TensorFrame, by: str = "alice", request: bytes = b"", timeout_s: float = 60.0, **rest: Any
    ) -> tuple[Gradient, list[float]]:
        facts = {"generation": 0, "version": 0, "uid": X} | rest
        body = Backward(
            run=fingerprint(self.run),
            expert=Name.of(facts.pop("uid")),
            request=request or request_id(),
            **facts,
        )
        rpc = (await self.caller(by))[1]
        found = await rpc.call(
            self.host.id,
            "expert/1/backward",
            body,
            Gradient,
            frames=frames or [frame(1.0), frame(3.0)],
            timeout_s=timeout_s,
        )
        return found.body, rows_of(found.frames[0])


@asynccontextmanager
async def scene(batch_s: float = 1.0, names_faults: bool = True, **experts: Any) -> AsyncIterator[Scene]:
    """A host whose batches take `batch_s`."""
    run = expert_run(width=WIDTH, **{"layers": 2, "max_batch": 8} | experts)
    with trio.fail_after(3600):
        async with fake_net() as net:
            host = net.host("host")
            rpc = Rpc(host, TrioClock())
            await net.nursery.start(rpc.run)
            hosted = {uid: FakeHosted(FakeExpert(uid, names_faults=names_faults)) for uid in (X, Y)}
            config = ServerConfig(cost_s=lambda backward, samples: batch_s)
            server = ExpertServer(run, rpc, TrioClock(), hosted, config)
            scope = trio.CancelScope()

            async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                with scope:
                    await server.run(InlineWorker(), host.supervise, task_status=task_status)

            await net.nursery.start(serve)
            yield Scene(net, run, host, server, hosted, scope)


async def both(*calls: Any) -> list[Any]:
    """What several calls at once give, or raise, in their order."""
    found: list[Any] = [None] * len(calls)

    async def one(i: int, call: Any) -> None:
        try:
            found[i] = await call
        except RemoteError as error:
            found[i] = error

    async with trio.open_nursery() as nursery:
        for i, call in enumerate(calls):
            nursery.start_soon(one, i, call)
    return found


async def test_an_expert_answers_with_its_version_and_a_backward_makes_an_update(autojump_clock: object) -> None:
    async with scene() as s:
        output, rows = await s.forward(frame(1.0, 2.0))
        assert (output.generation, output.version, rows) == (0, 0, [10.0, 20.0])
        gradient, rows = await s.backward(frame(1.0, 2.0), frame(3.0, 4.0))
        assert (gradient.version, rows) == (1, [6.0, 8.0])
        output, rows = await s.forward(frame(1.0))
        assert (output.version, rows) == (1, [11.0])
        assert (s.server.stats.forwards, s.server.stats.updates, s.server.stats.samples) == (2, 1, 5)


async def test_requests_of_several_callers_merge_while_the_device_is_busy(autojump_clock: object) -> None:
    async with scene() as s:
        found = await both(*(s.forward(frame(float(i)), by=f"caller {i}") for i in range(9)))
        assert [rows for _, rows in found] == [[10.0 * i] for i in range(9)]
        batches = s.experts[X].model.batches
        assert sum(map(sum, batches)) == 9
        assert len(batches) <= 3
        assert s.server.queue_s() == 0.0


async def test_a_merged_backward_is_one_update(autojump_clock: object) -> None:
    async with scene() as s:
        await s.forward()
        found = await both(*(s.backward(by=f"caller {i}") for i in range(8)))
        model = s.experts[X].model
        assert model.version == s.server.stats.updates < 8
        assert {gradient.version for gradient, _ in found} == set(range(1, model.version + 1))


async def test_a_repeat_of_a_backward_counts_once_while_it_runs_and_afterwards(autojump_clock: object) -> None:
    async with scene() as s:
        request = request_id()
        found = await both(*(s.backward(request=request) for _ in range(3)))
        assert found == [(Gradient(0, 1, 0.0), [6.0])] * 3
        assert await s.backward(request=request) == found[0]
        assert (s.experts[X].model.version, s.server.stats.repeats) == (1, 3)
        await s.backward(request=request, by="bob")  # ids are each caller's own
        assert s.experts[X].model.version == 2
        await trio.sleep(130.0)
        await s.backward(request=request)
        assert s.experts[X].model.version == 3


async def test_a_backward_whose_caller_lost_its_link_counts_once(autojump_clock: object) -> None:
    """The first call is gone with its link while the device computes; the repeat gets the answer that was made."""
    async with scene(batch_s=5.0) as s:
        request = request_id()
        alice, _ = await s.caller("alice")

        async def lose() -> None:
            await trio.sleep(1.0)
            s.net.cut(alice.id, s.host.id)
            s.net.heal(alice.id, s.host.id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            (failure,) = await both(s.backward(request=request))
        assert isinstance(failure, RemoteError)
        gradient, rows = await s.backward(request=request)
        assert (gradient.version, rows, s.experts[X].model.version) == (1, [6.0], 1)


async def test_a_backward_that_nobody_waits_for_is_not_computed_and_its_repeat_is_new(autojump_clock: object) -> None:
    async with scene(batch_s=5.0) as s, trio.open_nursery() as nursery:
        for by in ("bob", "carol"):  # the device is busy, and the next batch is with it
            nursery.start_soon(lambda by=by: s.backward(by=by, uid=Y))  # type: ignore[misc]
            await trio.sleep(0.5)
        request = request_id()
        (failure,) = await both(s.backward(request=request, timeout_s=1.0))
        assert isinstance(failure, RemoteError)
        assert s.server.queued == 0
        gradient, _ = await s.backward(request=request)
        assert gradient.version == s.experts[X].model.version == 1


async def test_the_same_uid_is_refused_once_its_host_gave_it_up_also_what_waits_already(autojump_clock: object) -> None:
    async with scene(batch_s=5.0) as s:
        async with trio.open_nursery() as nursery:
            found: list[Any] = []

            async def call(name: str) -> None:
                found.extend(await both(s.forward(by=name)))

            for i in range(3):
                nursery.start_soon(call, f"caller {i}")
                await trio.sleep(0.1)
            del s.experts[X]
            s.server.forget(X, "generation 4 of peer Q is higher")
        told = [one for one in found if isinstance(one, Refused)]
        assert len(told) >= 1
        assert "expert 0.1.2 is not served here any more: generation 4 of peer Q is higher" in str(told[0])
        with pytest.raises(Refused, match="any more: generation 4"):
            await s.forward()
        with pytest.raises(Refused, match=r"expert 0\.0\.0 is not served here( |$)"):
            await s.forward(uid=Uid(0, (0, 0)))


async def test_updates_that_are_held_wait_and_forwards_do_not(autojump_clock: object) -> None:
    async with scene() as s:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.backward)
            await trio.sleep(0.5)  # it is being computed
            await s.server.hold(X)
            assert s.experts[X].model.version == 1
            nursery.start_soon(s.backward)
            assert (await s.forward())[0].version == 1
            await trio.sleep(60 - 5)
            assert (s.experts[X].model.version, s.server.queued) == (1, 1)
            s.server.release(X)
        assert s.experts[X].model.version == 2


async def test_staleness_beyond_what_the_caller_accepts_is_refused(autojump_clock: object) -> None:
    async with scene() as s:
        await s.backward()
        await s.backward()
        with pytest.raises(Refused, match="2 updates were made since its forward; its caller accepts 1"):
            await s.backward(version=0, most_stale=1)
        with pytest.raises(Refused, match="of generation 0 now, its forward was of 3"):
            await s.backward(generation=3, most_stale=100)
        await s.backward(version=0, most_stale=2)
        await s.backward(version=0)
        # Fresh when they came, and stale once the first of them was computed.
        found = await both(*(s.backward(frame(*[1.0] * 8), frame(*[1.0] * 8), version=4, most_stale=0) for _ in "ab"))
        assert sorted(type(one).__name__ for one in found) == ["Refused", "tuple"]
        assert (s.experts[X].model.version, s.server.stats.stale) == (5, 3)


WRONG = {
    "expert 0.9.0 is not in the grid": {"uid": Uid(0, (9, 0))},
    "expert 7.1.2 is not in the grid": {"uid": Uid(7, (1, 2))},
    "expert 0.1 is not in the grid": {"uid": Uid(0, (1,))},
    r"a frame of shape \[1, 5\]; expected \[rows, 4\]": {"frames": [frame(1.0, width=5)]},
    "samples in float64; this run's are in float32": {"frames": [frame(1.0, dtype="float64")]},
    "a call with 0 samples": {"frames": [frame()]},
    "a call with 9 samples; allowed: 1 to 8": {"frames": [frame(*[1.0] * 9)]},
    "values that are not finite": {"frames": [frame(1.0, float("nan"))]},
}


@pytest.mark.parametrize("why", WRONG)
async def test_a_call_that_breaks_the_protocol_is_refused_and_its_sender_named(
    why: str, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene() as s:
        wrong = dict(WRONG[why])
        frames: Sequence[Any] = wrong.pop("frames", [frame(1.0)])  # type: ignore[assignment]
        mallory = (await s.caller("mallory"))[0].id
        with caplog.at_level(logging.WARNING, "peerd.experts"), pytest.raises(Refused, match=why):
            await s.forward(*frames, by="mallory", **wrong)  # type: ignore[arg-type]
        assert [str(mallory) in record.getMessage() for record in caplog.records] == [True]
        with pytest.raises(Refused, match=why):
            await s.forward(*frames, by="mallory", **wrong)  # type: ignore[arg-type]
        assert len(caplog.records) == 1  # it is not named with every call
        assert (await s.forward())[1] == [10.0]
        assert s.host.crashes == []


async def test_a_backward_needs_as_many_gradients_as_samples(autojump_clock: object) -> None:
    async with scene() as s:
        with pytest.raises(Refused, match="a call with 1 frames; expected 2"):
            await s.backward(frame(1.0))
        with pytest.raises(Refused, match="a call with 1 and 2 samples"):
            await s.backward(frame(1.0), frame(1.0, 2.0))
        with pytest.raises(Refused, match="your run file differs"):
            await s.forward(run=bytes(16))
        assert s.experts[X].model.version == 0


async def test_frames_of_a_wrong_shape_are_not_even_received(autojump_clock: object) -> None:
    async with scene(max_batch=1 << 16) as s:
        big = frame(*[1.0] * 60_000, width=3)
        held = []
        s.host.book.take = lambda *a, _take=s.host.book.take: held.append(a[2]) or _take(*a)  # type: ignore
        with pytest.raises(Refused, match="a frame of shape"):
            await s.forward(big)
        assert max(held, default=0) < 60_000


@pytest.mark.parametrize("names_faults", [True, False])
async def test_values_that_are_not_finite_cost_their_sender_alone(names_faults: bool, autojump_clock: object) -> None:
    async with scene(names_faults=names_faults) as s:
        wrong = frame(float("nan"))
        calls = [s.forward(uid=Y, by="busy"), s.forward(uid=Y, by="busier")]
        calls += [s.backward(by="good"), s.backward(wrong, frame(1.0), by="mallory"), s.backward(by="better")]
        _, _, good, bad, better = await both(*calls)
        assert good[1] == better[1] == [6.0]
        assert "not finite" in str(bad)
        assert 1 <= s.experts[X].model.version <= 2


@pytest.mark.slow
async def test_a_caller_that_floods_is_told_to_wait_and_others_are_served_meanwhile(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(batch_s=0.1, max_batch=1) as s:
        async with trio.open_nursery() as nursery:
            answers: list[Any] = []

            async def flood() -> None:
                answers.extend(await both(*(s.forward(by="mallory", timeout_s=600.0) for _ in range(1010))))

            nursery.start_soon(flood)
            await trio.sleep(1.0)
            began = trio.current_time()
            for _ in range(5):
                await s.forward(by="alice")
            assert trio.current_time() - began < 5 * 5 * 0.1
            await trio.sleep(200.0)
        told = [one for one in answers if isinstance(one, Overloaded)]
        assert len(told) == 1010 - 960 - 2 * 1
        assert all("960 of your requests are waiting; allowed: 960" in str(one) for one in told)
        assert all(one.retry_after_s > 0 for one in told)
        mallory = str(s.callers["mallory"][0].id)
        assert [mallory in record.getMessage() for record in caplog.records] == [True]


async def test_a_fault_of_the_host_itself_ends_one_batch_and_no_more(autojump_clock: object) -> None:
    async with scene() as s:
        s.experts[X].model.crashes = True
        request = request_id()
        with pytest.raises(Refused, match=r"a backward of expert 0\.1\.2 failed here, not by the caller's fault"):
            await s.backward(request=request)
        assert [str(error) for _, error in s.host.crashes] == ["the device is on fire"]
        s.experts[X].model.crashes = False
        assert (await s.backward(request=request))[0].version == 1


async def test_callers_of_a_host_without_memory_are_asked_to_come_again(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene() as s:
        request, model = request_id(), s.experts[X].model
        lacks = [True]
        backward = model.backward

        def compute(pairs: Any) -> Any:
            if lacks.pop():
                raise MemoryError
            return backward(pairs)

        monkeypatch.setattr(model, "backward", compute)
        with caplog.at_level(logging.WARNING), pytest.raises(Overloaded, match="no memory is left for it"):
            await s.backward(request=request)
        assert [record.getMessage() for record in caplog.records] == [
            "experts cannot compute: there is no memory for the job “expert backward”: this machine is out of memory"
        ]
        assert not s.host.crashes
        lacks.append(False)
        assert (await s.backward(request=request))[0].version == 1


async def test_what_waits_is_refused_when_the_host_leaves(autojump_clock: object) -> None:
    async with scene(batch_s=5.0) as s:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await trio.sleep(1.0)
                s.scope.cancel()

            nursery.start_soon(leave)
            found = await both(*(s.backward(by=f"caller {i}") for i in range(4)))
        assert {str(one).partition(" (")[0] for one in found} == {"this peer is leaving"}
        with pytest.raises(Refused, match="no such method"):
            await s.forward()
