"""`peerd doctor` on a stage's memory and precision, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from peerd.cli.doctor.check_result import CheckResult, CheckVerdict
from peerd.cli.doctor.run_checks import RunNeeds, precision_checks, run_checks
from peerd.core.decoders import convert
from peerd.core.errors import ConfigError
from peerd.data.files.file_index import INDEX_NAME, make_index
from peerd.model.stage.footprint import footprint, measured_footprint, refuse_if_too_large
from peerd.run.runfile import LoopSection, RunFile, precision_text
from tests.worlds.processes.webserver import serving

OWN = """
from torch import nn

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 50 * width), nn.Linear(50 * width, width)

    def forward(self, x):
        if %s:
            raise ValueError("not today")
        return x + self.down(self.up(x).relu())

def layers(run):
    return [nn.Embedding(256, 16), Wide(16), nn.Linear(16, 256)]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(sections: dict[str, Any] | None = None, **model: Any) -> RunFile:
    sizes = {"d_model": 16, "heads": 2, "layers": 2, "context": 64} | model
    pipeline = {"stages": 1, "microbatch": 64}
    return convert({"run": "x", "model": sizes, "pipeline": pipeline} | (sections or {}), RunFile)


def found(run: RunFile, folder: Path, *roles: str) -> dict[str, CheckResult]:
    return {one.check: one for one in run_checks(RunNeeds(run, roles, folder, "cpu"))}


def sizes_in(text: str) -> list[float]:
    """Sizes that a text names, in MB."""
    return [float(number) for number in re.findall(r"([0-9.]+) MB", text)]


def test_the_activations_of_ones_own_layers_are_a_part_of_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN % "False")
    own = run(kind="own.py:layers")
    told = found(own, tmp_path, "stage")["memory"]
    whole, activations = sizes_in(told.found)
    taken = measured_footprint(own, 0)
    assert activations == pytest.approx(taken.activations.kept / 1e6, abs=0.1)
    assert activations > 64 * 64 * 50 * 16 * 4 / 1e6
    assert whole == pytest.approx(sum(taken.on("cpu")) / 1e6, abs=0.1)


def test_a_layer_of_ones_own_that_fails_fails_doctor(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN % "True")
    checks = found(run(kind="own.py:layers"), tmp_path, "stage")
    assert checks["model"].verdict == "fail"
    assert "layer 1 (Wide) failed: ValueError: not today" in checks["model"].found


def test_memory_follows_the_precision_that_this_peer_computes_in(tmp_path: Path) -> None:
    full = found(run(), tmp_path, "stage")
    half = found(run({"limits": {"precision": "bf16"}}), tmp_path, "stage")
    assert "precision" not in full
    assert half["precision"].found == "a stage is computed in bf16 (limits.precision; the run's is full)"
    assert sizes_in(half["memory"].found)[1] < sizes_in(full["memory"].found)[1]


def test_a_stage_whose_gradient_rounds_cannot_carry_fails_doctor_with_the_words_of_join(tmp_path: Path) -> None:
    wide = run(d_model=8192, heads=64, layers=4)
    with pytest.raises(ConfigError) as refused:
        refuse_if_too_large(wide, 0, "cpu")
    checks = found(wide, tmp_path, "stage")
    assert checks["model"].verdict == "fail"
    assert f"{checks['model'].found}; {checks['model'].advice}" == str(refused.value)
    assert "memory" not in checks


