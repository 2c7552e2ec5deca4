"""The stages of a run, one after the other, are the whole model: loss, gradients, and parameters after steps."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerd.model.optimizer import learning_rate
from peerd.model.stage.partition import whole_model
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def make_run(stages: int, dtype: str, *, share: bool = False, optimizer: OptimizerSection | None = None) -> RunFile:
    model = ModelSection(d_model=16, heads=2, layers=4, context=12, share_layers=share)
    return RunFile(
        run="numerics",
        seed=5,
        model=msgspec.structs.replace(model, dtype=dtype),
        pipeline=PipelineSection(stages=stages, microbatch=3),
        optimizer=optimizer or OptimizerSection(),
    )


def batches(count: int, samples: int = 6, context: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(256, (samples, context + 1), generator=generator) for _ in range(count)]


def pipeline_backward(stages: list[StageModule], tokens: Tensor, sign: float = 1.0) -> float:
    """One microbatch through all stages and back, as a trainer would drive it; the loss sum."""
    inputs = [tokens[:, :-1]]
    for stage in stages[:-1]:
        inputs.append(stage.forward(inputs[-1]))
    gradient, loss_sum = stages[-1].backward(inputs[-1], tokens[:, 1:], sign)
    for stage, x in zip(stages[-2::-1], inputs[-2::-1], strict=True):
        assert gradient is not None
        gradient, none = stage.backward(x, gradient, sign)
        assert none == 0.0
    assert gradient is None
    return loss_sum


def whole_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over samples of the mean over tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def parameters_of(stages: list[StageModule]) -> dict[str, Tensor]:
    found = {n: t for stage in stages for n, t in stage.state().items() if n.startswith("param/")}
    return {name.removeprefix("param/"): tensor for name, tensor in found.items()}


def gradients_of(stages: list[StageModule]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stage in stages:
        found |= dict(zip(stage.layout.names, stage.layout.views(stage.gradient()), strict=True))
    return found


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> list[str]:
    """The names that only one of them has, or whose relative difference is larger than `tolerance`."""
    found = [f"only one has {name}" for name in mine.keys() ^ theirs.keys()]
    for name in mine.keys() & theirs.keys():
        tensor = theirs[name]
        difference = torch.linalg.vector_norm(mine[name] - tensor) / torch.linalg.vector_norm(tensor)
        if not difference <= tolerance:
            found.append(f"{name}: relative difference {difference:.2e}")
    return found


def reference_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    if section.name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=section.momentum, weight_decay=section.weight_decay)
    betas = (section.beta1, section.beta2)
    return torch.optim.AdamW(model.parameters(), betas=betas, eps=section.eps, weight_decay=section.weight_decay)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_and_every_gradient_are_those_of_the_whole_model(dtype: str, stages: int, share: bool) -> None:
    run = make_run(stages, dtype, share=share)
    pieces = [StageModule(run, index) for index in range(stages)]
    model = whole_model(run)
    assert {n: t.shape for n, t in model.named_parameters()} == {n: t.shape for n, t in parameters_of(pieces).items()}
    tokens = batches(1)[0]
    loss_sum = sum(pipeline_backward(pieces, part) for part in tokens.split(3))
    loss = whole_loss(model, tokens)
    loss.backward()
    assert loss_sum / len(tokens) == pytest.approx(loss.item(), rel=TOLERANCE[dtype])
    wanted = {name: p.grad * len(tokens) for name, p in model.named_parameters() if p.grad is not None}
    assert apart(gradients_of(pieces), wanted, TOLERANCE[dtype]) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_of_the_last_stage_gives_the_logits_and_the_loss_of_the_whole_model(dtype: str) -> None:
    run = make_run(3, dtype)
    pieces = [StageModule(run, index) for index in range(3)]
    tokens = batches(1)[0]
    x = tokens[:, :-1]
    for piece in pieces[:-1]:
        x = piece.forward(x)
    model = whole_model(run)
    torch.testing.assert_close(pieces[-1].forward(x), model(tokens[:, :-1]))
    assert pieces[-1].loss(x, tokens[:, 1:]) == pytest.approx(whole_loss(model, tokens).item(), rel=TOLERANCE[dtype])


# Adam divides by the root of a gradient's square, and so makes rounding large where gradients vanish: hence the eps.
SECTIONS = [
    OptimizerSection(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    OptimizerSection(name="adamw", lr=0.003, warmup_steps=3, weight_decay=0.1, eps=1e-6),
    OptimizerSection(name="lamb", lr=0.003, weight_decay=0.1, eps=1e-6),
]


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_five_steps_move_the_stages_where_they_move_the_whole_model(
    dtype: str, section: OptimizerSection, stages: int, share: bool
) -> None:
    """Against torch's own optimizers; against the run in one stage for LAMB, which torch does not have."""
    run = make_run(stages, dtype, share=share, optimizer=section)
    pieces = [StageModule(run, index) for index in range(stages)]
    model = whole_model(run)
    by_torch = reference_optimizer(model, section) if section.name != "lamb" else None
    lamb = LambByThePaper(model, section)
    for step, tokens in enumerate(batches(5)):
        for part in tokens.split(3):
            pipeline_backward(pieces, part)
        for piece in pieces:
            piece.apply(piece.gradient() / len(tokens))
        model.zero_grad()
        whole_loss(model, tokens).backward()
        if by_torch is None:
            lamb.step(learning_rate(section, step))
        else:
            by_torch.param_groups[0]["lr"] = learning_rate(section, step)
            by_torch.step()
    assert [piece.step for piece in pieces] == [5] * stages
    assert apart(parameters_of(pieces), {n: p.detach() for n, p in model.named_parameters()}, TOLERANCE[dtype]) == []


