"""Run files of users' own loops: what is refused, and what their peers must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerd.cli.doctor.run_checks import RunNeeds, run_checks
from peerd.messages.settings import differences
from peerd.model.run_record import read_record, write_record
from peerd.run.check import check
from peerd.run.runfile import (
    ExpertsSection,
    LineSection,
    LoopSection,
    ModelSection,
    PipelineSection,
    RunFile,
    fingerprint,
    shared_text,
)

LOOP = LoopSection(model="user: 1 parameters: w [3] float32", optimizer="SGD(lr=1)", layout="ab" * 32, layout_bytes=40)
RUN = RunFile(run="own", model=ModelSection(kind="loop", layers=1), loop=LOOP)


def changed(**loop: Any) -> RunFile:
    return msgspec.structs.replace(RUN, loop=msgspec.structs.replace(LOOP, **loop))


@pytest.mark.parametrize(
    ("run", "key"),
    [
        (changed(model=""), "loop.model"),
        (changed(model="a\nb"), "loop.model"),
        (changed(optimizer="\x1b[31m"), "loop.optimizer"),
        (changed(layout="AB" * 32), "loop.layout"),
        (changed(layout_bytes=0), "loop.layout_bytes"),
        (changed(layout_bytes=1 << 40), "loop.layout_bytes"),
        (msgspec.structs.replace(RUN, model=ModelSection()), "model.kind"),
        (msgspec.structs.replace(RUN, loop=None), "model.kind"),
        (msgspec.structs.replace(RUN, pipeline=PipelineSection(stages=2)), "pipeline.stages"),
        (msgspec.structs.replace(RUN, experts=ExpertsSection()), "experts"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(run: RunFile, key: str) -> None:
    assert key in [path for path, _ in check(run)]


def test_a_line_may_bring_a_run_of_own_loops_of_bounded_size() -> None:
    line = LineSection(link="peerd://198.51.100.7:1/12D3KooW/own")
    assert check(RUN) == check(msgspec.structs.replace(RUN, line=line)) == []
    large = msgspec.structs.replace(changed(layout_bytes=65 << 20), line=line)
    assert [path for path, _ in check(large)] == ["loop.layout_bytes"]


def test_peers_agree_on_model_optimizer_and_layout_and_other_runs_keep_their_fingerprint() -> None:
    for key, value in (("model", "another"), ("optimizer", "another"), ("layout", "cd" * 32)):
        other = changed(**{key: value})
        assert fingerprint(other) != fingerprint(RUN)
        assert [text.split()[0] for text in differences(shared_text(RUN), shared_text(other))] == [f"loop.{key}"]
    assert b"loop" not in shared_text(RunFile(run="gpt"))


def test_a_checkpoint_s_record_and_doctor_know_such_a_run(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, fingerprint(RUN))
    told, found = read_record(tmp_path)
    assert told == fingerprint(found).hex() == fingerprint(RUN).hex()
    assert found.loop == LOOP
    needs = RunNeeds(run=RUN, roles=(), data_dir=tmp_path, device="cpu")
    assert not needs.holds_model
    assert not needs.reads_text
    assert [one.check for one in run_checks(needs) if one.verdict != "ok"] == []
