"""A call that is sent to a mate as well: who is asked, when, whose answer counts, and what is left under way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from peerd.core.errors import LocalError, PeerdError, Refused, Unreachable
from peerd.pipeline.hedging import Hedged

LATE_S = 3.0
FOREVER = float("inf")


class Peers:
    """Peers that answer, or fail, after so many seconds."""

    def __init__(self, **takes: float | tuple[float, PeerdError]) -> None:
        self.takes = takes
        self.asked: list[tuple[str, float]] = []
        self.ended: list[str] = []

    async def ask(self, name: str) -> str:
        self.asked.append((name, trio.current_time()))
        takes = self.takes[name]
        seconds, error = takes if isinstance(takes, tuple) else (takes, None)
        try:
            await trio.sleep(seconds)
        finally:
            self.ended.append(name)
        if error is not None:
            raise error
        return f"by {name}"

    async def first(self, mate: str | None = "b", late_s: float | None = LATE_S) -> tuple[str, str]:
        ask: Callable[[str], Awaitable[str]] = self.ask
        return await Hedged(ask, lambda: mate).first("a", late_s)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock


async def test_one_that_is_in_time_is_asked_alone(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=2.0)
    assert await peers.first() == ("a", "by a")
    assert peers.asked == [("a", 0.0)]
    assert trio.current_time() == 2.0


async def test_a_late_one_is_overtaken_and_its_call_ends(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=FOREVER, b=1.0)
    assert await peers.first() == ("b", "by b")
    assert peers.asked == [("a", 0.0), ("b", LATE_S)]
    assert trio.current_time() == LATE_S + 1.0
    assert sorted(peers.ended) == ["a", "b"]


async def test_a_late_one_may_still_be_first(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=LATE_S + 1.0, b=5.0)
    assert await peers.first() == ("a", "by a")
    assert trio.current_time() == LATE_S + 1.0
    assert sorted(peers.ended) == ["a", "b"]


@pytest.mark.parametrize(("mate", "late_s"), [(None, LATE_S), ("b", None)])
async def test_without_a_mate_or_a_measure_it_is_waited_for(
    clock: trio.testing.MockClock, mate: str | None, late_s: float | None
) -> None:
    peers = Peers(a=100.0, b=1.0)
    assert await peers.first(mate, late_s) == ("a", "by a")
    assert peers.asked == [("a", 0.0)]


async def test_a_mate_that_is_free_later_is_asked_then(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=FOREVER, b=1.0)

    def mate() -> str | None:
        return "b" if trio.current_time() >= LATE_S + 2.0 else None

    assert await Hedged(peers.ask, mate).first("a", LATE_S) == ("b", "by b")
    assert trio.current_time() == LATE_S + 3.0


@pytest.mark.parametrize("error", [Refused("no"), LocalError("too large")])
async def test_one_that_fails_in_time_fails_at_once(clock: trio.testing.MockClock, error: PeerdError) -> None:
    peers = Peers(a=(1.0, error), b=1.0)
    with pytest.raises(type(error), match=str(error)):
        await peers.first()
    assert trio.current_time() == 1.0
    assert peers.asked == [("a", 0.0)]


async def test_a_late_one_that_fails_leaves_it_to_its_mate(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=(LATE_S + 1.0, Unreachable("gone")), b=10.0)
    assert await peers.first() == ("b", "by b")


async def test_a_mate_that_fails_changes_nothing(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=50.0, b=(1.0, Refused("full")))
    assert await peers.first() == ("a", "by a")
    assert trio.current_time() == 50.0


async def test_where_both_fail_the_error_is_of_the_one_that_was_asked_first(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=(50.0, Unreachable("gone")), b=(1.0, Refused("full")))
    with pytest.raises(Unreachable, match="gone"):
        await peers.first()


async def test_a_caller_that_gives_up_ends_both(clock: trio.testing.MockClock) -> None:
    peers = Peers(a=FOREVER, b=FOREVER)
    with trio.move_on_after(10.0) as scope:
        await peers.first()
    assert scope.cancelled_caught
    assert sorted(peers.ended) == ["a", "b"]
