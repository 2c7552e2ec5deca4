"""Learning curves on disk: steps go up, a crash costs at most the line being written, the table says the same."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ConfigError
from peerd.messages.progress import TrainerProgress
from peerd.status.learning_curve import CurvePoint, LearningCurves
from peerd.status.run_monitor import NEAR_STEPS, summary


def point(step: int, valid_step: int | None = None) -> CurvePoint:
    valid = None if valid_step is None else 3.0
    return CurvePoint(step, 1e9 + step, 2.5, valid, valid_step, [2, 1], 1, 10.0, 160.0)


def opened(folder: Path) -> LearningCurves:
    curves = LearningCurves(folder, "a run/of mine")
    curves.open()
    return curves


def test_a_restart_goes_on_without_a_step_written_twice(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert [first.append(point(step)) for step in (1, 2, 2, 5)] == [True, True, False, True]
    again = opened(tmp_path)
    assert [again.append(point(step)) for step in (4, 5, 6)] == [False, False, True]
    assert [p.step for p in again.read()] == [1, 2, 5, 6]
    assert again.lines.parent == tmp_path


def test_a_line_that_a_crash_cut_short_is_gone(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.append(point(1))
    with first.lines.open("ab") as file:
        file.write(b'{"step":2,"ti')
    again = opened(tmp_path)
    assert again.append(point(2))
    assert again.read() == [point(1), point(2)]


def test_a_line_that_a_full_disk_cut_short_is_gone_before_the_next(tmp_path: Path) -> None:
    curves = opened(tmp_path)
    curves.append(point(1))
    with curves.lines.open("ab") as file:
        file.write(b'{"step":2,"ti')
    assert curves.read() == [point(1)]
    assert curves.append(point(2))
    assert curves.read() == [point(1), point(2)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.append(point(1))
    first.lines.write_bytes(first.lines.read_bytes() + b'{"step": "two"}\n')
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        opened(tmp_path)


def test_an_evaluation_stands_in_one_line_only(tmp_path: Path) -> None:
    curves = opened(tmp_path)
    for step, valid_step in ((3, 2), (4, 2), (5, 4)):
        curves.append(point(step, valid_step))
    again = opened(tmp_path)
    again.append(point(6, 4))
    assert [p.valid_step for p in again.read()] == [2, None, 4, None]


def test_the_table_holds_what_the_lines_do(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    curves = opened(tmp_path)
    assert not curves.write_table()
    curves.append(point(1))
    curves.append(point(2, 2))
    assert curves.write_table()
    rows = parquet.read_table(curves.table).to_pylist()
    assert [CurvePoint(**row) for row in rows] == curves.read()
    assert not list(tmp_path.glob("*.new"))


def test_without_pyarrow_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    curves = opened(tmp_path)
    curves.append(point(1))
    with pytest.raises(ConfigError, match=r"peerd\[data\]"):
        curves.write_table()


def told(step: int, loss: float, valid_step: int = 0) -> TrainerProgress:
    return TrainerProgress(step, loss, loss, valid_step, 1.0, 16.0, 1, 0, 0, "")


@pytest.mark.slow
@given(
    honest=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    wrong=st.lists(st.integers(-(1 << 62), 1 << 62), max_size=7),
    said=st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.floats()), max_size=8),
)
def test_fewer_than_half_of_the_stage_peers_cannot_move_the_step(
    honest: list[int], wrong: list[int], said: list[tuple[int, float]]
) -> None:
    wrong = wrong[: len(honest) - 1]
    seen = summary([len(honest)], [*honest, *wrong], [told(step, loss) for step, loss in said], 0.0)
    assert seen is not None
    assert min(honest) - NEAR_STEPS <= seen.step <= max(honest) + NEAR_STEPS
    assert seen.loss is None or math.isfinite(seen.loss)
    assert math.isfinite(seen.samples_per_s)


def test_the_swarm_in_one_line() -> None:
    assert summary([0, 0], [], [], 5.0) is None
    trainers = [told(10, 2.0, 8), told(11, 4.0, 10), told(11, math.nan), told(1 << 60, 99.0)]
    assert summary([1, 2], [10, 11, 11], trainers, 5.0) == CurvePoint(11, 5.0, 3.0, 4.0, 10, [1, 2], 3, 3.0, 48.0)
    assert summary([1, 1], [7, 9], [], 5.0) == CurvePoint(7, 5.0, None, None, None, [1, 1], 0, 0.0, 0.0)
