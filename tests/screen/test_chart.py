"""Charts stand with any points, in any room."""

from __future__ import annotations

import math

import pytest
from rich.text import Text

from peerd.screen.chart import Curve, chart


def drawn(*curves: Curve, width: int = 27, height: int = 5) -> list[Text]:
    return chart(curves, width=width, height=height, x_range=(0, 10), empty="nothing yet")


def test_the_chart_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = [line.plain for line in drawn(Curve([(0, 5.0), (10, 1.0)]))]
    assert [len(line) for line in lines] == [27] * 5
    assert lines[0].startswith(" 5.00 ┤")
    assert lines[-1].startswith(" 1.00 ┤")
    assert lines[0][7] != "\u2800"
    assert lines[-1][-1] != "\u2800"
    assert lines[0][-1] == lines[-1][7] == "\u2800"


def test_two_curves_keep_their_colours_and_a_high_chart_names_the_steps() -> None:
    lines = drawn(Curve([(0, 5.0), (10, 1.0)], "cyan"), Curve([(0, 5.5), (10, 5.5)], "yellow"), height=8)
    styles = {str(span.style) for line in lines for span in line.spans}
    assert {"cyan", "yellow"} <= styles
    assert lines[-1].plain.split() == ["0", "10"]


@pytest.mark.parametrize(
    "points",
    [[(0, 2.0)], [(0, 2.0), (1, 2.0)], [(99, 1.0), (0, 3.0)], [(0, 1e300), (1, -1e300), (2, 2.0)], [(0, 123456.0)]],
)
def test_the_chart_stands_with_any_points(points: list[tuple[float, float]]) -> None:
    lines = drawn(Curve([*points, (3, math.nan)]), width=40, height=4)
    assert [len(line.plain) for line in lines] == [40] * 4


@pytest.mark.parametrize(("width", "height"), [(40, 4), (5, 3), (0, 2), (8, 1)])
def test_without_points_or_room_it_says_so_within_the_room(width: int, height: int) -> None:
    lines = drawn(Curve([(0, math.nan)]), width=width, height=height)
    assert len(lines) == height
    assert all(len(line.plain) <= width for line in lines)
