"""Run files: what is read, and that every mistake is named with its line, its key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from peerd.core.errors import ConfigError
from peerd.run.config import check_addresses, load_run
from peerd.run.runfile import RunFile, SourceSection, sources_of

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def complaint(file: Path, text: str) -> str:
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run(file)
    message = str(caught.value)
    assert str(file) in message
    return message.replace(str(file), "FILE")


def test_a_file_with_only_a_name_gives_the_defaults(file: Path) -> None:
    file.write_text("run: tiny\n")
    loaded = load_run(file)
    assert loaded.run == RunFile(run="tiny")
    assert loaded.given == {"run"}


def test_every_run_file_written_by_peerd_reads_back_the_same(file: Path) -> None:
    run = RunFile(run="there and back", seed=3, bootstrap=[f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"])
    file.write_text(yaml.safe_dump(msgspec.to_builtins(run)))
    assert load_run(file).run == run


def test_numbers_follow_yaml_1_2_so_that_1e_3_is_a_number(file: Path) -> None:
    file.write_text("run: x\noptimizer: {lr: 1e-3, eps: 1E-9, weight_decay: .5, momentum: 0}\n")
    optimizer = load_run(file).run.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay, optimizer.momentum) == (1e-3, 1e-9, 0.5, 0.0)


def test_several_sources_are_read_with_their_weights(file: Path) -> None:
    file.write_text("run: x\ndata:\n  sources:\n  - {path: a, weight: 0.23}\n  - {path: b, kind: jsonl, weight: .77}\n")
    data = load_run(file).run.data
    assert [(key, source.path, source.weight) for key, source in sources_of(data)] == [
        ("data.sources[0]", "a", 0.23),
        ("data.sources[1]", "b", 0.77),
    ]
    assert sources_of(RunFile(run="x").data) == [("data", SourceSection(path="stdlib"))]


@pytest.mark.parametrize("path", ["https://h/a/", "http://localhost:8000", "http://127.0.0.1/x", "http://[::1]:80/"])
def test_data_may_come_over_https_and_from_this_machine(file: Path, path: str) -> None:
    file.write_text(f"run: x\ndata: {{path: '{path}'}}\n")
    assert load_run(file).run.data.path == path


@pytest.mark.parametrize(
    "boundary", [{"code": "auto", "block": 4096}, {"code": "nf4"}, {"code": "fp8-e4m3"}, {"lossless": "never"}]
)
def test_codes_blocks_and_packing_of_boundaries_can_be_chosen(file: Path, boundary: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump({"run": "x", "pipeline": {"boundary": boundary}}))
    loaded = load_run(file).run.pipeline.boundary
    assert {key: getattr(loaded, key) for key in boundary} == boundary


def test_an_empty_section_means_its_defaults(file: Path) -> None:
    file.write_text("run: x\nmodel:\n")
    assert load_run(file).run == RunFile(run="x")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["FILE is empty"]),
        ("# nothing\n", ["FILE is empty"]),
        ("just text", ["FILE: found text; allowed: keys with values"]),
        ("[a, b]", ["FILE: found a list"]),
        ("seed: 1", ["FILE: run is missing; allowed: text"]),
        ("run: x\nsede: 1", ["FILE, line 2: sede is not a known key; did you mean seed?"]),
        ("run: x\nmodel:\n  d_modle: 4", ["FILE, line 3: model.d_modle is not a known key; did you mean d_model?"]),
        ("run: x\nlr: 1", ["FILE, line 2: lr is not a known key; did you mean optimizer.lr?"]),
        ("run: x\nmodel: {zzz: 1}", ["model.zzz is not a known key; allowed: kind, vocab, d_model"]),
        ("run: x\n7: 1", ["FILE, line 2: 7 is not a known key"]),
        ("run: x\nmodel: {d_model: twelve}", ["model.d_model is twelve (text); allowed: a whole number"]),
        ("run: x\nmodel: {d_model: 12.5}", ["model.d_model is 12.5 (a number); allowed: a whole number"]),
        ("run: x\nmodel: {share_layers: 1}", ["model.share_layers is 1 (a whole number); allowed: true or false"]),
        ("run: 2024", ["FILE, line 1: run is 2024 (a whole number); allowed: text (put it in quotes)"]),
        ("run: x\nmodel: 5", ["FILE, line 2: model is 5 (a whole number); allowed: keys and values (kind, vocab"]),
        ("run: x\nbootstrap: here", ["FILE, line 2: bootstrap is here (text); allowed: a list, each item text"]),
        ("run: x\noptimizer: {name: adamv}", ["allowed: one of sgd, adamw, lamb, lars; did you mean adamw?"]),
        (
            "run: x\npipeline:\n  handover: trainer",
            ["FILE, line 3: pipeline.handover is trainer (text); allowed: direct"],
        ),
        ("run: x\noptimizer: {lr: .nan}", ["FILE, line 2: optimizer.lr is nan; allowed: a finite number"]),
        ("run: x\noptimizer: {lr: -.inf}", ["optimizer.lr is -inf; allowed: a finite number"]),
        ("run: x\noptimizer:\n  lr: -1", ["FILE, line 3: optimizer.lr is -1.0; must be above 0"]),
        ("run: x\noptimizer: {beta2: 1}", ["optimizer.beta2 is 1.0; allowed: 0 up to (not including) 1"]),
        ("run: x\noptimizer: {trust: 0}", ["optimizer.trust is 0.0; must be above 0"]),
        ("run: x\naveraging: {group_size: 2}", ["averaging.group_size is 2; allowed: 0 (chosen), or 3 and more"]),
        ("run: x\naveraging: {group_size: -1}", ["averaging.group_size is -1; allowed: 0 (chosen), or 3 and more"]),
        ("run: x\noptimizer: {offload: cpu}", ["optimizer.offload is cpu (text); allowed: true or false"]),
        (
            "run: x\noptimizer: {decay: linear, warmup_steps: 5, total_steps: 5}",
            ["optimizer.decay needs total_steps above warmup_steps"],
        ),
        ("run: x\ndata: {kind: csv}", ["data.kind is csv (text); allowed: one of text, jsonl, parquet, dataset"]),
        (
            "run: x\ndata: {sources: books}",
            ["data.sources is books (text); allowed: a list, each item keys and values"],
        ),
        ("run: x\ndata: {sources: [books]}", ["data.sources[0] is books (text); allowed: keys and values (path, kind"]),
        ("run: x\ndata:\n  sources:\n  - {weight: 1}", ["data.sources[0].path is missing; allowed: text"]),
        (
            "run: x\ndata:\n  sources:\n  - path: a\n    wieght: 1",
            ["line 5: data.sources[0].wieght is not a known key; did you mean weight?"],
        ),
        (
            "run: x\ndata:\n  sources:\n  - path: a\n  - path: b\n    weight: 0",
            ["FILE, line 6: data.sources[1].weight is 0.0; allowed: 0.000001 to 1000000"],
        ),
        (
            "run: x\ndata:\n  path: a\n  sources: [{path: b}]",
            ["line 4: data.sources is given beside data.kind, path, field or digest; allowed: one or the other"],
        ),
        (f"run: x\ndata: {{sources: [{'{path: a},' * 65}]}}", ["data.sources has 65 sources; allowed: up to 64"]),
        ("run: x\ndata: {path: 'https://'}", ["data.path is 'https://'; allowed: https://host/folder, without a user"]),
        ("run: x\ndata: {path: 'https://u:p@h/'}", ["data.path is 'https://u:p@h/'; allowed: https://host/folder"]),
        ("run: x\ndata: {path: 'https://h/?a=b'}", ["allowed: https://host/folder, without a user, a query"]),
        ("run: x\ndata: {path: 'https://h:99999/'}", ["data.path is 'https://h:99999/'; not an address: Port out of"]),
        ("run: x\ndata: {path: 'http://h/'}", ["data.digest is missing, but http data can be changed on its way"]),
        ("run: x\ndata: {path: 'https://h/', digest: abc}", ["data.digest is not a SHA-256 in hex; allowed: 64 of"]),
        (f"run: x\ndata: {{digest: {'ab' * 32}}}", ["data.digest is given, but each version of Python has its own"]),
        ("run: x\ndata: {kind: dataset}", ["data.path is 'stdlib'; allowed with kind dataset: module:function"]),
        ("run: x\nlimits: {data_cache_mb: 0}", ["limits.data_cache_mb is 0; allowed: 1 to 1073741824"]),
        ("run: x\nlimits: {keep_totals: 65}", ["limits.keep_totals is 65; allowed: 0 to 64"]),
        ("run: x\nlimits: {microbatches_in_flight: -1}", ["limits.microbatches_in_flight is -1; allowed: 0"]),
        ("run: x\nlimits: {stage: 1}", ["line 2: limits.stage is 1; allowed: 0 to pipeline.stages - 1 (0)"]),
        (
            "run: x\nlimits: {stage: []}",
            ["limits.stage is []; allowed: 0", "or a list of 1 to 2 of them"],
        ),
        (
            "run: x\nlimits: {stage: [0, 0]}",
            ["limits.stage is [0, 0]; allowed: 0", "each once"],
        ),
        ("run: x\nlimits: {upload_mbit: -2}", ["limits.upload_mbit is -2.0; allowed: 0 (no limit) to 1000000"]),
        ("run: x\nlimits: {relay: 1}", ["limits.relay"]),
        ("run: x\nlimits: {offload: cuda}", ["limits.offload is cuda (text); allowed: true or false"]),
        (
            "run: x\nlimits: {offload: true}\nexperts: {}",
            ["limits.offload is true, but a run with experts computes its trunk in parts of layers; allowed: false"],
        ),
        (
            "run: x\nmodel: {kind: loop}\nlimits: {offload: true}\n"
            f"loop: {{model: m, optimizer: o, layout: {'a' * 64}, layout_bytes: 9}}",
            ["limits.offload is true, but the model is one piece, in the users' own loops; allowed: false"],
        ),
        (
            "run: x\nlimits: {offload: true, recompute: false}",
            ["limits.recompute is false, but with limits.offload layers are computed again; allowed: true, or leave"],
        ),
        ("run: x\nevaluate: {samples: 0}", ["evaluate.samples is 0; allowed: 1 to 1048576"]),
        ("run: x\nevaluate: {every_steps: -1}", ["evaluate.every_steps is -1; must not be negative"]),
        ("run: x\ncheckpoint: {every_steps: -1}", ["checkpoint.every_steps is -1; must not be negative"]),
        ("run: x\ndata: {shuffle_buffer: 0}", ["data.shuffle_buffer is 0; allowed: 1 to 10000000"]),
        ("run: x\naveraging: {sender_timeout_s: 0}", ["averaging.sender_timeout_s is 0.0; must be above 0"]),
        (f"run: {'x' * 65}", ["run has 65 characters; allowed: 1 to 64"]),
        ("run: ../../x", ["run is '../../x'; allowed: letters, digits, _ and -, and between"]),
        ("run: .hidden", ["run is '.hidden'; allowed: letters"]),
        ("run: a/b", ["run is 'a/b'; allowed: letters"]),
        ("run: été", ["run is 'été'; allowed: letters"]),
        (
            "run: x\nmodel: {dtype: float64, precision: bf16}",
            ["model.precision is bf16, which is for float32, but model.dtype is float64; allowed: full"],
        ),
        (
            "run: x\nmodel: {dtype: float64}\nlimits: {precision: fp16}",
            ["limits.precision is fp16, which is for float32, but model.dtype is float64; allowed: full"],
        ),
        ("run: x\nmodel: {d_model: 0}", ["line 2: model.d_model is 0; allowed: 1 to 65536"]),
        ("run: x\nmodel: {layers: 2}\npipeline: {stages: 3}", ["line 3: pipeline.stages is 3; allowed: 1 to"]),
        ("run: x\npipeline: {boundary: {code: int9}}", ["pipeline.boundary.code is int9", "did you mean int8?"]),
        (
            "run: x\npipeline:\n  boundary: {code: int8, block: 100}",
            ["line 3: pipeline.boundary.block is 100; allowed: 0 (the code's own), or a power of two from 64 to 4096"],
        ),
        (
            "run: x\npipeline: {boundary: {code: bf16, block: 64}}",
            ["pipeline.boundary.block is 64, but bf16 has no blocks; allowed: 0"],
        ),
        (
            "run: x\nmodel: {dtype: float64}\npipeline: {boundary: {code: nf4}}",
            ["line 3: pipeline.boundary.code is nf4, which is for float32, but model.dtype is float64; allowed: none"],
        ),
        ("run: x\naveraging: {code: auto}", ["averaging.code is auto"]),
        ("run: x\naveraging: {code: int4, block: 32}", ["averaging.block is 32; allowed: 0"]),
        ("run: x\naveraging: {code: powersgd, block: 64}", ["averaging.block is 64, but powersgd has no blocks"]),
        ("run: x\naveraging: {code: powersgd, rank: 0}", ["line 2: averaging.rank is 0; allowed: 1 to 128"]),
        ("run: x\naveraging: {code: powersgd, rank: 129}", ["averaging.rank is 129; allowed: 1 to 128"]),
        ("run: x\naveraging: {code: int8, rank: 8}", ["averaging.rank is 8, but int8 has no rank; leave it out"]),
        ("run: x\npipeline: {boundary: {code: powersgd}}", ["pipeline.boundary.code is powersgd"]),
        ("run: x\npipeline: {boundary: {lossless: true}}", ["allowed: one of auto, never, always"]),
        ("run: x\nbatch: {target_samples: 3}", ["FILE, line 2: batch.target_samples is 3; must be a multiple of"]),
        ("run: x\nrun: y", ["FILE, line 2: run is given twice, first on line 1"]),
        ("run: x\nmodel:\n  heads: 2\n  heads: 4", ["FILE, line 4: model.heads is given twice, first on line 3"]),
        ("run: x\n  seed: [", ["FILE, line 2", "this is not YAML"]),
        ("run: !!python/object:os.system x", ["FILE, line 1", "this is not YAML"]),
        ("run: x\x00y", ["this is not YAML"]),
        ("run: &a [*a]", ["this is not YAML: nested too deeply"]),
        ("run: x\nbootstrap: [/ip4/1.2.3.4/tcp/1, nowhere]", ["line 2: bootstrap[1]: 'nowhere' is not an address"]),
        ("run: x\nlisten: [/ip4/300.1.1.1/tcp/1]", ["line 2: listen[0]: '/ip4/300.1.1.1/tcp/1' is not an address"]),
        ("run: x\nlisten: [/ip4/1.2.3.4/tcp/99999]", ["line 2: listen[0]:"]),
        ("run: x\nannounce: [/ip4/0.0.0.0/tcp/1]", ["line 2: announce[0]: /ip4/0.0.0.0/tcp/1 cannot be dialed"]),
        ("run: x\nannounce: [/ip4/1.2.3.4/tcp/0]", ["line 2: announce[0]: /ip4/1.2.3.4/tcp/0 cannot be dialed"]),
    ],
)
def test_a_mistake_is_named_with_place_and_remedy(file: Path, text: str, parts: list[str]) -> None:
    message = complaint(file, text)
    for part in parts:
        assert part in message


def test_all_mistakes_come_in_one_message_in_the_order_of_the_file(file: Path) -> None:
    message = complaint(file, "run: x\nlr: 1\nmodel: {heads: many}\nbootstrap: [here]\nsede: 3\n")
    lines = message.splitlines()
    assert lines[0] == "FILE has 4 mistakes:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["line 2", "line 3", "line 4", "line 5"]


def test_aliases_cannot_blow_up_the_file(file: Path) -> None:
    levels = "\n".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 9))
    assert "too large once its aliases are expanded" in complaint(file, f"k0: &k0 x\n{levels}\n")


def test_a_missing_file_is_named_and_its_neighbour_offered(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("run: x")
    with pytest.raises(ConfigError, match=r"there is no file .*pipelin\.yaml; did you mean .*pipeline\.yaml\?"):
        load_run(tmp_path / "pipelin.yaml")


def test_a_folder_text_in_another_coding_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_run(tmp_path)
    (tmp_path / "a.yaml").write_bytes(b"run: caf\xe9")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 8\)"):
        load_run(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_run(tmp_path / "b.yaml")


def test_a_wrong_address_on_the_command_line_is_named_with_its_option() -> None:
    check_addresses("--listen", ["/ip4/2.2.2.2/tcp/2"])
    with pytest.raises(ConfigError, match="--listen: 'x' is not an address"):
        check_addresses("--listen", ["/ip4/2.2.2.2/tcp/2", "x"])


def test_the_shipped_run_files_are_right() -> None:
    folder = Path(__file__).parents[2] / "configs"
    files = sorted(set(folder.glob("*.yaml")) - {folder / "links.yaml"})
    assert files
    for file in files:
        load_run(file)


def test_a_model_of_ones_own_has_no_heads_to_be_checked(file: Path) -> None:
    file.write_text("run: x\nmodel: {kind: 'mine:make', heads: 5}\n")
    assert load_run(file).run.model.heads == 5


def test_all_mistakes_are_told_at_once_whatever_their_kinds(file: Path) -> None:
    text = """\
