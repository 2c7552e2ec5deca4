"""The model: its cut into stages, its starting parameters, its mathematics, models of one's own."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.model.layers import Attention, rotate
from peerd.model.stage.assemble import load_whole_model
from peerd.model.stage.partition import build, spans, whole_model
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, PipelineSection, RunFile

MODEL = ModelSection(d_model=16, heads=2, layers=6, context=8)


def make_run(stages: int = 1, seed: int = 0, **model: object) -> RunFile:
    section = msgspec.structs.replace(MODEL, **model)
    return RunFile(run="model", seed=seed, model=section, pipeline=PipelineSection(stages=stages))


def parameters(run: RunFile, stages: range) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build(run, stages).named_parameters()}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
def test_the_cut_covers_every_block_once_and_every_stage_has_one(stages: int) -> None:
    cut = spans(make_run(stages))
    assert [index for part in cut for index in part] == list(range(6))
    assert len(cut) == stages
    assert all(cut)


def test_the_last_stage_has_fewer_blocks_when_its_head_is_large() -> None:
    even = spans(make_run(2, d_model=256, layers=8, heads=8))
    narrow = spans(make_run(2, d_model=4, layers=8))
    assert [len(part) for part in even] == [4, 4]
    assert len(narrow[0]) > len(narrow[1])


@pytest.mark.parametrize("stages", [2, 3])
def test_starting_parameters_do_not_depend_on_the_cut(stages: int) -> None:
    whole = parameters(make_run(1), range(1))
    pieces = {n: t for stage in range(stages) for n, t in parameters(make_run(stages), range(stage, stage + 1)).items()}
    assert list(whole) == list(pieces)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_starting_parameters_follow_the_seed_and_fp64_starts_where_fp32_does() -> None:
    torch.manual_seed(1)
    one = parameters(make_run(seed=1), range(1))
    torch.manual_seed(2)
    again, other = parameters(make_run(seed=1), range(1)), parameters(make_run(seed=2), range(1))
    sharp = parameters(make_run(seed=1, dtype="float64"), range(1))
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        assert name.endswith(".gain") or not torch.equal(tensor, other[name])
        assert sharp[name].dtype == torch.float64
        assert torch.equal(sharp[name].float(), tensor)


def test_the_first_loss_is_that_of_knowing_nothing() -> None:
    stage = StageModule(make_run(d_model=64), 0)
    tokens = torch.randint(256, (16, 9), generator=torch.Generator().manual_seed(0))
    assert stage.loss(tokens[:, :-1], tokens[:, 1:]) == pytest.approx(math.log(256), abs=0.1)


def test_shared_layers_have_one_blocks_weights_in_each_stage() -> None:
    shared = whole_model(make_run(2, share_layers=True))
    assert [name for name, _ in shared.steps] == ["embed", "block0", "block4", "head"]
    assert [times for _, times in shared.steps] == [1, 4, 2, 1]


def test_no_token_sees_those_after_it() -> None:
    model = whole_model(make_run())
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 10, 1, 1, 8) for _ in "qk")
    turned_q, turned_k = rotate(q)[0, :, 0, 0], rotate(k)[0, :, 0, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, :, 0, 0].norm(dim=-1))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.isclose(scores[0, 1], scores[0, 2])


def test_attention_is_the_textbooks_softmax() -> None:
    torch.manual_seed(3)
    attention = Attention(8, 2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    qkv = attention.qkv(x).view(1, 5, 3, 2, 4)
    q, k = rotate(qkv[:, :, :2]).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ qkv[:, :, 2].transpose(1, 2)).transpose(1, 2).reshape(1, 5, 8))
    torch.testing.assert_close(attention(x), expected)


# --- a model of one's own ----------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line, self.drop = nn.Linear(width, width), nn.Dropout(0.5)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.line(x)))

def layers(run):
    width = run.model.d_model
    return [nn.Embedding(256, width), Mlp(width), Mlp(width), nn.Linear(width, 256)]

def tuple_of(run):
    return tuple(layers(run))

def one(run):
    return layers(run)[:1]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("kind", ["mine:layers", "mine.py:layers"])
def test_a_model_of_ones_own_is_cut_and_trained_like_any(kind: str) -> None:
    run = make_run(2, kind=kind, dtype="float64")
    first, last = StageModule(run, 0), StageModule(run, 1)
    assert first.layout.names == ("layer0.weight", "layer1.line.weight", "layer1.line.bias")
    torch.manual_seed(5)
    assert StageModule(run, 1).digest() == last.digest()
    tokens = torch.arange(18).view(2, 9)
    x = first.forward(tokens[:, :-1])
    gradient, _ = last.backward(x, tokens[:, 1:])
    assert gradient is not None
    first.backward(tokens[:, :-1], gradient)
    model = whole_model(run)
    torch.testing.assert_close(last.forward(x), model(tokens[:, :-1]))
    before = last.loss(x, tokens[:, 1:])
    last.apply(last.gradient() / 2)
    first.apply(first.gradient() / 2)
    assert last.loss(first.forward(tokens[:, :-1]), tokens[:, 1:]) < before


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", "model.kind is 'llama'; allowed: gpt, or module:function"),
        ("mine:", "allowed: gpt, or module:function"),
        ("mine:nothing", "mine has no function nothing"),
        ("nowhere.at_all:layers", r"there is no file nowhere.at_all.py here and no module nowhere.at_all"),
        ("mine:tuple_of", "must return a list of torch.nn.Module"),
        ("mine:one", "returns 1 layers for 2 stages"),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_used_is_explained(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("nowhere.at_all.py", "nowhere/at_all.py")):
        whole_model(make_run(2, kind=kind))


# --- the whole model again, and text from it ---------------------------------------------------------------------


def trained(run: RunFile) -> list[StageModule]:
    stages = [StageModule(run, stage) for stage in range(run.pipeline.stages)]
    for stage in stages:
        stage.apply(torch.randn(stage.layout.count, generator=torch.Generator().manual_seed(stage.stage)))
    return stages


def test_the_whole_model_from_the_stages_states_computes_what_they_compute() -> None:
    run = make_run(2)
    stages = trained(run)
    model, step = load_whole_model(run, [stage.state() for stage in stages])
    tokens = torch.arange(8)[None]
    assert step == 1
    torch.testing.assert_close(model(tokens), stages[1].forward(stages[0].forward(tokens)))


def test_the_whole_model_from_folders_takes_the_newest_step_that_all_stages_have(tmp_path: Path) -> None:
    from peerd.model.checkpoint import Checkpoints
    from peerd.run.runfile import fingerprint

    run = make_run(2)
    folders = [tmp_path / "0", tmp_path / "1"]
    stages = trained(run)
    for stage, folder in zip(stages, folders, strict=True):
        Checkpoints(folder, 3, fingerprint(run), stage.stage).save(1, stage.state())
    Checkpoints(folders[0], 3, fingerprint(run), 0).save(2, stages[0].state())
    model, step = load_whole_model(run, folders)
    assert step == 1
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(model(tokens), stages[1].forward(stages[0].forward(tokens)))
    (folders[1] / "step-00000001.json").unlink()
    with pytest.raises(ConfigError, match=r"no step is saved by every stage \(.*0: 1, 2; .*1: none\)"):
        load_whole_model(run, folders)


def test_states_that_do_not_make_up_the_model_are_refused() -> None:
    run = make_run(2)
    first, last = (stage.state() for stage in trained(run))
    with pytest.raises(ConfigError, match="the run has 2 stages, but 1 were given"):
        load_whole_model(run, [first])
    with pytest.raises(ConfigError, match=r"parameters are not those of this run: block4\..* differs"):
        load_whole_model(run, [first, first])
    with pytest.raises(ConfigError, match="at different steps: 1, 9"):
        load_whole_model(run, [first, last | {"step": torch.tensor(9)}])
