"""The activations that are foretold for a gpt are those that torch saves."""

from __future__ import annotations

import pytest
import torch

from peerd.core.decoders import convert
from peerd.model.stage.footprint import footprint, recomputes
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import RunFile


def run(stages: int, limits: dict[str, object] | None = None, **model: object) -> RunFile:
    sizes = {"d_model": 64, "heads": 2, "layers": 6, "context": 64} | model
    pipeline = {"stages": stages, "microbatch": 2}
    return convert({"run": "x", "model": sizes, "pipeline": pipeline, "limits": limits or {}}, RunFile)


def saved_bytes(run: RunFile, stage: int, again: bool) -> int:
    module = StageModule(run, stage)
    if again:
        module.recompute()
    tokens = torch.zeros(2, run.model.context, dtype=torch.int64)
    values = torch.ones(2, run.model.context, run.model.d_model)
    module.backward(tokens if module.first else values, tokens if module.last else values)
    return module.activation_bytes - module.layout.count * 4


@pytest.mark.parametrize(
    "model",
    [
        *({}, {"d_model": 128, "heads": 8}, {"context": 256}, {"share_layers": True}, {"layers": 12}),
        *({"precision": "bf16"}, {"precision": "bf16", "d_model": 128}, {"precision": "fp16", "context": 256}),
        {"precision": "bf16", "share_layers": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_foretold_is_what_torch_saves(stages: int, model: dict[str, object]) -> None:
    for stage in range(stages):
        found = run(stages, **model)
        expected = footprint(found, stage)
        head = 2 * 2 * 256 * found.model.context * 4 if stage == stages - 1 else 0  # what its backward takes
        assert saved_bytes(found, stage, False) == pytest.approx(expected.activations.kept - head, rel=0.1)
        if stage < stages - 1 and found.precision == "full":  # else copies of matrices come and go unseen
            assert saved_bytes(found, stage, True) == pytest.approx(expected.activations.recomputed, rel=0.1)


def test_in_sixteen_bits_a_large_microbatch_takes_less_and_a_small_one_more() -> None:
    """Copies of the matrices come on top, however small the microbatch."""
    kept = {
        (precision, context): footprint(run(1, d_model=256, context=context, precision=precision), 0).activations.kept
        for precision in ("full", "bf16")
        for context in (4, 512)
    }
    assert kept["bf16", 512] < 0.75 * kept["full", 512]
    assert kept["bf16", 4] > 2 * kept["full", 4]


def test_ones_own_precision_counts_and_not_the_runs() -> None:
    own, shared = run(1, {"precision": "bf16"}), run(1, precision="bf16")
    assert footprint(own, 0) == footprint(shared, 0) != footprint(run(1), 0)


def test_layers_are_computed_again_where_memory_is_short_or_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not recomputes(run(1), 0, "cpu")
    assert recomputes(run(1, {"recompute": True}), 0, "cpu")
    small = run(1, {"memory_gb": 0.001})
    assert recomputes(small, 0, "cpu")
    assert not recomputes(run(1, {"memory_gb": 0.001, "recompute": False}), 0, "cpu")


def test_the_estimate_follows_the_choice() -> None:
    plain, again = footprint(run(1), 0), footprint(run(1, {"recompute": True}), 0)
    assert sum(plain.on("cpu")) - sum(again.on("cpu")) == plain.activations.kept - plain.activations.recomputed > 0
    assert plain.on("cpu", least=True) == again.on("cpu")
    assert plain.on("cuda") == (plain.device_bytes + plain.activations.kept, plain.machine_bytes)
