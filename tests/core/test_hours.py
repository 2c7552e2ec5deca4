"""Hours of the day: what is open when, over midnight and in several windows, and what no clock shows."""

from __future__ import annotations

import pytest

from peerd.core.clock import DAY_MINUTES, Hours, clock_text


def at(text: str) -> int:
    hour, minute = text.split(":")
    return 60 * int(hour) + int(minute)


def test_a_window_over_midnight_is_open_from_its_begin_to_the_minute_before_its_end() -> None:
    hours = Hours.parse("22:00-08:00")
    assert [hours.open_at(at(t)) for t in ("21:59", "22:00", "23:59", "00:00", "07:59", "08:00")] == [
        *(False, True, True, True, True, False),
    ]
    assert sum(hours.open_at(minute) for minute in range(DAY_MINUTES)) == 600


def test_of_several_windows_any_is_open_and_the_next_to_open_is_told() -> None:
    hours = Hours.parse("12:00-13:00, 22:00-08:00")
    assert hours.open_at(at("12:30"))
    assert not hours.open_at(at("13:00"))
    assert [clock_text(hours.opens_next(at(t))) for t in ("09:00", "13:00", "21:59")] == ["12:00", "22:00", "22:00"]
    assert clock_text(Hours.parse("6:05-7:00").opens_next(at("23:00"))) == "06:05"
    assert Hours.parse("22:00-24:00").open_at(at("23:59"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("22-08", "'22-08', which is not a window of the day; allowed: HH:MM-HH:MM"),
        ("22:00-8am", "not a window"),
        ("25:00-08:00", "'25:00-08:00', which is not a time of day"),
        ("22:60-08:00", "not a time of day"),
        ("22:00-24:01", "not a time of day"),
        ("08:00-08:00", "begins where it ends"),
        ("00:00-24:00", "begins where it ends; without hours it is the whole day"),
        ("22:00-08:00,", "''"),
        (",".join(["01:00-02:00"] * 17), "has 17 windows; allowed: up to 16"),
    ],
)
def test_what_is_no_window_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="has ") as error:
        Hours.parse(text)
    assert why in str(error.value)
