"""A guest's hours by the clock on the wall: also when daylight saving time begins or ends, or the clock is set."""

from __future__ import annotations

import calendar
from datetime import datetime
from zoneinfo import ZoneInfo

import trio
import trio.testing

from peerd.daemon.control.open_hours import OpenHours
from tests.worlds.simulation.clock import EPOCH_S, SimClock

BERLIN = ZoneInfo("Europe/Berlin")


def in_berlin(unix_s: float) -> int:
    shown = datetime.fromtimestamp(unix_s, BERLIN)
    return 60 * shown.hour + shown.minute


def clock_at(text: str) -> SimClock:
    """A clock that shows this UTC time at virtual time 0."""
    return SimClock(1, "one", skew_s=calendar.timegm(datetime.fromisoformat(text).timetuple()) - EPOCH_S)


async def seen(hours: OpenHours, count: int) -> list[str]:
    """The next times, in UTC, at which the hours close and open."""
    found = []
    while len(found) < count:
        await (hours.closed() if hours.open else hours.opened())
        found.append(datetime.fromtimestamp(hours._clock.wall(), ZoneInfo("UTC")).strftime("%d %H:%M"))
    return found


async def test_hours_follow_the_wall_when_daylight_saving_time_begins(autojump_clock: trio.testing.MockClock) -> None:
    """On 28 March 2027 Berlin goes from 02:00 to 03:00: the night is an hour shorter."""
    hours = OpenHours("22:00-08:00", clock_at("2027-03-27T20:30:00"), in_berlin)
    assert (hours.open, hours.opens) == (False, "22:00")
    assert await seen(hours, 4) == ["27 21:00", "28 06:00", "28 20:00", "29 06:00"]


async def test_hours_follow_the_wall_when_daylight_saving_time_ends(autojump_clock: trio.testing.MockClock) -> None:
    """On 31 October 2027 the hour from 02:00 to 03:00 comes twice, and a window in it opens twice."""
    hours = OpenHours("22:00-02:30", clock_at("2027-10-30T19:59:30"), in_berlin)
    assert await seen(hours, 5) == ["30 20:00", "31 00:30", "31 01:00", "31 01:30", "31 21:00"]


async def test_a_window_that_the_clock_leaps_over_does_not_open(autojump_clock: trio.testing.MockClock) -> None:
    hours = OpenHours("02:00-03:00", clock_at("2027-03-27T23:00:00"), in_berlin)
    assert await seen(hours, 1) == ["29 00:00"]


async def test_a_clock_that_is_set_is_noticed_within_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    clock = clock_at("2027-06-01T10:00:10")
    hours = OpenHours("22:00-08:00", clock, in_berlin)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hours.opened)
        await trio.sleep(300)
        clock.skew_s += 12 * 3600
        set_at = trio.current_time()
    assert trio.current_time() - set_at <= 60


async def test_what_peers_correct_a_clock_by_does_not_count(autojump_clock: trio.testing.MockClock) -> None:
    clock = clock_at("2027-06-01T10:00:00")
    clock.offset_s = 12 * 3600
    assert not OpenHours("22:00-08:00", clock, in_berlin).open


async def test_without_hours_it_is_always_open(autojump_clock: trio.testing.MockClock) -> None:
    hours = OpenHours("", clock_at("2027-06-01T10:00:00"), in_berlin)
    assert (hours.open, hours.opens) == (True, "12:00")
    with trio.move_on_after(1e6) as waited:
        await hours.closed()
    assert waited.cancelled_caught
