"""Checkpoints on disk: what a crash at any moment leaves, and the words for every kind of damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peerd.codec.tensors import state_digest
from peerd.core.errors import ConfigError
from peerd.model.checkpoint import Checkpoints
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile, fingerprint

RUN = bytes(range(16))


def state(value: float = 1.0) -> dict[str, Tensor]:
    return {"param/a": torch.full((3, 2), value), "step": torch.tensor(7)}


def checkpoints(folder: Path, keep: int = 3) -> Checkpoints:
    return Checkpoints(folder, keep, RUN, stage=1)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_saved_is_loaded_bit_for_bit_with_its_manifest(tmp_path: Path) -> None:
    path = checkpoints(tmp_path / "new" / "folder").save(7, state(), {"loss": 2.5})
    loaded, manifest = checkpoints(tmp_path / "new" / "folder").load(7)
    assert state_digest(loaded).hex() == state_digest(state()).hex() == manifest.digest
    assert (manifest.step, manifest.stage, manifest.fingerprint, manifest.extra) == (7, 1, RUN.hex(), {"loss": 2.5})
    assert json.loads(path.read_text())["tensors"] in names(path.parent)


def test_the_newest_are_kept_and_their_files_alone(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        mine.save(step, state(step))
    assert mine.steps() == [15, 20]
    assert len(names(tmp_path)) == 4
    assert mine.load(15)[0]["param/a"][0, 0] == 15


def test_a_bound_of_disk_holds_for_all_stages_and_spares_the_newest(tmp_path: Path) -> None:
    one = sum(tensor.nbytes for tensor in state().values())
    first, second = (
        Checkpoints(tmp_path / f"stage-{stage}", 10, b"run", stage, most_bytes=8 * one + 4096) for stage in (0, 1)
    )
    for step in range(1, 20):
        first.save(step, state(step))
    most = len(first.steps())
    assert first.steps() == list(range(20 - most, 20))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= 8 * one + 8192
    small = Checkpoints(tmp_path / "stage-1", 10, b"run", 1, most_bytes=one)
    with pytest.raises(ConfigError, match=r"limits\.disk_gb \(--disk-gb\) allows .* delete folders of stages"):
        small.save(1, state())
    with pytest.raises(ConfigError, match=r"limits\.disk_gb"):
        Checkpoints(tmp_path / "stage-0", 10, b"run", 0, most_bytes=one).save(20, state())
    assert 19 in first.steps()
    assert second.steps() == []


def test_what_a_run_writes_after_it_went_back_outlasts_the_branch_that_it_left(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path, keep=3)
    for step in (100, 150, 200, 250, 300, 50):
        mine.save(step, state(step))
    assert mine.steps() == [50, 250, 300]
    for step in (100, 150):
        mine.save(step, state(step))
    assert mine.steps() == [50, 100, 150]


def test_one_that_is_held_stays_however_old_and_counts_for_nothing(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path, keep=2)
    mine.hold(5)
    for step in (10, 15, 5, 20):
        mine.save(step, state(step))
    assert mine.steps() == [5, 15, 20]
    checkpoints(tmp_path, keep=2).clean()  # only while whoever holds it lives
    assert mine.steps() == [15, 20]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path)
    mine.save(5, state(1))
    mine.save(5, state(2))
    assert mine.load(5)[0]["param/a"][0, 0] == 2
    assert len(names(tmp_path)) == 2


def test_a_folder_that_does_not_exist_has_no_steps(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").steps() == []
    checkpoints(tmp_path / "none").clean()
    with pytest.raises(ConfigError, match=r"none.step-00000005\.json: No such file"):
        checkpoints(tmp_path / "none").load(5)


@pytest.mark.parametrize("replaced", range(1, 4))
def test_a_crash_at_any_rename_leaves_the_checkpoint_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    mine = checkpoints(tmp_path)
    mine.save(5, state(1))
    calls = 0
    real = os.replace

    def crash(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == replaced:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        try:
            mine.save(6, state(2))
        except KeyboardInterrupt:
            assert checkpoints(tmp_path).steps() == [5]
    after = checkpoints(tmp_path)
    after.clean()
    for step in after.steps():
        after.load(step)
    assert 5 in after.steps()
    assert len(names(tmp_path)) == 2 * len(after.steps())


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def halve_manifest(folder: Path) -> None:
    file = folder / "step-00000005.json"
    file.write_bytes(file.read_bytes()[:60])


def change(**fields: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "step-00000005.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            truncate,
            r"safetensors is damaged: it has \d+ bytes, not \d+; delete step-00000005.json to go on from step 4",
        ),
        (flip, r"safetensors is damaged: its SHA-256"),
        (lose, r"safetensors: No such file"),
        (halve_manifest, r"step-00000005.json is damaged: "),
        (change(format=2), r"step-00000005.json has format 2; this peerd reads format 1"),
        (change(fingerprint="ff"), r"step-00000005.json is of another run: fingerprint ff"),
        (change(stage=0), r"step-00000005.json is of stage 0, step 5; expected stage 1, step 5"),
        (change(step=6), r"step-00000005.json is of stage 1, step 6"),
        (
            change(tensors="../../etc/passwd"),
            r"step-00000005.json is damaged: it names .*; delete step-00000005.json to",
        ),
        (change(surprise=1), r"step-00000005.json is damaged: Object contains unknown field `surprise`"),
    ],
)
def test_damage_is_a_config_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    mine = checkpoints(tmp_path)
    mine.save(5, state())
    damage(tmp_path)
    before = names(tmp_path)
    mine.save(4, state())
    with pytest.raises(ConfigError, match=words):
        mine.load(5)
    assert before <= names(tmp_path)  # damaged or foreign files are the user's to delete


def test_checkpoints_of_another_run_in_the_folder_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    other = Checkpoints(tmp_path, 1, bytes(16), 1)
    other.save(99, state())
    mine = checkpoints(tmp_path, keep=1)
    mine.save(5, state())
    mine.save(6, state())
    assert mine.steps() == [6, 99]
    assert other.load(99)[1].step == 99


def test_files_of_the_user_in_the_folder_stay(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors", "step-1.json"):
        (tmp_path / name).write_text("mine")
    checkpoints(tmp_path, keep=1).save(5, state())
    checkpoints(tmp_path, keep=1).clean()
    assert {"notes.txt", "model.safetensors", "step-1.json"} < names(tmp_path)


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="file"):
        checkpoints(tmp_path / "file").save(5, state())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_a_stage_restored_from_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    run = RunFile(
        run="restart",
        model=ModelSection(d_model=16, heads=2, layers=2, context=8),
        pipeline=PipelineSection(stages=1),
        optimizer=OptimizerSection(name=name, momentum=0.9, warmup_steps=3),  # type: ignore[arg-type]
    )
    samples = torch.randint(256, (4, 2, 9), generator=torch.Generator().manual_seed(1))

    def advance(piece: StageModule, batches: Tensor) -> None:
        for tokens in batches:
            piece.backward(tokens[:, :-1], tokens[:, 1:])
            piece.apply(piece.gradient() / 2)

    straight = StageModule(run, 0)
    advance(straight, samples[:2])
    saved = Checkpoints(tmp_path, 3, fingerprint(run), 0)
    saved.save(straight.step, straight.state())
    advance(straight, samples[2:])
    restarted = StageModule(run, 0)
    restarted.load_state(saved.load(2)[0])
    advance(restarted, samples[2:])
    assert restarted.step == 4
    assert restarted.digest() == straight.digest()
