"""Parameters in the machine's memory: the bits of parameters on the device, and copies of two layers at most."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from peerd.cli.doctor.check_result import CheckVerdict
from peerd.cli.doctor.run_checks import RunNeeds, run_checks
from peerd.cli.plan.size_report import size_object
from peerd.codec.frames import to_frame
from peerd.codec.gpu import wake
from peerd.core.decoders import convert
from peerd.messages.swarm import Mb
from peerd.model.shapes.model_size import stage_sizes
from peerd.model.stage import offload
from peerd.model.stage.footprint import footprint, lacking, recomputes
from peerd.model.stage.offload import ParameterOffload, offloads
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import RunFile, fingerprint
from tests.kit.normed import write_normed

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TIED = """
import torch
from torch import nn

class Rows(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.order = nn.LSTM(width, width, batch_first=True)

    def forward(self, tokens):
        return self.order(self.table(tokens))[0]

class Scores(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = rows.table.weight

    def forward(self, x):
        return self.norm(x) @ self.weight.T

def layers(run):
    width = run.model.d_model
    rows, twice = Rows(width), nn.Linear(width, width)
    return [rows, twice, nn.Tanh(), twice, nn.LayerNorm(width), Scores(rows, width)]
"""


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with memory of its own: copies are made."""
    monkeypatch.setattr(offload, "has_own_memory", lambda device: True)


def make(stages: int = 1, offload: bool = False, **sections: Any) -> RunFile:
    model = {"d_model": 32, "heads": 2, "layers": 6, "context": 16} | sections.pop("model", {})
    limits = {"offload": offload} | sections.pop("limits", {})
    pipeline = {"stages": stages, "microbatch": 2}
    return convert({"run": "far", "model": model, "pipeline": pipeline, "limits": limits, **sections}, RunFile)


def microbatch(stage: StageModule, seed: int) -> tuple[Tensor, Tensor]:
    """Input, and targets or output gradient."""
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (2, 16), generator=numbers)
    x, gradient = (torch.randn(2, 16, stage.run.model.d_model, generator=numbers, dtype=stage.dtype) for _ in range(2))
    return (tokens if stage.first else x), (tokens if stage.last else gradient)


def results(stage: StageModule, keeps: bool = True, steps: int = 3) -> Iterator[Tensor]:
    """All that comes out of a stage in some steps: outputs, losses, gradients, sums, and its state at the end."""
    for step in range(steps):
        for seed in range(3):
            x, target = microbatch(stage, 10 * step + seed)
            yield stage.forward(x, training=True).clone()
            graph = stage.forward_for_backward(x) if keeps and stage.keeps_graphs else None
            gradient, loss_sum = stage.backward(x, target, graph=graph)
            yield torch.tensor(loss_sum)
            if gradient is not None:
                yield gradient
            if stage.last:
                yield torch.tensor(stage.loss(x, target))
        yield stage.gradient().clone()
        stage.apply(stage.gradient().cpu(), samples=6)
    yield from stage.state().values()


def assert_same_bits(found: Iterator[Tensor], expected: Iterator[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.device == other.device
        assert torch.equal(one, other), f"result {number} differs"


def assert_offloading_changes_nothing(stages: int, stage: int, keeps: bool = True, **sections: Any) -> None:
    plain = StageModule(make(stages, **sections), stage)
    offloaded = StageModule(make(stages, offload=True, **sections), stage)
    assert offloaded._offload is not None
    assert_same_bits(results(offloaded, keeps), results(plain, keeps))


@pytest.mark.parametrize(("stages", "stage"), [(1, 0), (2, 0), (3, 1), (2, 1)])
@pytest.mark.parametrize(
    "model", [{}, {"share_layers": True}, {"dtype": "float64"}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str
)
def test_the_bits_are_those_of_parameters_on_the_device(
    forced: None, stages: int, stage: int, model: dict[str, object]
) -> None:
    assert_offloading_changes_nothing(stages, stage, model=model, optimizer={"lr": 0.01, "clip_norm": 1.0})


def test_a_graph_that_is_kept_changes_no_bit(forced: None) -> None:
    kept, again = (StageModule(make(3, offload=True), 1) for _ in range(2))
    assert kept.keeps_graphs
    assert_same_bits(results(kept, keeps=True), results(again, keeps=False))


def test_layers_of_ones_own_may_have_weights_in_common(
    forced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    monkeypatch.chdir(tmp_path)
    assert_offloading_changes_nothing(1, 0, model={"kind": "tied.py:layers"})


# --- the sums of a stage that is served --------------------------------------------------------------------------


def train(stage: ServedStage, step: int, seq: int) -> None:
    pair = microbatch(stage.module, seq)
    stage.backward(step, Mb("a", seq), pair, [to_frame(part) for part in pair])


def served(run: RunFile, stage: int) -> Iterator[Tensor]:
    """Steps with microbatches that are early, and one that must not count: the sum is made anew of the others."""
    model = ServedStage(run, stage, "cpu")
    for step in range(3):
        train(model, step, 10 * step)
        train(model, step, 10 * step + 1)
        if model.module.ahead:
            train(model, step + 1, 10 * step + 10)
        assert model.keep_only(step, [mb for mb in model.held if mb.seq != 10 * step + 1]) == []
        if model.module.ahead:
            train(model, step + 1, 10 * step + 12)
        assert model.unusable(step) == []
        total = model.vector()
        yield torch.from_numpy(np.array(total))
        model.commit(step, total, 4)
    assert model.is_finite()
    yield from model.state().values()


@pytest.mark.parametrize("stage", [0, 1])
def test_delayed_steps_and_sums_that_are_made_anew_have_the_same_bits(forced: None, stage: int) -> None:
    sections: dict[str, Any] = {"optimizer": {"delayed": True, "lr": 0.01}}
    assert_same_bits(served(make(2, offload=True, **sections), stage), served(make(2, **sections), stage))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_move_once_a_microbatch(
    forced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: str
) -> None:
    kind = write_normed(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = {"kind": kind, "d_model": 8, "dtype": "float64", "buffers": buffers}
    far, near = (make(1, offload=wanted, model=model) for wanted in (True, False))
    assert_same_bits(served(far, 0), served(near, 0))
    assert_same_bits(results(StageModule(far, 0)), results(StageModule(near, 0)))


def test_a_state_moves_between_peers_with_and_without_it(forced: None) -> None:
    before, after = StageModule(make(2, offload=True), 0), StageModule(make(2), 0)
    straight = StageModule(make(2), 0)
    list(results(straight, steps=2))
    list(results(before, steps=2))
    assert before.digest() == straight.digest()
    after.load_state(before.state())
    before = StageModule(make(2, offload=True), 0)
    before.load_state(after.state())
    for stage in (before, after, straight):
        list(results(stage, steps=1))
    assert before.digest() == after.digest() == straight.digest()


# --- copies ------------------------------------------------------------------------------------------------------


class Copies:
    """The copies of one stage's layers that exist, by weak references to their memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._all: list[tuple[StorageWeakRef, int]] = []
        self.begun: list[int] = []  # layers, in the order in which their copies were begun
        self.most, self.most_bytes = 0, 0
        spot, begun = ParameterOffload._spot, ParameterOffload._begun

        def counted(own: ParameterOffload, run: Any) -> Tensor:
            found = spot(own, run)
            self._all.append((StorageWeakRef(found.untyped_storage()), found.nbytes))
            self.most, self.most_bytes = max(self.most, self.alive), max(self.most_bytes, self.alive_bytes)
            return found

        def numbered(own: ParameterOffload, number: int) -> Any:
            self.begun.append(number)
            return begun(own, number)

        monkeypatch.setattr(ParameterOffload, "_spot", counted)
        monkeypatch.setattr(ParameterOffload, "_begun", numbered)

    @property
    def alive(self) -> int:
        return sum(not memory.expired() for memory, _ in self._all)

    @property
    def alive_bytes(self) -> int:
        return sum(nbytes for memory, nbytes in self._all if not memory.expired())


@pytest.fixture
def copies(forced: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    gc.disable()  # copies go without its help
    try:
        yield Copies(monkeypatch)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("stages", "stage", "forward", "backward"),
    [
        # embed, block0 .. block5, head: the last one is not computed again, nor is the embedding
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7], [6, 5, 4, 3, 2, 1]),
        (2, 0, [0, 1, 2, 3], [3, 2, 1]),
        (3, 1, [0, 1], [1, 0]),
    ],
)
@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_at_most_two_layers_are_on_the_device_and_in_the_order_of_their_use(
    copies: Copies, stages: int, stage: int, forward: list[int], backward: list[int], precision: str
) -> None:
    found = StageModule(make(stages, offload=True, model={"precision": precision}), stage)
    x, target = microbatch(found, 1)
    found.forward(x)
    assert copies.begun == forward
    assert copies.alive == 0
    copies.begun.clear()
    found.backward(x, target)
    assert copies.begun == forward + backward
    assert (copies.alive, copies.most) == (0, 2)
    taken = footprint(found.run, stage)
    assert copies.most_bytes < taken.held("cuda")[0] < taken.device_bytes


def test_a_graph_that_is_kept_keeps_no_copy(copies: Copies) -> None:
    found = StageModule(make(2, offload=True), 0)
    x, target = microbatch(found, 1)
    graphs = [found.forward_for_backward(x) for _ in range(3)]
    assert (copies.alive, copies.most) == (0, 2)
    for graph in reversed(graphs):
        found.backward(x, target, graph=graph)
        assert (copies.alive, copies.most) == (0, 2)


def test_a_copy_begins_where_its_parameter_does_within_a_cache_line(forced: None) -> None:
    """A product of other places may sum in another order."""
    found = StageModule(make(1, offload=True, model={"d_model": 10, "heads": 1}), 0)
    assert found._offload is not None
    places = set()
    for number, block in enumerate(found._offload._blocks):
        for own, copy in zip(block.parameters, found._offload.on_device(number), strict=True):
            assert torch.equal(own, copy)
            assert own.data_ptr() % 64 == copy.data_ptr() % 64
            places.add(own.data_ptr() % 64)
    assert len(places) > 4


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_pass_that_fails_leaves_no_copy_and_the_next_one_is_right(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    found, plain = StageModule(make(1, offload=True), 0), StageModule(make(1), 0)
    x, target = microbatch(found, 1)
    through: Callable[..., Tensor] = ParameterOffload._through
    passes = {"forward": 1, "backward": 2}

    def fails(own: ParameterOffload, number: int, *arguments: Any) -> Tensor:
        if number == 3:
            passes[when] -= 1
            if passes[when] == 0:
                raise torch.OutOfMemoryError
        return through(own, number, *arguments)

    monkeypatch.setattr(ParameterOffload, "_through", fails)
    with pytest.raises(torch.OutOfMemoryError):
        found.backward(x, target)
    gc.collect()  # the error's frames
    assert copies.alive == 0
    found.apply(torch.ones(found.total.count))
    plain.apply(torch.ones(plain.total.count))
    assert_same_bits(results(found), results(plain))


# --- where it applies --------------------------------------------------------------------------------------------


def test_on_the_cpu_it_changes_nothing() -> None:
    run = make(2, offload=True)
    assert not offloads(run, "cpu")
    assert offloads(run, "cuda:1")
    assert not offloads(make(2), "cuda:1")
    assert StageModule(run, 0)._offload is None


@CUDA
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage", [0, 1])
def test_on_a_gpu_the_bits_are_those_of_parameters_there(dtype: str, stage: int) -> None:
    """In float64; in float32 attention on a GPU sums in no fixed order."""
    wake("cuda")
    sections: dict[str, Any] = {"model": {"dtype": dtype}, "optimizer": {"name": "sgd", "lr": 0.01, "offload": True}}
    near = StageModule(make(2, **sections), stage, "cuda")
    far = StageModule(make(2, offload=True, **sections), stage, "cuda")
    for number, (one, other) in enumerate(zip(results(far), results(near), strict=True)):
        if dtype == "float64":
            assert torch.equal(one.cpu(), other.cpu()), f"result {number} differs"
        else:
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-3, atol=1e-4)


@CUDA
def test_on_a_gpu_it_takes_what_is_foretold() -> None:
    wake("cuda")
    run = make(1, offload=True, model={"d_model": 1024, "heads": 16, "layers": 12})
    stage = StageModule(run, 0, "cuda")
    x, target = microbatch(stage, 1)
    stage.backward(x, target)
    torch.cuda.synchronize()
    idle = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stage.backward(x, target)
    most = torch.cuda.max_memory_allocated() - idle
    taken = footprint(run, 0)
    assert 0.3 * taken.on("cuda")[0] < most < 1.2 * taken.on("cuda")[0] < 0.3 * taken.device_bytes
    assert torch.cuda.memory_allocated() == idle


def test_of_a_stage_in_the_machines_memory_a_gpu_holds_a_few_layers() -> None:
    near, far = footprint(make(1), 0), footprint(make(1, offload=True), 0)
    layer = 4 * 12 * 32 * 32
    assert 3 * layer < far.held("cuda")[0] < 4 * layer
    assert sum(far.held("cuda")) - far.held("cuda")[0] == sum(near.held("cuda"))
    assert far.on("cuda")[0] == far.held("cuda")[0] + far.activations.recomputed
    assert far.on("cpu") == near.on("cpu")


def test_it_is_each_peers_own() -> None:
    assert fingerprint(make(1)) == fingerprint(make(1, offload=True))


def test_a_gpu_that_is_too_small_for_the_parameters_may_be_large_enough_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = footprint(make(1), 0), footprint(make(1, offload=True), 0)
    free = near.device_bytes // 2
    monkeypatch.setattr("peerd.model.stage.footprint.free_bytes", lambda _: (free, free))
    assert far.on("cuda", least=True)[0] < free
    assert lacking(far, "cuda") is None
    assert (lacking(near, "cuda") or "").endswith("GB are free (limits.offload needs less of it)")
    free = far.copies_bytes // 2
    assert (lacking(near, "cuda") or "").endswith("GB are free")
    assert recomputes(make(1, offload=True), 0, "cuda")


def test_doctor_and_plan_say_what_a_gpu_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("peerd.model.stage.footprint.free_bytes", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr("peerd.model.stage.footprint.psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    sizes = {"d_model": 512, "heads": 2, "layers": 24}
    run = make(1, offload=True, model=sizes)
    there, here = footprint(run, 0).on("cuda:0")
    told = {check.check: check for check in run_checks(RunNeeds(run, ("stage",), tmp_path, "cuda:0"))}["memory"]
    assert told.verdict == CheckVerdict.OK
    told_there = f"{(there + here) / 1e9:.1f} GB at most, of these {there / 1e6:.1f} MB on cuda:0"
    assert told_there in told.found
    near = make(1, model=sizes)
    told = {check.check: check for check in run_checks(RunNeeds(near, ("stage",), tmp_path, "cuda:0"))}["memory"]
    assert told.verdict == CheckVerdict.FAIL
    assert told.found.endswith("GB are free (limits.offload needs less of it)")
    planned = [size_object(wanted, stage_sizes(wanted, 256), 1e12)["stages"][0] for wanted in (run, near)]
    assert [one["device_memory_bytes"] for one in planned] == [
        footprint(wanted, 0).held("cuda")[0] for wanted in (run, near)
    ]
    assert planned[0]["device_memory_bytes"] < planned[1]["device_memory_bytes"] / 20
