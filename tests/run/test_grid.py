"""Names of experts, their numbers, prefixes and bitmaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.run.grid import (
    Grid,
    Uid,
    bitmap,
    coordinates_in,
    grid_of,
    kept_experts_key,
    parse_uid,
    prefix_key,
    sample_shapes,
)
from peerd.run.runfile import ExpertsSection, ModelSection, RunFile

sides = st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple)


@given(sides, st.integers(1, 5), st.data())
def test_every_expert_has_a_number_and_every_number_an_expert(
    sides: tuple[int, ...], layers: int, data: st.DataObject
) -> None:
    grid = Grid(layers, sides)
    number = data.draw(st.integers(0, layers * grid.places - 1))
    uid = grid.uid(number)
    assert grid.is_expert(uid)
    assert grid.number(uid) == number
    assert parse_uid(str(uid)) == uid


@given(st.integers(2, 1024), st.data())
def test_a_bitmap_names_the_coordinates_that_it_was_made_of(side: int, data: st.DataObject) -> None:
    live = data.draw(st.sets(st.integers(0, side - 1)))
    bits = bitmap(live, side)
    assert len(bits) == -(-side // 8)
    assert coordinates_in(bits) == sorted(live)


def test_an_expert_is_announced_below_each_of_its_prefixes() -> None:
    assert list(Grid(1, (4,)).prefixes(Uid(0, (3,)))) == [Uid(0, ())]
    assert list(Grid(1, (4, 4)).prefixes(Uid(0, (3, 1)))) == [Uid(0, (3,))]
    assert list(Grid(2, (4, 4, 4)).prefixes(Uid(1, (3, 1, 2)))) == [Uid(1, (3,)), Uid(1, (3, 1))]


def test_nothing_outside_of_the_grid_is_in_it() -> None:
    grid = Grid(2, (4, 8))
    assert grid.holds(Uid(1, (3,)))
    assert not grid.is_expert(Uid(1, (3,)))
    for uid in (Uid(2, (0, 0)), Uid(0, (4, 0)), Uid(0, (0, 8)), Uid(0, (-1, 0)), Uid(0, (0, 0, 0)), Uid(-1, (0, 0))):
        assert not grid.holds(uid), uid


@pytest.mark.parametrize("text", ["", ".", "a.1", "1.", "1..2", "01.2", "1.2.3.4.5", "-1.2", "1.2e3", "9" * 10, "١.٢"])
def test_what_is_no_name_of_an_expert_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the name of an expert"):
        parse_uid(text)


def test_keys_of_prefixes_differ_by_run_layer_and_kind() -> None:
    made = [prefix_key(run, Uid(layer, (1,))) for run in ("a", "b") for layer in (0, 1)]
    made += [kept_experts_key("a", Uid(0, (1,))), prefix_key("a", Uid(0, (1, 1)))]
    assert len(set(made)) == len(made)


def test_shapes_follow_from_the_block_unless_they_are_given() -> None:
    model = ModelSection(d_model=64, context=32)
    assert sample_shapes(RunFile(run="r", model=model, experts=ExpertsSection())) == ((64,), (64,))
    block = ExpertsSection(block="transformer")
    assert sample_shapes(RunFile(run="r", model=model, experts=block)) == ((32, 64), (32, 64))
    own = ExpertsSection(block="mine:expert", input=[3, 8, 8], output=[10])
    assert sample_shapes(RunFile(run="r", model=model, experts=own)) == ((3, 8, 8), (10,))
    assert grid_of(RunFile(run="r", model=model, experts=own)) == Grid(4, (16, 16))