class LambByThePaper:
    """You et al. 2020, algorithm 2, written down tensor by tensor."""

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        self.section = section
        self.parameters = list(model.parameters())
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        s, self.t = self.section, self.t + 1
        for x, m, v in zip(self.parameters, self.m, self.v, strict=True):
            assert x.grad is not None
            m.copy_(s.beta1 * m + (1 - s.beta1) * x.grad)
            v.copy_(s.beta2 * v + (1 - s.beta2) * x.grad**2)
            r = (m / (1 - s.beta1**self.t)) / ((v / (1 - s.beta2**self.t)).sqrt() + s.eps)
            u = r + s.weight_decay * x
            x -= lr * x.norm() / u.norm() * u


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_microbatch_taken_out_again_leaves_the_accumulator_of_before(dtype: str) -> None:
    run = make_run(2, dtype)
    pieces = [StageModule(run, index) for index in range(2)]
    kept, taken_out = batches(1)[0].split(3)
    pipeline_backward(pieces, kept)
    before = gradients_of(pieces)
    pipeline_backward(pieces, taken_out)
    pipeline_backward(pieces, taken_out, sign=-1.0)
    assert apart(gradients_of(pieces), before, TOLERANCE[dtype]) == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_stage_restored_from_its_state_goes_on_bit_for_bit(section: OptimizerSection) -> None:
    run = make_run(1, "float32", optimizer=section)
    first, second = StageModule(run, 0), StageModule(run, 0)

    def advance(piece: StageModule, some: list[Tensor]) -> None:
        for tokens in some:
            piece.backward(tokens[:, :-1], tokens[:, 1:])
            piece.apply(piece.gradient() / len(tokens))

    advance(first, batches(4)[:2])
    second.load_state(first.state())
    assert second.digest() == first.digest()
    advance(first, batches(4)[2:])
    advance(second, batches(4)[2:])
    assert second.step == first.step == 4
    assert second.digest() == first.digest()


def test_the_same_inputs_give_the_same_bits_wherever_they_lie_in_memory() -> None:
    run = make_run(2, "float32")
    digests = set()
    for shift in (0, 1, 3):
        piece = StageModule(run, 1)
        x = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(1))
        memory = torch.empty(x.numel() + shift)
        memory[shift:] = x.flatten()
        piece.backward(memory[shift:].view_as(x), batches(1)[0][:3, 1:])
        piece.apply(piece.gradient())
        digests.add(piece.digest())
    assert len(digests) == 1
