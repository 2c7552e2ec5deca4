"""Trunk and flight: the same loss and gradients as one plain torch model, whatever fails on the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
import trio
from torch import Tensor

from peerd.codec.frames import to_frame
from peerd.core.errors import ConfigError, TooFewExperts
from peerd.experts.model.expert_mixture import imbalance
from peerd.experts.model.trunk import TrunkModule
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.experts.model.trunk_stage import TrunkStage
from peerd.messages.swarm import Mb
from peerd.model.stage.microbatch_books import Stale
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.grid import Uid
from peerd.run.runfile import BatchSection, ExpertsSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from tests.worlds.roles.expert_network import NearExperts

EXPERTS = ExpertsSection(block="ffn", grid=[3, 4], top_k=3, balance=0.1)
MB = Mb("trainer", 1)


def run_with(experts: ExpertsSection = EXPERTS, **sections: Any) -> RunFile:
    settings: dict[str, Any] = {
        "run": "test",
        "seed": 3,
        "model": ModelSection(d_model=16, heads=2, layers=3, context=8),
        "pipeline": PipelineSection(microbatch=2),
        "optimizer": OptimizerSection(name="sgd", lr=0.1),
        "batch": BatchSection(target_samples=4),
        "experts": experts,
    }
    return RunFile(**settings | sections)


def text(seed: int = 0, samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(256, (samples, 9), generator=generator)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


async def there(flight: TrunkMicrobatch, network: NearExperts, k: int = 3) -> None:
    scores: Any = flight.depart()
    while scores is not None:
        asks = flight.ask(await network.choose(flight.layer, scores, k))
        scores = flight.go_on(await network.forward(asks, flight.samples))


async def fly(flight: TrunkMicrobatch, network: NearExperts, k: int = 3) -> None:
    await there(flight, network, k)
    asks: Any = flight.turn()
    while asks is not None:
        asks = flight.go_back(await network.backward(asks))


def flown(run: RunFile, network: NearExperts, seed: int = 0) -> tuple[TrunkStage, TrunkMicrobatch]:
    stage = TrunkStage(run, "cpu")
    flight = stage.flight(0, *text(seed))
    trio.run(fly, flight, network)
    return stage, flight


class Plain:
    """The same model in one piece: parameters of the trunk, every expert computed for its samples by hand."""

    def __init__(self, run: RunFile, network: NearExperts, dead: set[tuple[str, Uid]] = frozenset()) -> None:  # type: ignore[assignment]
        self.run, self.network, self.dead = run, network, dead
        self.trunk = TrunkModule(run)
        self.named = dict(self.trunk._piece.named_parameters())

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss sum, and the balancing loss of all layers times samples."""
        section, piece = self.trunk.section, self.trunk._piece
        x, balance, layer = piece.get_submodule("embed")(tokens), torch.zeros(()), 0
        for name, _ in piece.steps[1:-1]:
            block: Any = piece.get_submodule(name)
            if not hasattr(block, "gate"):
                x = block(x)
                continue
            x, normed = block(x)
            samples = normed.reshape(-1, 16) if len(self.trunk.sample_shape) == 1 else normed
            scores = block.gate(samples if samples.ndim == 2 else samples.mean(1))
            balance = balance + section.balance * len(tokens) * imbalance(scores, self.trunk.sides)
            x = x + self._mean(layer, samples, scores).view_as(x)
            layer += 1
        logits = piece.get_submodule("head")(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8, balance

    def _mean(self, layer: int, samples: Tensor, scores: Tensor) -> Tensor:
        parts = scores.split(list(self.trunk.sides), 1)
        chosen = self.network.chosen(layer, [p.detach().numpy() for p in parts], self.trunk.section.top_k)
        rows = []
        for i, uids in enumerate(chosen):
            live = [uid for uid in uids if ("forward", uid) not in self.dead]
            weights = torch.stack([sum(p[i, c] for p, c in zip(parts, uid.at, strict=True)) for uid in live]).softmax(0)  # type: ignore[arg-type, misc]
            outs = [self._expert(uid, samples[i]) for uid in live]
            rows.append(sum(w * out for w, out in zip(weights, outs, strict=True)))
        return torch.stack(rows)  # type: ignore[arg-type]

    def _expert(self, uid: Uid, x: Tensor) -> Tensor:
        return self.network.experts[uid](x.detach() if ("backward", uid) in self.dead else x)  # type: ignore[no-any-return]


def compare(run: RunFile, network: NearExperts, dead: set[tuple[str, Uid]] = frozenset()) -> TrunkMicrobatch:  # type: ignore[assignment]
    stage, flight = flown(run, network)
    plain = Plain(run, network, dead)
    loss, balance = plain.loss(*text())
    expected = torch.autograd.grad(loss + balance, list(plain.named.values()))
    stage.land(0, MB, flight)
    assert flight.loss_sum == pytest.approx(float(loss.detach()), rel=1e-6)
    found = stage.trunk.layout.views(stage.trunk.gradient())
    for name, mine, theirs in zip(plain.named, found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return flight


@pytest.mark.parametrize(
    "experts",
    [
        EXPERTS,
        msgspec.structs.replace(EXPERTS, layers=1),
        msgspec.structs.replace(EXPERTS, grid=[5], top_k=2, balance=0.0),
        msgspec.structs.replace(EXPERTS, grid=[2, 2, 2], layers=2),
        msgspec.structs.replace(EXPERTS, input=[8, 16], grid=[2, 3]),
        msgspec.structs.replace(EXPERTS, max_batch=3),
    ],
    ids=["all layers", "the last layer", "one dimension", "three dimensions", "whole texts", "small calls"],
)
def test_loss_and_gradients_are_those_of_one_plain_model(experts: ExpertsSection) -> None:
    run = run_with(experts)
    compare(run, NearExperts(run))


def test_an_expert_that_never_answers_leaves_the_mean_and_one_that_fails_the_backward_is_a_constant() -> None:
    run = run_with()
    network = NearExperts(run)
    silent = {("forward", Uid(1, (c, d))) for c, d in ((0, 1), (2, 3))}
    deaf = {("backward", Uid(layer, (1, d))) for layer in range(3) for d in range(4)}
    network.spoil = lambda verb, ask, reply: None if (verb, ask.uid) in silent | deaf else reply
    compare(run, network, silent | deaf)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda rows: torch.full((rows, 16), torch.nan), "not finite"),
        (lambda rows: torch.zeros(rows + 1, 16), "expected"),
        (lambda rows: torch.zeros(rows, 15), "expected"),
        (lambda rows: torch.zeros(rows, 16, dtype=torch.float64), "expected"),
    ],
    ids=["nan", "rows", "width", "dtype"],
)
def test_an_answer_that_cannot_be_used_counts_as_none_and_its_host_is_named(answer: Any, reason: str) -> None:
    run = run_with()
    network = NearExperts(run)
    bad = Uid(0, (1, 1))

    def spoil(verb: str, ask: ExpertCall, reply: ExpertReply) -> ExpertReply:
        return with_values(reply, answer(len(ask.samples))) if ask.uid == bad and verb == "forward" else reply

    network.spoil = spoil
    flight = compare(run, network, {("forward", bad)})
    assert len(flight.wrong) == 1
    assert "0.1.1" in flight.wrong[0]
    assert "perthost" in flight.wrong[0]


