"""What is exported from: whole sets of checkpoints below a folder, and one message each where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from peerd.core.errors import ConfigError, PeerdError
from peerd.export.export import Exported, ExportRequest, export
from peerd.export.loaded_model import load_export
from peerd.run.runfile import RunFile
from peerd.run.user_code import find_function
from tests.kit.exporting import logits, make_run, save, save_all, stages_of


def exported(root: Path, **wish: object) -> Exported:
    return export(ExportRequest(root=root, out=root.parent / "out", **wish))  # type: ignore[arg-type]


def refusal(root: Path, **wish: object) -> str:
    with pytest.raises(ConfigError) as caught:
        exported(root, **wish)
    told = str(caught.value)
    assert "\n" not in told
    return told


def test_the_newest_step_that_all_stages_have_is_taken_and_told(tmp_path: Path) -> None:
    run = make_run(2)
    first, last = stages_of(run)
    save(tmp_path / "all" / "a", run, first, [2, 4, 6])
    save(tmp_path / "all" / "b", run, last, [2, 4])
    save(tmp_path / "all" / "c", run, last, [2])
    made = exported(tmp_path / "all")
    assert made.config.step == 4
    assert made.notes == ["stage 0 also has step 6, but not every stage has it"]
    assert [path.relative_to(tmp_path / "all").parts[0] for path in made.sources] == ["a", "b"]
    assert exported(tmp_path / "all", step=2).config.step == 2
    told = refusal(tmp_path / "all", step=6)
    assert "step 6 is not saved by every stage (stage 0: 2, 4, 6; stage 1: 2, 4); steps that all have: 2, 4" in told


def test_one_peers_folder_is_enough_where_it_has_all_stages(tmp_path: Path) -> None:
    stages = save_all(tmp_path / "replica", make_run())
    peer = tmp_path / "replica" / "peer-0" / "stage"
    tokens = torch.randint(0, 256, (1, 12))
    for name, folder in enumerate((peer.parent, peer, peer / "checkpoints", peer / "checkpoints/out/stage-0")):
        out = tmp_path / str(name)
        assert export(ExportRequest(root=folder, out=out)).config.step == 3
        assert torch.equal(load_export(out).model(tokens), logits(stages, tokens))


def test_a_stage_that_is_not_there_is_named_with_what_there_is(tmp_path: Path) -> None:
    run = make_run(3)
    first, _, last = stages_of(run)
    save(tmp_path / "all" / "a", run, first, [2, 4])
    save(tmp_path / "all" / "b", run, last, [4])
    told = refusal(tmp_path / "all")
    assert "contains no checkpoint of stage 1 of run out (stage 0: 2, 4; stage 1: none; stage 2: 4)" in told
    assert "--backbone DIR" in told


def test_stages_without_a_common_step_are_told_what_each_has(tmp_path: Path) -> None:
    run = make_run(2)
    first, last = stages_of(run)
    save(tmp_path / "all" / "a", run, first, [2])
    save(tmp_path / "all" / "b", run, last, [4])
    assert "no step is saved by every stage (stage 0: 2; stage 1: 4)" in refusal(tmp_path / "all")


def test_checkpoints_of_one_step_and_two_branches_are_not_mixed(tmp_path: Path) -> None:
    run = make_run(2)
    first, last = stages_of(run)
    save(tmp_path / "all" / "a", run, first, [4], "aa")
    save(tmp_path / "all" / "b", run, last, [4], "bb")
    assert "no step is saved by every stage" in refusal(tmp_path / "all")
    save(tmp_path / "all" / "c", run, last, [4], "aa")
    assert [path.relative_to(tmp_path / "all").parts[0] for path in exported(tmp_path / "all").sources] == ["a", "c"]


def test_of_two_whole_branches_the_one_saved_last_is_taken(tmp_path: Path) -> None:
    run = make_run()
    (stage,) = stages_of(run)
    old, new = (save(tmp_path / "all" / lineage, run, stage, [4], lineage) for lineage in ("bb", "aa"))
    os.utime(old / "step-00000004.json", (1, 1))
    made = exported(tmp_path / "all")
    assert made.sources == [new / "step-00000004.json"]
    assert made.notes == ["step 4 was made more than once; the version saved last was exported"]


def test_a_damaged_checkpoint_gives_way_to_another_peers(tmp_path: Path) -> None:
    run = make_run()
    (stage,) = stages_of(run)
    a, b = save(tmp_path / "all" / "a", run, stage, [4]), save(tmp_path / "all" / "b", run, stage, [4])
    (tensors,) = a.glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-8])
    made = exported(tmp_path / "all")
    assert made.sources == [b / "step-00000004.json"]
    assert made.notes[0].startswith(f"left out: {tensors} is damaged")
    (tensors,) = b.glob("*.safetensors")
    tensors.write_bytes(bytes(tensors.stat().st_size))
    assert "is damaged: its SHA-256 is not the manifest's" in refusal(tmp_path / "all")


def test_an_unfinished_write_and_a_broken_manifest_are_no_checkpoints(tmp_path: Path) -> None:
    run = make_run()
    (stage,) = stages_of(run)
    folder = save(tmp_path / "all" / "a", run, stage, [4])
    (folder / "step-00000006.0123456789abcdef.safetensors.new").write_bytes(b"half")
    (folder / "step-00000006.json.new").write_bytes(b"{")
    assert exported(tmp_path / "all").notes == []
    (folder / "step-00000008.json").write_bytes(b"{")
    made = exported(tmp_path / "all")
    assert made.config.step == 4
    assert made.notes[0].startswith(f"left out: {folder / 'step-00000008.json'} is damaged")


def test_a_folder_without_checkpoints_and_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").endswith("give a peer's data directory, or a folder with several")
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: there is no such folder"


def test_one_of_several_runs_is_chosen_by_its_name(tmp_path: Path) -> None:
    other = msgspec.structs.replace(make_run(), run="other")
    save_all(tmp_path / "all" / "x", make_run())
    save_all(tmp_path / "all" / "y", other, [7])
    assert "contains checkpoints of 2 runs: other, out; add --run NAME" in refusal(tmp_path / "all")
    assert exported(tmp_path / "all", run_name="other").config.step == 7
    assert "no checkpoint of run 'third', only of other, out" in refusal(tmp_path / "all", run_name="third")


def test_two_runs_of_one_name_are_told_apart_by_their_run_file(tmp_path: Path) -> None:
    mine = make_run()
    theirs = msgspec.structs.replace(mine, seed=9)
    save_all(tmp_path / "all" / "x", mine)
    save_all(tmp_path / "all" / "y", theirs, [7])
    assert "run out with 2 different settings; add --model FILE" in refusal(tmp_path / "all")
    assert exported(tmp_path / "all", settings=theirs).config.step == 7
    third = msgspec.structs.replace(mine, seed=10)
    assert "no checkpoint with the run file's settings, only of out" in refusal(tmp_path / "all", settings=third)


def test_checkpoints_without_settings_need_the_run_file(tmp_path: Path) -> None:
    run = make_run()
    (stage,) = stages_of(run)
    save(tmp_path / "all" / "a", run, stage, [4], record=False)
    assert "add --model FILE with its run file" in refusal(tmp_path / "all")
    assert exported(tmp_path / "all", settings=run).config.step == 4


def test_damaged_settings_are_one_message(tmp_path: Path) -> None:
    save_all(tmp_path / "all", make_run())
    record = tmp_path / "all/peer-0/stage/checkpoints/out/run.json"
    record.write_text(record.read_text().replace('"heads": 2', '"heads": 3'))
    made_of = refusal(tmp_path / "all")
    assert "add --model FILE" in made_of or "model.heads is 3" in made_of


def test_the_last_validation_loss_noted_up_to_the_step_is_told(tmp_path: Path) -> None:
    save_all(tmp_path / "all", make_run())
    assert exported(tmp_path / "all").config.valid_loss is None
    events = ['{"name":"trainer.evaluated","step":2,"loss":2.5}', '{"name":"trainer.evaluated","step":4,"loss":2.25}']
    (tmp_path / "all" / "trainer").mkdir()
    (tmp_path / "all" / "trainer" / "events.jsonl").write_text("\n".join(events) + '\n{"name":"trainer.evaluated",')
    made = exported(tmp_path / "all")
    assert (made.config.valid_loss, made.config.valid_step) == (2.5, 2)
    curves = tmp_path / "all" / "keeper" / "backbone" / "curves"
    curves.mkdir(parents=True)
    (curves / "out.jsonl").write_text('{"step":3,"valid_loss":2.125,"valid_step":3}\n{"step":4,"valid_loss":null}\n')
    made = exported(tmp_path / "all")
    assert (made.config.valid_loss, made.config.valid_step) == (2.125, 3)


def test_an_existing_folder_is_replaced_only_if_it_is_an_export_or_empty(tmp_path: Path) -> None:
    save_all(tmp_path / "all", make_run(), [3, 5])
    out = tmp_path / "out"
    out.mkdir()
    assert exported(tmp_path / "all", step=3).config.step == 3
    assert exported(tmp_path / "all").config.step == 5
    names = {"config.json", "model.safetensors", "model.py", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"all", "out"}
    (out / "notes.txt").write_text("mine")
    assert "contains something else (notes.txt); give a new or an empty folder" in refusal(tmp_path / "all")
    (out / "notes.txt").unlink()
    (out / "config.json").write_text('{"architectures": ["Other"]}')
    assert "does not describe an exported model" in refusal(tmp_path / "all")
    (out / "config.json").unlink()
    assert "contains something else" in refusal(tmp_path / "all")


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path / "all", make_run(), [3, 5])
    exported(tmp_path / "all", step=3)
    before = (tmp_path / "out" / "config.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(PeerdError, match=r"model.safetensors: No space left on device \([0-9.]+ MB free\)"):
        exported(tmp_path / "all")
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"all", "out"}


def test_names_are_plain_and_shared_blocks_are_written_once(tmp_path: Path) -> None:
    run = make_run(2, layers=5, share_layers=True)
    save_all(tmp_path / "all", run)
    config = exported(tmp_path / "all").config
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    parts = ("attn_norm.weight", "attn.qkv.weight", "attn.out.weight", "mlp_norm.weight", "mlp.up.weight")
    blocks = {f"blocks.{n}.{part}" for n in (0, 1) for part in (*parts, "mlp.down.weight")}
    assert set(tensors) == {"embed.weight", "norm.weight", "head.weight"} | blocks
    assert sum(config.repeats) == 5
    assert config.parameters == sum(tensor.numel() for tensor in tensors.values())


def test_values_that_are_not_finite_are_exported_with_a_warning_and_not_used(tmp_path: Path) -> None:
    run = make_run()
    (stage,) = stages_of(run)
    state = stage.state()
    state["param/head.norm.gain"][0] = float("nan")
    stage.state = lambda: state  # type: ignore[method-assign]
    save(tmp_path / "all" / "a", run, stage, [4])
    assert exported(tmp_path / "all").notes == [
        "norm.weight has values that are not finite: this model has diverged; try an earlier --step"
    ]
    with pytest.raises(ConfigError, match=r"norm\.weight has values that are not finite"):
        load_export(tmp_path / "out")


def own_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    (folder / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Mix(nn.Module):\n"
        "    def __init__(self, d):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(d, d)\n"
        "        self.register_buffer('seen', torch.zeros((), dtype=torch.int64))\n"
        "    def forward(self, x):\n"
        "        return x + self.inner(x).tanh().cumsum(1) / 9\n"
        "def layers(run):\n"
        "    d = run.model.d_model\n"
        "    return [nn.Embedding(256, d), Mix(d), Mix(d), nn.Linear(d, 256)]\n"
    )
    monkeypatch.chdir(folder)
    return make_run(2, kind="mine:layers")


def test_a_model_of_ones_own_comes_out_by_layer_and_is_used_beside_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_run(tmp_path, monkeypatch)
    stages = save_all(tmp_path / "all", run)
    config = exported(tmp_path / "all").config
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {
        *("layers.0.weight", "layers.1.inner.weight", "layers.1.inner.bias", "layers.2.inner.weight"),
        *("layers.2.inner.bias", "layers.3.weight", "layers.3.bias", "layers.1.seen", "layers.2.seen"),
    }
    assert config.settings["pipeline"]["stages"] == 2
    assert "data" not in config.settings
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "mine:layers" in readme
    assert not (tmp_path / "out" / "model.py").exists()
    with pytest.raises(ConfigError, match=r"add --model FILE with the run file, next to which its code is"):
        load_export(tmp_path / "out")
    with pytest.raises(ConfigError, match="the run file's model is gpt"):
        load_export(tmp_path / "out", run=make_run())
    tokens = torch.randint(0, 256, (2, 12))
    loaded = load_export(tmp_path / "out", run=run)
    assert torch.allclose(loaded.model(tokens), logits(stages, tokens), atol=1e-6, rtol=0)


def test_the_readme_of_a_model_of_ones_own_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = own_run(tmp_path, monkeypatch)
    stages = save_all(tmp_path / "all", run)
    exported(tmp_path / "all")
    code = (tmp_path / "out" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    function = find_function(run.model.kind, "model.kind")
    monkeypatch.chdir(tmp_path / "out")
    names = {"torch": torch, "safetensors": safetensors, "function": function, "run": run}
    exec(code, names)
    x = tokens = torch.randint(0, 256, (2, 12))
    for layer in names["model"]["layers"]:  # type: ignore[index]
        x = layer(x)
    assert torch.allclose(x, logits(stages, tokens), atol=1e-6, rtol=0)
