"""What a trainer's log is told of stage peers that fail: one line each."""

from __future__ import annotations

import logging

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Refused, RemoteError, TooSlow, Unreachable
from peerd.pipeline.stage_peers import StagePeers
from tests.worlds.machines.handing import STAGES, Ways, members, peer
from tests.worlds.simulation.clock import SimClock

LOG = "peerd.pipeline"


@pytest.mark.parametrize("error", [Unreachable("gone"), TooSlow("nothing came")])
async def test_a_peer_that_fails_many_calls_at_once_is_told_of_in_one_line(
    error: RemoteError, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0"))
    log = logging.getLogger(LOG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers.run)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            times = peers.failed(0, peer("a0"), trio.current_time(), error)
            log.log(peers.level(peer("a0"), times), "a call failed")
        assert peers.is_cut_off(peer("a0")) == isinstance(error, Unreachable)
        nursery.cancel_scope.cancel()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith("is left out until it can be" if isinstance(error, Unreachable) else "a call failed")


async def test_calls_on_a_path_that_ended_do_not_count_once_the_peer_was_found_on_another(
    autojump_clock: MockClock,
) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers.run)
        started = trio.current_time()
        await trio.sleep(4.0)
        assert peers.failed(0, peer("a0"), started, Unreachable("the connection ended")) == 1
        assert peers.is_cut_off(peer("a0"))
        await trio.sleep(2.0)
        assert not peers.is_cut_off(peer("a0"))
        assert peers.failed(0, peer("a0"), started + 1.0, Unreachable("the connection ended")) == 0
        assert not peers.is_cut_off(peer("a0"))
        assert peers.failed(0, peer("a0"), trio.current_time(), Unreachable("it is gone")) > 0
        assert peers.is_cut_off(peer("a0"))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("linked", "spoke_last_s", "after_s", "cut_off"),
    [
        (False, 0.0, 0.3, True),  # its link is gone, and the call was waiting for a new one
        (True, 60.0, 0.3, False),  # quiet since long before the call, and not asked for a sign of life yet
        (True, 60.0, 3.0, True),  # said nothing though it was asked
        (True, 0.0, 3.0, False),  # speaks, and is slow
    ],
)
async def test_an_overtaken_peer_is_left_out_when_it_cannot_be_reached_and_rests_when_it_is_slow(
    autojump_clock: MockClock, linked: bool, spoke_last_s: float, after_s: float, cut_off: bool
) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), ways := Ways())
    peers.update(members("a0", "b0"))
    if not linked:
        ways.without.add("a0")
    if spoke_last_s:
        ways.silent_since["a0"] = trio.current_time()
        await trio.sleep(spoke_last_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers.run)
        started = trio.current_time()
        await trio.sleep(after_s)
        peers.overtaken(0, peer("a0"), peer("b0"), started)
        assert peers.is_cut_off(peer("a0")) is cut_off
        assert await peers.pick(0, 1.0, set()) == peer("b0")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("says", ["took", "answered", "heard"])
async def test_who_holds_back_from_an_overtaken_peer_calls_it_as_soon_as_it_answers(
    autojump_clock: MockClock, says: str
) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0"))
    started, picked = trio.current_time(), list[float]()
    peers.overtaken(0, peer("a0"), peer("b0"), started)
    peers.update(members("a0"))  # the mate is gone
    await trio.sleep(5.0)
    assert await peers.pick(0, 1.0, set()) == peer("a0")

    async def pick() -> None:
        await peers.pick(0, 1.0, set())
        picked.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pick)
        nursery.start_soon(pick)
        await trio.sleep(1.0)
        assert picked == [], "one call is to show whether it is back"
        if says == "took":
            peers.took(0, peer("a0"), started + 5.0)
        elif says == "answered":
            peers.answered(0, peer("a0"), 1.0, started + 5.0)
        else:
            peers.heard(peer("a0"))  # its way broke behind it: that says nothing of how quick it is
        await trio.testing.wait_all_tasks_blocked()
        assert picked == [started + 6.0] * (1 if says == "heard" else 2)
        nursery.cancel_scope.cancel()


async def test_a_late_peer_is_asked_for_a_sign_of_life_when_a_mate_is_asked(autojump_clock: MockClock) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), ways := Ways())
    peers.update(members("a0", "b0"))
    assert peers.mate(0, 1.0, peer("a0")) == peer("b0")
    assert ways.doubted == {"a0"}


async def test_who_waits_for_peers_that_fail_says_what_they_said(autojump_clock: MockClock) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0"))
    for name in ("a0", "b0"):
        peers.failed(0, peer(name), trio.current_time(), Refused("the gradient has values that are not finite"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers.pick, 0, 1.0, set[str]())
        await trio.testing.wait_all_tasks_blocked()
        assert peers.waits_for == "the peers of stage 0 failed just now: the gradient has values that are not finite"
    assert peers.waits_for is None


def test_a_first_call_to_slow_devices_is_given_the_time_that_they_need_by_their_published_rates() -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0", "a1"))
    later_s = 2.0 * (STAGES - 1)
    assert peers.given_up_after_s(0, peer("a0"), 150.0) == 150.0 + later_s
    peers.update(msgspec.structs.replace(member, rate=0.05) for member in members("a0", "b0", "a1"))
    assert peers.given_up_after_s(0, peer("a0"), 150.0) == 10 * (20.0 + 20.0) + later_s
    assert peers.given_up_after_s(1, peer("a1"), 150.0) == 10 * 20.0 + later_s - 2.0
    peers.update(msgspec.structs.replace(member, rate=5.0) for member in members("a0", "b0", "a1"))
    assert peers.given_up_after_s(0, peer("a0"), 150.0) == 150.0 + later_s


async def test_a_call_is_waited_for_while_its_peer_answers_others_but_not_for_ever(autojump_clock: MockClock) -> None:
    peers = StagePeers(STAGES, SimClock(1, "t"), Ways())
    peers.update(members("a0", "b0"))
    ended: dict[str, float] = {}

    async def wait_in_vain(name: str) -> None:
        with peers.call_to(peer(name), 10.0) as limit_s:
            assert limit_s == 40.0
            await trio.sleep_forever()

    async def call(name: str) -> None:
        with pytest.raises(TooSlow, match="no answer within"):
            await wait_in_vain(name)
        ended[name] = trio.current_time()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "a0")
        nursery.start_soon(call, "b0")
        for _ in range(8):
            await trio.sleep(6.0)
            peers.heard(peer("a0"))
    assert ended == {"b0": began + 10.0, "a0": began + 40.0}