def test_microbatches_under_way_and_the_trunks_copies_for_them_are_a_part_of_the_memory(tmp_path: Path) -> None:
    many: dict[str, Any] = {"experts": {"grid": [2, 2]}, "optimizer": {"trunk": "asynchronous"}}
    told = found(run(many), tmp_path, "trainer")["memory"]
    assert told.verdict == "ok"
    assert " and 64 microbatches in flight and 33 copies of earlier parameters (" in told.found
    more = found(run(many | {"limits": {"microbatches_in_flight": 4096, "memory_gb": 3}}), tmp_path, "trainer")[
        "memory"
    ]
    assert more.verdict == "warn"
    assert more.found.startswith("with 4096 microbatches in flight and 33 copies of earlier parameters, stage 0 (")
    assert "limits.memory_gb allows 3.0 GB" in more.found
    assert more.advice.endswith("limits.microbatches_in_flight less than 4096")
    few = found(run(many | {"limits": {"microbatches_in_flight": 4, "memory_gb": 3}}), tmp_path, "trainer")["memory"]
    assert few.verdict == "ok"


def test_a_limit_of_memory_takes_disk_for_one_more_copy_of_the_state(tmp_path: Path) -> None:
    each = footprint(run(), 0).checkpoint_bytes / 1e6
    plain = found(run(), tmp_path, "stage")["room for checkpoints"]
    limited = found(run({"limits": {"memory_gb": 100}}), tmp_path, "stage")["room for checkpoints"]
    assert plain.found.startswith("3 checkpoints and one being written take ")
    assert limited.found.startswith("3 checkpoints, one being written and a copy of its state take ")
    assert [sizes_in(one.found)[0] for one in (plain, limited)] == pytest.approx([4 * each, 5 * each], abs=0.1)


def test_a_backbone_has_disk_for_a_set_that_is_fetched_beside_the_one_that_is_written(tmp_path: Path) -> None:
    two = run({"pipeline": {"stages": 2, "microbatch": 64}})
    each = [footprint(two, stage).checkpoint_bytes / 1e6 for stage in range(2)]
    room = found(two, tmp_path, "backbone")["room for kept checkpoints"]
    assert sizes_in(room.found)[0] == pytest.approx((3 + 2) * sum(each) + max(each), abs=0.1)


def precisions(run: RunFile, *roles: str) -> list[tuple[str, str]]:
    return [(one.verdict, one.found) for one in precision_checks(RunNeeds(run, roles, Path(), "cpu"))]


def test_a_precision_without_effect_is_one_line() -> None:
    experts = run({"limits": {"precision": "fp16"}, "experts": {"grid": [2, 2]}})
    told = "limits.precision (fp16) has no effect on hosted experts: they compute in the run's experts.dtype, float32"
    assert precisions(experts, "expert") == [("warn", told)]
    assert [verdict for verdict, _ in precisions(experts, "expert", "trainer")] == ["ok", "warn"]
    section = LoopSection(model="Own", optimizer="SGD", layout="ab" * 32, layout_bytes=1)
    loop = RunFile(run="own", loop=section, limits=run({"limits": {"precision": "bf16"}}).limits)
    ((verdict, found),) = precisions(loop)
    assert (verdict, found) == (
        "warn",
        "limits.precision (bf16) has no effect on a user's own loop: it computes as its program says",
    )
    assert precisions(run(), "stage", "expert") == precisions(run({"experts": {"grid": [2, 2]}}), "expert") == []


def test_the_precision_is_told_with_the_runs_where_they_differ() -> None:
    own = {"limits": {"precision": "full"}}
    assert [precision_text(one) for one in (run(), run(precision="fp16"), run(own), run(own, precision="fp16"))] == [
        *(None, "fp16", None),
        "full (limits.precision; the run's is fp16)",
    ]


@pytest.mark.socket
def test_held_out_text_at_the_ends_of_remote_files_is_not_fetched_for_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.txt").write_text("words " * 2000)
    (folder / INDEX_NAME).write_bytes(make_index(folder))
    with serving(folder) as web:
        told = found(run({"data": {"path": web.url()}}), tmp_path, "trainer")
    assert told["text"].found.endswith("1 files, samples can be read")
    assert told["text to validate"].verdict == CheckVerdict.OK
    assert told["text to validate"].found.endswith("at the ends of 1 files, which this check does not fetch")
