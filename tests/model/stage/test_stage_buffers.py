"""Stages of one's own model with buffers: trained by batch statistics, judged by running ones, alike on all peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peerd.codec.frames import to_frame
from peerd.core.errors import ConfigError
from peerd.messages.swarm import Mb
from peerd.model.stage.assemble import load_whole_model
from peerd.model.stage.partition import whole_model
from peerd.model.stage.served_stage import ServedStage, items_of, state_of
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import AveragingSection, BatchSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from tests.kit.normed import write_normed

Make = Callable[..., RunFile]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    kind = write_normed(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(buffers: Any = "average", stages: int = 1, **more: Any) -> RunFile:
        return RunFile(
            run="normed",
            model=ModelSection(kind=kind, d_model=8, context=6, dtype="float64", buffers=buffers),
            pipeline=PipelineSection(stages=stages, microbatch=4),
            optimizer=OptimizerSection(name="sgd", lr=0.1),
            batch=BatchSection(target_samples=8),
            **more,
        )

    return run


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 256, (4, 7), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(stage: ServedStage, seq: int) -> None:
    pair = tokens(seq)
    stage.backward(stage.module.step, Mb("a", seq), pair, [to_frame(part) for part in pair])


def buffers(stage: ServedStage) -> dict[str, Tensor]:
    return stage.module.buffers.copies()


def commit(stages: list[ServedStage], samples: int) -> None:
    total = np.sum([stage.vector(leads=place == 0) for place, stage in enumerate(stages)], axis=0)
    for stage in stages:
        stage.commit(stage.module.step, total, samples)


def plain(run: RunFile, batches: list[list[int]]) -> nn.Module:
    """The same steps in plain torch, a microbatch at a time."""
    model = whole_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model.train()
        for seq in batch:
            x, targets = tokens(seq)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())
            (loss / len(batch)).backward()
        optimizer.step()
    return model.eval()


def test_alone_a_stage_is_plain_torch_buffers_and_all(make: Make) -> None:
    stage = ServedStage(make(), 0, "cpu")
    for step in range(3):
        for seq in (2 * step, 2 * step + 1):
            train(stage, seq)
        commit([stage], 8)
    model = plain(make(), [[0, 1], [2, 3], [4, 5]])
    state = model.state_dict()
    for name, tensor in stage.module.state().items():
        kind, _, rest = name.partition("/")
        if kind in ("param", "buffer"):
            assert torch.allclose(tensor.double(), state[rest].double(), atol=1e-10), name
    assert int(state["layer1.norm.num_batches_tracked"]) == 6
    x, targets = tokens(9)
    judged = nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())
    assert stage.module.loss(x, targets) == pytest.approx(float(judged.detach()), abs=1e-10)
    whole, step = load_whole_model(make(), [stage.state()])
    assert step == 3
    torch.testing.assert_close(whole(x), model(x))


def test_two_peers_have_the_mean_and_one_that_joins_late_has_it_too(make: Make) -> None:
    one, two, late = (ServedStage(make(), 0, "cpu") for _ in range(3))
    train(one, 0)
    train(two, 1)
    ours, theirs = buffers(one), buffers(two)
    commit([one, two], 8)
    for name, tensor in buffers(one).items():
        mean = (ours[name].double() + theirs[name].double()) / 2
        assert torch.allclose(tensor.double(), mean if tensor.is_floating_point() else mean.round()), name
    assert one.module.digest() == two.module.digest()
    assert [(s.name, s.dtype, s.shape) for s in late.outline()] == [item[:3] for item in items_of(one.state())]
    late.load(state_of(items_of(one.state())))
    assert all(torch.equal(tensor, buffers(one)[name]) for name, tensor in buffers(late).items())
    x, targets = tokens(9)
    assert late.module.loss(x, targets) == one.module.loss(x, targets)
    train(late, 2)
    train(one, 3)
    commit([one, two, late], 8)
    assert one.module.digest() == two.module.digest() == late.module.digest()


def test_first_and_local_are_as_their_names_say(make: Make) -> None:
    for how in ("first", "local"):
        one, two = (ServedStage(make(how), 0, "cpu") for _ in range(2))
        train(one, 0)
        train(two, 1)
        ours, theirs = buffers(one), buffers(two)
        commit([one, two], 8)
        for name, tensor in buffers(two).items():
            assert torch.allclose(tensor, ours[name] if how == "first" else theirs[name]), (how, name)
        assert one.module.digest() == two.module.digest(), "what is handed to newcomers is alike"


def test_only_training_moves_buffers_and_a_microbatch_once(make: Make) -> None:
    stage = ServedStage(make(), 0, "cpu")
    fresh = buffers(stage)
    x, targets = tokens(0)

    def moved(since: dict[str, Tensor]) -> bool:
        return any(not torch.equal(tensor, since[name]) for name, tensor in buffers(stage).items())

    stage.forward(0, x)
    stage.forward(None, x)
    stage.loss(x, targets)
    assert not moved(fresh)
    train(stage, 0)
    assert moved(fresh)
    after, part = buffers(stage), stage.vector()
    train(stage, 0)  # a repeat
    train(stage, 1)
    stage.keep_only(0, [Mb("a", 0)])  # the sum is made anew
    assert np.array_equal(stage.vector()[: stage.module.layout.count], part[: stage.module.layout.count])
    assert int(buffers(stage)["layer1.passes"]) == 2
    assert int(after["layer1.passes"]) == 1
    with torch.no_grad():
        stage.module._piece.get_parameter("layer3.weight").fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        train(stage, 5)
    assert int(buffers(stage)["layer1.passes"]) == 2


def test_forward_gives_what_backward_computes_again(make: Make) -> None:
    """The next stage's gradient is of that output: by the microbatch's own statistics in both."""
    run = make(stages=2)
    first, last = StageModule(run, 0), StageModule(run, 1)
    x, targets = tokens(0)
    y = first.forward(x, training=True)
    assert not torch.allclose(y, first.forward(x)), "fresh running statistics are far off"
    gradient, loss_sum = last.backward(y, targets)
    assert gradient is not None
    first.backward(x, gradient)
    model = whole_model(run).train()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())
    loss.backward()
    assert loss_sum / 4 == pytest.approx(float(loss.detach()))
    for name, value in zip(first.layout.names, first.total.views(first.gradient()), strict=False):
        torch.testing.assert_close(value / 4, model.get_parameter(name).grad, msg=name)


def test_a_code_that_is_too_coarse_is_refused_in_words(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"code 'int8' is too coarse for buffers .layer1\.passes, "):
        StageModule(make(averaging=AveragingSection(code="int8")), 0)
    StageModule(make(averaging=AveragingSection(code="powersgd")), 0)