def with_values(reply: ExpertReply, tensor: Tensor) -> ExpertReply:
    return ExpertReply(to_frame(tensor), reply.served, reply.stale)


def test_a_sample_whose_answers_are_all_of_no_use_has_too_few_experts() -> None:
    run = run_with(msgspec.structs.replace(EXPERTS, k_min=3))
    network = NearExperts(run)
    network.spoil = lambda verb, ask, reply: (
        with_values(reply, torch.full((len(ask.samples), 16), torch.inf)) if ask.uid.layer == 1 else reply
    )
    with pytest.raises(TooFewExperts, match=r"has 0 answers and needs 3; experts asked: 1\..*not finite.*perthost"):
        flown(run, network)


def test_the_loss_of_a_flight_that_is_judged_is_the_same_and_updates_no_expert() -> None:
    run = run_with()
    network = NearExperts(run)
    _, trained = flown(run, network)
    updates = network.updates.total()
    judged = TrunkStage(run, "cpu").flight(None, *text())
    trio.run(there, judged, network)
    assert judged.loss() == pytest.approx(trained.loss_sum, rel=1e-6)
    assert network.updates.total() == updates


@pytest.mark.parametrize(("dtype", "code", "off"), [("bfloat16", "none", 0.02), ("float32", "int8", 0.05)])
def test_codes_change_the_loss_a_little_and_no_more(dtype: Any, code: Any, off: float) -> None:
    exact = flown(run_with(), NearExperts(run_with()))[1].loss_sum
    run = run_with(msgspec.structs.replace(EXPERTS, dtype=dtype, code=code))
    network = NearExperts(run)
    network.experts = {
        uid: expert.to(torch.bfloat16 if dtype == "bfloat16" else None) for uid, expert in network.experts.items()
    }
    assert flown(run, network)[1].loss_sum == pytest.approx(exact, abs=off)


