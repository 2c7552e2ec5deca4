"""A picture fills the screen, whatever its size: nothing is wider or higher, and what matters most is never cut."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.text import Text

from peerd.screen.chart import Curve
from peerd.screen.columns import Columns
from peerd.screen.frame import FramePicture, compose, flow

REASON = "stands still for 40 s: no position that every stage can reach: a peer with newer state is missing"


def picture(peers: int = 5, events: int = 30) -> FramePicture:
    rows = [
        [Text(f"peer-{n}"), Text(f"{n:,}"), Text("a reason that is a little longer than a row")] for n in range(peers)
    ]
    return FramePicture(
        head=[[Text("run tiny"), Text("step 1,204 of 10,000"), Text("2 h 10 min left")], [Text(REASON)]],
        title=Text("loss"),
        curves=[Curve([(x, 9.0 - x) for x in range(9)], "cyan")],
        x_range=(0, 10),
        table=Columns(("peer", "step", "waits"), rows, frozenset({1}), fewer=[[Text("all"), Text("9"), Text("")]]),
        facts=[[Text("12 peers connected"), Text("in 378.7 MB"), Text("out 12.0 MB")]],
        events=[Text(f"12:00:{n:02} event number {n} " + "with many words " * 9) for n in range(events)],
        foot=Text("Ctrl+C ends this view"),
    )


def lines_of(width: int, height: int, **changes: int) -> list[str]:
    return [line.plain for line in compose(picture(**changes), width, height)]


@pytest.mark.parametrize("width", [20, 40, 79, 80, 109, 110, 120, 200, 300])
@pytest.mark.parametrize("height", [1, 5, 12, 18, 24, 40, 60])
@pytest.mark.parametrize("peers", [0, 5, 500])
def test_every_line_fits_the_width_and_all_of_them_the_height(width: int, height: int, peers: int) -> None:
    lines = lines_of(width, height, peers=peers)
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_what_matters_is_whole_and_the_newest_event_is_the_last(width: int, height: int) -> None:
    lines = lines_of(width, height)
    shown = " ".join(line.strip() for line in lines)
    for part in (REASON, "step 1,204 of 10,000", "2 h 10 min left", "in 378.7 MB", "Ctrl+C ends this view"):
        assert part in shown
    for number in range(5):
        assert f"peer-{number}" in shown
    assert "event number 29" in shown
    assert shown.rindex("event number 29") > shown.rindex("event number 28")
    assert "event number 0 " not in shown
    assert sum(any("\u2801" <= c <= "\u28ff" for c in line) for line in lines) >= 4


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_a_large_screen_is_used_to_its_end(width: int, height: int) -> None:
    lines = lines_of(width, height)
    assert sum(not line.strip() for line in lines) == 0
    assert max(map(cell_len, lines)) == width


def test_a_table_that_is_too_long_gives_way_to_its_summary_or_counts_what_is_left() -> None:
    table = picture(peers=50).table
    assert [line.plain.split() for line in table.lines(6)] == [["peer", "step", "waits"], ["all", "9"]]
    whole = Columns(table.heads, table.rows, table.right)
    lines = [line.plain for line in whole.lines(6)]
    assert len(lines) == 6
    assert lines[-1] == "and 46 more"
    assert len(whole.lines(51)) == 51


def test_parts_stay_whole_where_a_line_can_hold_them() -> None:
    found = [line.plain for line in flow([Text("one two"), Text("three"), Text("a part of many words")], 12)]
    assert found == ["one two", "three", "a part of", "many words"]
