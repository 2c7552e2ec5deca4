"""A trunk's checkpoints are read back as a run with experts, and no model is made of them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.core.errors import ConfigError
from peerd.experts.model.trunk import TrunkModule
from peerd.export.export import ExportRequest, export
from peerd.model.run_record import read_record, write_record
from peerd.model.stage.footprint import footprint
from peerd.run.runfile import ExpertsSection, ModelSection, RunFile
from tests.kit.exporting import save_all

RUN = RunFile(
    run="moe",
    model=ModelSection(d_model=16, heads=2, layers=2, context=8),
    experts=ExpertsSection(grid=[3, 4], top_k=2),
)


def test_a_record_names_the_experts(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, b"fingerprint")
    assert read_record(tmp_path)[1].experts == RUN.experts


def test_a_record_of_a_run_without_experts_is_as_it_was(tmp_path: Path) -> None:
    write_record(tmp_path, RunFile(run="plain"), b"fingerprint")
    assert read_record(tmp_path)[1].experts is None
    assert "experts" not in (tmp_path / "run.json").read_text()


def test_a_trunk_alone_is_not_exported(tmp_path: Path) -> None:
    save_all(tmp_path / "home", RUN)
    with pytest.raises(ConfigError, match="contains no checkpoint of an expert of layer 0 of run 'moe'; use"):
        export(ExportRequest(root=tmp_path / "home", out=tmp_path / "out"))


def test_room_is_that_of_the_trunk_without_its_experts() -> None:
    trunk = TrunkModule(RUN)
    assert footprint(RUN, 0).parameters == trunk.layout.count
    assert {name for name in trunk.layout.names if "feed" in name} == {"block0.feed_norm.gain", "block1.feed_norm.gain"}