# --- the sum and its step -------------------------------------------------------------------------------------------


def test_a_microbatch_counts_once_and_the_sum_is_that_of_all() -> None:
    run = run_with()
    network = NearExperts(run)
    stage = TrunkStage(run, "cpu")
    flights = [stage.flight(0, *text(seed)) for seed in range(2)]
    for flight in flights:
        trio.run(fly, flight, network)
    stage.land(0, MB, flights[0])
    alone = stage.vector()
    stage.land(0, MB, flights[0])
    assert (stage.vector() == alone).all()
    stage.land(0, Mb("trainer", 2), flights[1])
    assert stage.held == [MB, Mb("trainer", 2)]
    assert (stage.vector() != alone).any()


def test_what_must_not_count_makes_all_of_it_be_flown_anew() -> None:
    stage, flight = flown(run_with(), NearExperts(run_with()))
    other = Mb("trainer", 2)
    stage.land(0, MB, flight)
    stage.land(0, other, flight)
    assert stage.keep_only(0, [MB, other]) == []
    assert stage.keep_only(0, [MB, Mb("trainer", 3)]) == [Mb("trainer", 3)]
    assert stage.held == [MB, other]  # nothing was changed
    assert stage.keep_only(0, [MB]) == [MB]
    assert stage.held == []
    assert not stage.vector().any()


def test_a_flight_lands_in_no_step_but_its_own() -> None:
    stage, flight = flown(run_with(), NearExperts(run_with()))
    stage.commit(0, stage.vector(), 4)
    with pytest.raises(Stale):
        stage.land(0, MB, flight)
    with pytest.raises(Stale):
        stage.land(1, MB, flight)
    with pytest.raises(Stale):
        stage.flight(0, *text())


def test_a_flight_whose_parameters_went_elsewhere_ends() -> None:
    run = run_with()
    network = NearExperts(run)
    stage = TrunkStage(run, "cpu")
    flight = stage.flight(0, *text())
    trio.run(there, flight, network)
    stage.load(stage.state())
    with pytest.raises(Stale):
        flight.turn()


def test_in_a_delayed_run_a_flight_that_sees_a_step_is_computed_with_the_parameters_that_it_began_with() -> None:
    run = run_with(optimizer=OptimizerSection(name="sgd", lr=0.1, delayed=True))
    network = NearExperts(run)
    stage, flight = TrunkStage(run, "cpu"), None
    straight = stage.flight(1, *text())
    trio.run(fly, straight, network)
    flight = stage.flight(1, *text())
    trio.run(there, flight, network)
    stage.land(0, MB, straight)
    stage.commit(0, stage.vector(), 4)

    async def back() -> None:
        asks: Any = flight.turn()
        while asks is not None:
            asks = flight.go_back(await network.backward(asks))

    trio.run(back)
    assert flight.loss_sum == straight.loss_sum
    assert all(torch.equal(flight.gradients[i], straight.gradients[i]) for i in straight.gradients)
    stage.land(1, MB, flight)
    assert stage.held == [MB]


def test_activations_that_are_not_finite_are_sent_to_nobody() -> None:
    run = run_with()
    network = NearExperts(run)
    stage = TrunkStage(run, "cpu")
    state = stage.state()
    stage.trunk._flat.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        trio.run(fly, stage.flight(0, *text()), network)
    assert not network.calls
    stage.load(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelSection(kind="own:layers")}, "peerd.DMoE"),
        ({"experts": ExpertsSection(layers=4)}, "up to 3 layers"),
        ({"experts": ExpertsSection(input=[7])}, r"experts.input is \[7\]"),
        ({"experts": ExpertsSection(block="a:b", input=[16], output=[8, 16])}, "experts.output"),
        ({"experts": None}, "no experts"),
    ],
)
def test_a_run_that_it_cannot_compute_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrunkStage(run_with(**changes), "cpu")
