"""`peerd export`, `generate`, `evaluate` as they are typed: what they print, and one sentence for each mistake."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peerd.cli import generate as generate_module
from peerd.cli.cli import invoke
from peerd.export.export import ExportRequest, export
from tests.kit.exporting import make_run, save, save_all, stages_of

Out = pytest.CaptureFixture[str]


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    save_all(tmp_path / "peers", make_run(2), [3, 5])
    return tmp_path / "peers"


@pytest.fixture
def folder(peers: Path) -> Path:
    export(ExportRequest(root=peers, out=peers.parent / "out"))
    return peers.parent / "out"


def refused(out: Out, *words: object) -> str:
    """The one sentence with which a command line is refused, as wrong usage."""
    assert invoke([str(word) for word in words]) == 2
    captured = out.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("peerd: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_export_says_what_it_took_and_what_to_type_next(peers: Path, capsys: Out) -> None:
    out = peers.parent / "my model"
    assert invoke(["export", str(peers), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("run out, step 5; validation loss unknown; ")
    assert f"stage 1 from {peers}/peer-1/stage/checkpoints/out/stage-1/step-00000005.json" in told
    assert f"try: peerd generate --from '{out}'" in told
    assert invoke(["export", str(peers), "--out", str(out), "--step", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["step"], found["out"]) == ("out", 3, str(out))


def test_export_reads_a_backbones_sets(tmp_path: Path, capsys: Out) -> None:
    run, data = make_run(2), tmp_path / "data"
    for stage in stages_of(run):
        save(data, run, stage, [4, 8])
    (data / "stage").rename(data / "backbone")
    for given in (data, data / "backbone"):
        assert invoke(["export", "--backbone", str(given), "--out", str(tmp_path / "out"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 8
    told = refused(capsys, "export", data, "--backbone", data, "--out", tmp_path / "out")
    assert "RUN_DIR and --backbone are both given" in told


def test_export_looks_where_data_directories_are_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    told = refused(capsys, "export", "--out", tmp_path / "out")
    assert f"{tmp_path / 'peerd'}: there is no such folder" in told
    save_all(tmp_path / "peerd", make_run(2))
    assert invoke(["export", "--out", str(tmp_path / "out")]) == 0


def test_export_takes_the_run_file_where_settings_are_missing(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "run.yaml"
    model = {"d_model": 16, "heads": 2, "layers": 4, "context": 12}
    file.write_text(yaml.safe_dump({"run": "out", "model": model, "pipeline": {"microbatch": 2}}))
    run = make_run()
    for stage in stages_of(run):
        save(tmp_path / "peers" / "a", run, stage, [4], record=False)
    command = ["export", tmp_path / "peers", "--out", tmp_path / "out"]
    assert "add --model FILE" in refused(capsys, *command)
    assert invoke([*map(str, command), "--model", str(file)]) == 0


def test_generate_prints_prompt_and_text_and_the_same_for_the_same_seed(folder: Path, capsys: Out) -> None:
    command = ["generate", "--from", str(folder), "ab", "--tokens", "40", "--seed", "3", "--top-k", "0"]
    assert invoke([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompt"], found["tokens"], found["seed"]) == ("ab", 40, 3)
    assert found["note"] == "the text exceeds the context: from there on the model sees the last 6 to 12 tokens"
    assert invoke(command) == 0
    shown = capsys.readouterr()
    assert shown.err == f"peerd: {found['note']}\n"
    assert shown.out.startswith("ab")
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in found["text"])
    assert shown.out == f"ab{plain}\n"
    assert invoke([*command[:-1], "1", "--temperature", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] != found["text"]


def test_nothing_that_a_model_writes_steers_the_terminal(capsys: Out) -> None:
    generate_module._write("a\x1b[2J\x07b\r\x9b1m\u202e\tc\n")
    shown = capsys.readouterr().out
    assert shown == "a\ufffd[2J\ufffdb\ufffd\ufffd1m\ufffd\tc\n"


@pytest.mark.parametrize("prompt", ["", "x" * 30, "größer \udcff"])
def test_generate_takes_any_prompt(prompt: str, folder: Path, capsys: Out) -> None:
    assert invoke(["generate", "--from", str(folder), prompt, "--tokens", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == prompt.replace("\udcff", "\N{REPLACEMENT CHARACTER}")
    told = "the prompt has 30 tokens; the model sees the last 12 (its context)"
    assert found["note"] == (told if len(prompt) == 30 else found["note"])
    assert invoke(["generate", "--from", str(folder), "--tokens", "3"]) == 0


def test_evaluate_prints_loss_and_perplexity(folder: Path, tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "text.txt"
    file.write_text("some text " * 50)
    assert invoke(["evaluate", "--from", str(folder), str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert (found["tokens"], found["bytes"], found["context"], found["step"]) == (500, 500, 12, 5)
    assert invoke(["evaluate", "--from", str(folder), str(file)]) == 0
    told = capsys.readouterr().out
    assert f"loss           {found['loss']:.4f} nats per token" in told
    assert f"500 tokens of {file} (500 bytes), windows of 12 tokens" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate --from nowhere x", "nowhere: there is no such folder"),
        ("generate --from . x", ". is not an exported model: it has no config.json"),
        ("generate --from out x --temperature 0.0001", "--temperature 0.0001; allowed: 0, or 0.001 to 100"),
        ("generate --from out x --device gpu", "--device 'gpu' is unknown; allowed: cpu, cuda, cuda:N, mps"),
        ("generate --from out x --device mps", "device mps is not available"),
        ("generate --from out x --seed 99999999999999999999", "--seed 99999999999999999999; allowed"),
        ("generate --from out x --model none.yaml", "there is no file none.yaml"),
        ("evaluate --from out nowhere.txt", "nowhere.txt: there is no such file"),
        ("evaluate --from out peers", "peers: is a folder; give one file"),
        ("evaluate --from out empty.txt", "empty.txt has 0 bytes of text: too little"),
        ("evaluate --from peers empty.txt", "peers is not an exported model"),
        ("export nowhere --out new", "nowhere: there is no such folder"),
        ("export out --out new", "out contains no checkpoint"),
        ("export peers --out peers", "--out peers contains something else (peer-0)"),
        ("export peers --out empty.txt", "--out empty.txt: Not a directory"),
        ("export peers --out .", "is the current folder"),
        ("export peers --out new --step 4", "steps that all have: 3, 5"),
        ("export peers --out new --run other", "contains no checkpoint of run 'other', only of out"),
    ],
)
def test_each_mistake_is_one_sentence(
    words: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "empty.txt").write_text("")
    assert told in refused(capsys, *words.split())


@pytest.mark.parametrize("words", ["generate x --tokens 0", "generate x --temperature -1", "evaluate", "export"])
def test_wrong_usage_is_refused(words: str, folder: Path, capsys: Out) -> None:
    assert invoke([*words.split(), *(["--from", str(folder)] if words != "export" else [])]) == 2


def test_a_full_disk_is_one_sentence(peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    import safetensors.torch

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "model.safetensors"))

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert invoke(["export", str(peers), "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"peerd: {tmp_path / 'model.safetensors'}: No space left on device (")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.socket
def test_a_reader_that_has_seen_enough_ends_generate_quietly(folder: Path) -> None:
    command = [sys.executable, "-m", "peerd", "generate", "--from", str(folder), "x", "--tokens", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert popen.stdout is not None
    assert popen.stderr is not None
    assert popen.stdout.read(10).startswith(b"x")
    popen.stdout.close()
    assert popen.wait(30) == 0
    assert b"Traceback" not in popen.stderr.read()
    popen.stderr.close()
