"""The picture of a network: it fits, each link is where its devices are, and it reads without colours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style
from rich.text import Text

from peerd.cli.plan.link_matrix import link_matrix

FAST, SLOW, DEAD = 0.01, 1.0, np.inf
TWO_BLOCKS = np.array([[0, FAST, SLOW, SLOW], [FAST, 0, SLOW, DEAD], [SLOW, SLOW, 0, FAST], [SLOW, DEAD, FAST, 0]])


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_without_colours_each_cell_is_two_characters_and_says_how_slow() -> None:
    lines = plain(link_matrix(TWO_BLOCKS, [[0, 1], [2, 3]], 80, coloured=False))
    assert lines == [
        "  0    1",
        "0   .. @@@@",
        "  ..   @@XX",
        "",
        "1 @@@@   ..",
        "  @@XX ..  ",
        "  up to 10 ms .:-=+*#%@ 1.0 s   no link: X",
    ]


def test_devices_stand_by_stage_and_not_by_their_number() -> None:
    lines = plain(link_matrix(TWO_BLOCKS, [[0, 2], [1, 3]], 80, coloured=False))
    assert lines[1:3] == ["0   @@ ..@@", "  @@   @@.."]


def test_in_colours_two_rows_share_a_line_and_blue_is_fast() -> None:
    lines = link_matrix(TWO_BLOCKS, [[0, 1], [2, 3]], 80, coloured=True)
    assert plain(lines)[:4] == ["  0  1", "0 ▀▀ ▀▀", "1 ▄▄ ▄▄", "  ▀▀ ▀▀"]
    styles = [Style.parse(str(span.style)) for span in lines[1].spans]
    uppers = {style.color.triplet for style in styles if style.color is not None}
    lowers = {style.bgcolor.triplet for style in styles if style.bgcolor is not None}
    blue, red, grey = (33, 102, 172), (178, 24, 43), (90, 90, 90)
    assert {blue, red} <= uppers  # the fast link, the slow one
    assert {blue, red, grey} <= lowers  # and, in the second row, the one that is not there


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([60, 80, 120]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_whatever_stages_there_are_the_picture_fits_its_width(
    sizes: list[int], width: int, coloured: bool, seed: int
) -> None:
    count = sum(sizes)
    seconds = np.random.default_rng(seed).exponential(1.0, (count, count))
    order = np.random.default_rng(seed).permutation(count).tolist()
    stages = [[order.pop() for _ in range(size)] for size in sizes]
    lines = link_matrix(seconds, stages, width, coloured=coloured)
    assert all(line.cell_len <= width for line in lines)
    numbers = lines[0].plain.split()
    assert numbers == [str(stage) for stage in range(len(sizes))] or len(numbers) < len(sizes)


@pytest.mark.parametrize("count", [200, 1000])
def test_devices_that_do_not_fit_share_a_cell_which_shows_the_slowest_link(count: int) -> None:
    seconds = np.full((count, count), FAST)
    seconds[3, count - 1] = SLOW
    half = count // 2
    lines = plain(link_matrix(seconds, [range(half), range(half, count)], 80, coloured=False))
    assert "devices, the slowest link" in lines[-1]
    assert sum(line.count("@") for line in lines[1:-2]) == 2
    assert lines[1].endswith("@@")
