"""Digests of local files: what is compared of a tokenizer and of functions of one's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from peerd.core.errors import ConfigError
from peerd.run.config import load_run
from peerd.run.contents import named_files, not_compared, source_of, unknown, with_digests
from peerd.run.runfile import ExpertsSection, ModelSection, PipelineSection, RunFile, fingerprint


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_of(**model: str) -> RunFile:
    return RunFile(run="r", model=ModelSection(**model))  # type: ignore[arg-type]


def test_a_tokenizer_is_compared_by_its_text_wherever_it_lies() -> None:
    Path("a.json").write_text('{"a": 1}\n')
    Path("b.json").write_bytes(b'{"a": 1}\r\n')
    Path("c.json").write_text('{"a": 2}\n')
    one, same, other = (with_digests(run_of(vocab=f"{name}.json")) for name in "abc")
    assert one.model.vocab_digest == hashlib.sha256(b'{"a": 1}\n').hexdigest()
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


def test_a_digest_in_the_run_file_stands_for_a_file_that_is_not_here() -> None:
    Path("a.json").write_text("{}")
    full = with_digests(run_of(vocab="a.json"))
    told = run_of(vocab="elsewhere/a.json", vocab_digest=full.model.vocab_digest)
    assert fingerprint(with_digests(told)) == fingerprint(full)
    assert unknown(told) == unknown(full) == []
    assert unknown(run_of(vocab="no.json"))[0].startswith("model.vocab: there is no file no.json here; put it there")


def test_a_file_that_is_not_the_one_of_the_run_file_is_a_mistake_with_its_line() -> None:
    Path("a.json").write_text("{}")
    Path("run.yaml").write_text(f"run: r\nmodel:\n  vocab: a.json\n  vocab_digest: {'ab' * 32}\n")
    with pytest.raises(
        ConfigError, match=r"run.yaml, line 4: model.vocab_digest is abab.*, but a.json here has the digest"
    ):
        load_run(Path("run.yaml"))


def test_a_function_is_compared_with_the_local_files_that_it_imports() -> None:
    Path("mine.py").write_text("import parts.deep\nfrom inner import width\n\ndef build(run):\n    return []\n")
    Path("inner.py").write_text("import torch\nimport json\nwidth = 1\n")
    Path("parts").mkdir()
    Path("parts/__init__.py").write_text("")
    Path("parts/deep.py").write_text("from . import beside\nimport safetensors\n")
    Path("parts/beside.py").write_text("x = 1\n")
    before = source_of("mine:build")
    assert before is not None
    assert sorted(path.name for path in before.files) == ["beside.py", "deep.py", "inner.py", "mine.py"]
    assert before.imported == ("safetensors",)
    for file in before.files:
        text = file.read_bytes()
        file.write_bytes(text.replace(b"\n", b"\r\n"))
        crlf = source_of("mine:build")
        assert crlf is not None
        assert crlf.digest == before.digest
        file.write_bytes(text + b"# new\n")
        after = source_of("mine:build")
        assert after is not None
        assert after.digest != before.digest, file
        file.write_bytes(text)
    assert not_compared(run_of(kind="mine:build")) == [
        "model.kind mine:build imports safetensors: their versions are not compared between peers"
    ]


def test_nothing_of_a_function_runs_when_it_is_compared() -> None:
    Path("bad.py").write_text("raise SystemExit\n")
    loaded = with_digests(run_of(kind="bad:build"))
    assert len(loaded.model.kind_digest) == 64
    assert named_files(loaded) == {"model.kind_digest": "bad.py"}


def test_circles_and_files_that_are_no_python_end() -> None:
    Path("one.py").write_text("import two\n")
    Path("two.py").write_text("import one, three\n")
    Path("three.py").write_text("not python at all\n")
    found = source_of("one:f")
    assert found is not None
    assert len(found.files) == 3


def test_an_installed_module_is_found_and_its_packages_are_not_searched() -> None:
    found = source_of("safetensors.torch:save")
    assert found is not None
    assert [path.name for path in found.files] == ["torch.py"]
    assert source_of("no_such_module:f") is None


def test_an_expert_of_ones_own_is_compared_as_a_model_is() -> None:
    Path("mine.py").write_text("def expert(run): ...\n")
    run = RunFile(run="r", experts=ExpertsSection(block="mine:expert"))
    found = with_digests(run).experts
    assert found is not None
    assert found.block_digest == source_of("mine:expert").digest
    assert named_files(run) == {"experts.block_digest": "mine.py"}
    assert unknown(run)[0].startswith("experts.block: there is no file mine.py here")
    Path("mine.py").write_text("def expert(run): return 1\n")
    with pytest.raises(ConfigError, match=r"^experts.block_digest is .*mine.py here has the digest"):
        with_digests(msgspec.structs.replace(run, experts=found))


def test_a_pipeline_keeps_its_fingerprint_whether_or_not_its_file_names_the_hand_over() -> None:
    for section in (PipelineSection(stages=2), PipelineSection(stages=2, handover="direct")):
        assert fingerprint(RunFile(run="r", pipeline=section)).hex() == "c79811bcce72f791f69d8b332458e265"


def test_a_run_without_experts_keeps_its_fingerprint() -> None:
    assert fingerprint(RunFile(run="r")).hex() == "c02336a57d6f222e50845c7c37e0872a"
    assert fingerprint(RunFile(run="r", experts=ExpertsSection())) != fingerprint(RunFile(run="r"))
