"""The run files of lines (fuzz tests: see `parsers`). A stranger's file is refused, or kept whole and harmless."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from peerd.cli.joining import accept
from peerd.core.errors import ConfigError
from peerd.daemon.control.guest import JoinRequest
from peerd.messages.run_link import DOMAIN, JoinLink, RunFileAnswer, plain_tree, shared_file, shared_run
from peerd.run.check_line import line_faults
from peerd.run.config import load_run
from peerd.run.runfile import (
    AccessSection,
    DataSection,
    ExpertsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
    SourceSection,
)
from peerd.run.typed_yaml import to_yaml
from tests.fuzz.parsers import KEYS, PARSERS, Corpus, parser

__all__ = ["PARSERS"]
LINK = JoinLink("198.51.100.7", 31337, KEYS.peer_id, "r")


def _run_files() -> Corpus:
    sources = [SourceSection(path="https://a.example/x", kind="jsonl", weight=0.5), SourceSection(path="stdlib")]
    runs = [
        RunFile(run="r"),
        RunFile(run="r", model=ModelSection(layers=6, d_model=96), pipeline=PipelineSection(stages=3)),
        RunFile(run="r", data=DataSection(sources=sources, shuffle_buffer=500), optimizer=OptimizerSection(lr=1e-5)),
        RunFile(run="r", experts=ExpertsSection(grid=[4, 4], input=[128])),
    ]
    return [shared_file(run) for run in runs]


@parser("run file of a line", _run_files, allowed=(ConfigError,), share=0.1)
def _run_file(data: bytes) -> None:
    run = accept(shared_run(RunFileAnswer(data, b""), "r"), LINK, ["trainer"], JoinRequest())
    assert line_faults(run) == []
    with TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(to_yaml(plain_tree(run)))
        assert load_run(file).run == run


def _signed_files() -> Corpus:
    access = AccessSection(allow="tokens", organizer=KEYS.peer_id.text)
    texts = [shared_file(RunFile(run="r", access=access)), shared_file(RunFile(run="r"))]
    return [*(KEYS.sign(DOMAIN + text) + text for text in texts[:1]), texts[1]]


@parser("signed run file", _signed_files, share=0.3)
def _signed_file(data: bytes) -> None:
    told = RunFileAnswer(data, b"") if data.startswith(b"{") else RunFileAnswer(data[64:], data[:64])
    run = shared_run(told, "r")
    assert not run.access.organizer or data == _signed_files()[0]