run: x
sede: 3
model:
  d_modle: 64
  heads: 5
  context: 0
pipeline: {microbatch: many, boundary: {code: int7, block: 3}}
optimizer: {lr: -1, beta1: one, beta2: 2}
data: {holdout: 1, shuffle_buffer: 0, kind: csv, digest: abc}
checkpoint: 5
evaluate: {samples: 0}
limits: {stage: 9}
"""
    lines = complaint(file, text).splitlines()
    assert lines[0] == "FILE has 14 mistakes:"
    assert [line.split(" is ")[0].strip() for line in lines[1:]] == [
        "line 2: sede",
        "line 4: model.d_modle",
        "line 6: model.context",
        "line 7: pipeline.boundary.code",
        "line 7: pipeline.microbatch",
        "line 8: optimizer.beta1",
        "line 8: optimizer.beta2",
        "line 8: optimizer.lr",
        "line 9: data.holdout",
        "line 9: data.kind",
        "line 9: data.shuffle_buffer",
        "line 10: checkpoint",
        "line 11: evaluate.samples",
        "line 12: limits.stage",
    ]


def test_no_mistake_is_told_that_only_follows_from_another(file: Path) -> None:
    """`heads` does not divide the default that stands in for what `d_model` was to be."""
    assert "heads" not in complaint(file, "run: x\nmodel: {d_model: '96', heads: 3}\n")
    assert "heads" not in complaint(file, "run: x\nmodel: {d_modl: 96, heads: 3}\n")
    assert "stages" not in complaint(file, "run: x\nmodel: {layers: eight}\npipeline: {stages: 8}\n")
    assert "allowed: 0 to pipeline" not in complaint(file, "run: x\npipeline: {stages: two}\nlimits: {stage: 1}\n")


def test_a_model_of_ones_own_may_have_more_stages_than_gpt_has_layers(file: Path) -> None:
    file.write_text("run: x\nmodel: {kind: 'no_such_file:build', heads: 0, d_model: 7}\npipeline: {stages: 9}\n")
    loaded = load_run(file)
    assert loaded.run.pipeline.stages == 9
    assert loaded.unknown[0].startswith("model.kind: there is no file no_such_file.py here")


def test_a_digest_may_be_given_for_text_on_this_machine_or_be_any(file: Path) -> None:
    for digest in ("ab" * 32, "any"):
        file.write_text(f"run: x\ndata: {{path: 'corpus/*.txt', digest: {digest}}}\n")
        assert load_run(file).run.data.digest == digest
    assert "or any: every trainer" in complaint(file, "run: x\ndata: {path: a, digest: some}\n")
