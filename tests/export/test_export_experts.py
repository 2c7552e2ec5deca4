"""Export of a run with experts: trunk and newest whole checkpoint of each expert compute what training computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peerd.cli.export import saved_experts
from peerd.core.errors import ConfigError
from peerd.experts.calls.vault_disk import VaultDisk, digests_of
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.model.trunk import TrunkModule
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.export.experts import ExportedExperts, fault_of
from peerd.export.export import Exported, ExportRequest, export
from peerd.export.folder import CONFIG, read_config
from peerd.export.loaded_model import SamplingOptions, load_export, write_text
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile
from tests.kit.exporting import Alone, make_run, save
from tests.kit.local_experts import LocalExperts
from tests.worlds.roles.expertpeers import pointer_to

EXPERTS = ExpertsSection(block="ffn", hidden=12, grid=[2, 3], top_k=3, layers=2, k_min=1)


def run_with(**section: Any) -> RunFile:
    """Four blocks, of which the last two have experts."""
    return msgspec.structs.replace(make_run(), experts=msgspec.structs.replace(EXPERTS, **section))


class Swarm:
    """A trainer's trunk and all experts of a run, with weights that nobody starts with, and what is saved of them."""

    def __init__(self, run: RunFile, root: Path) -> None:
        self.run, self.root, self.grid = run, root, grid_of(run)
        self._generator = torch.Generator().manual_seed(7)
        self.trunk = TrunkModule(run)
        self.trunk.load_state(self._moved(self.trunk.state()) | {"step": torch.tensor(3)})
        save(root / "trainer", run, self.trunk, [3])
        self.local = LocalExperts(run)
        self.uids = [self.grid.uid(n) for n in range(self.grid.layers * self.grid.places)]

    def _moved(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: torch.randn(tensor.shape, generator=self._generator) for name, tensor in state.items()}
        return {name: t + 0.3 * found[name] if name.startswith("param/") else t for name, t in state.items()}

    def keep(self, uid: Uid, version: int, holder: str = "host", generation: int = 0) -> Path:
        """A checkpoint of an expert on a holder's disk, other than the one before; the expert is as it says."""
        import safetensors.torch

        expert = self.local.expert(uid)
        state = self._moved(safetensors.torch.load(expert.snapshot())) | {"version": torch.tensor(version)}
        data = safetensors.torch.save(state)
        expert.load(data)
        folder = self.root / holder / "vault"
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.iterdir())
        pointer = pointer_to(data, holder, self.run, uid, version=version, generation=generation)
        VaultDisk(folder).write(pointer, digests_of(data), data)
        (path,) = set(folder.iterdir()) - before
        return path

    def exported(self, out: str = "out") -> Exported:
        return export(ExportRequest(root=self.root, out=self.root.parent / out, experts=saved_experts))

    def loss(self, tokens: Tensor, targets: Tensor) -> float:
        """The sum over samples, as a trainer computes it."""
        flight = TrunkMicrobatch(self.trunk, tokens, targets, None)
        scores = flight.depart()
        while scores is not None:
            asks = flight.ask(self.local.choose(flight.layer, scores, EXPERTS.top_k))
            scores = flight.go_on(self.local.forward(asks, flight.samples))
        return flight.loss()


def text(run: RunFile) -> tuple[Tensor, Tensor]:
    found = torch.randint(256, (3, run.model.context + 1), generator=torch.Generator().manual_seed(2))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> float:
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")) / targets.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["ffn", "ffn1"])
def test_the_torch_files_alone_compute_what_trunk_and_experts_compute(block: str, tmp_path: Path, alone: Alone) -> None:
    swarm = Swarm(run_with(block=block), tmp_path / "peers")
    for uid in swarm.uids:
        swarm.keep(uid, 4)
    made = swarm.exported()
    tokens, targets = text(swarm.run)
    logits, written = alone(tmp_path / "out", tokens)
    expected = swarm.loss(tokens, targets)
    assert loss_of(logits.float(), targets) == pytest.approx(expected, rel=1e-6)
    loaded = load_export(tmp_path / "out")
    assert torch.allclose(loaded.model(tokens).double(), logits, atol=1e-6)
    style = SamplingOptions(temperature=0.9, top_k=20, seed=4)
    assert written == "".join(write_text(loaded.model, loaded.vocab, "ab ba", 30, style))
    assert made.notes == []
    assert made.config.experts == read_config(tmp_path / "out").experts


def test_of_each_expert_the_newest_whole_checkpoint_counts_whoever_keeps_it(tmp_path: Path) -> None:
    swarm = Swarm(run_with(), tmp_path / "peers")
    older, torn, newer = swarm.uids[:3]
    for uid in swarm.uids:
        swarm.keep(uid, 4)
    swarm.keep(newer, 9, holder="backbone")
    swarm.keep(older, 2, holder="adopter", generation=1)  # fewer updates, of a later host
    whole = swarm.local.expert(torn).snapshot()
    path = swarm.keep(torn, 8, holder="backbone")
    swarm.local.expert(torn).load(whole)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    made = swarm.exported()
    assert made.notes == [f"left out: {path} is damaged: its bytes are not those of its digests"]
    tokens, targets = text(swarm.run)
    assert loss_of(load_export(tmp_path / "out").model(tokens), targets) == pytest.approx(
        swarm.loss(tokens, targets), rel=1e-6
    )


@pytest.mark.slow
def test_experts_without_a_checkpoint_are_named_and_never_chosen(tmp_path: Path, alone: Alone) -> None:
    swarm = Swarm(run_with(), tmp_path / "peers")
    swarm.local.dead = {Uid(0, (0, 1)), Uid(1, (1, 2)), *(Uid(1, (0, at)) for at in range(3))}
    for uid in swarm.uids:
        if uid not in swarm.local.dead:
            swarm.keep(uid, 4)
    made = swarm.exported()
    assert made.notes == ["no checkpoint of 5 of 12 experts: 0.0.1, 1.0.0, 1.0.1, 1.0.2, 1.1.2"]
    tokens, targets = text(swarm.run)
    logits, _ = alone(tmp_path / "out", tokens)
    assert loss_of(logits.float(), targets) == pytest.approx(swarm.loss(tokens, targets), rel=1e-6)


def test_a_folder_without_the_experts_of_a_layer_is_one_sentence(tmp_path: Path) -> None:
    swarm = Swarm(run_with(), tmp_path / "peers")
    for uid in swarm.uids[: swarm.grid.places]:
        swarm.keep(uid, 4)
    with pytest.raises(ConfigError, match=r"contains no checkpoint of an expert of layer 1 of run 'out'; use a folder"):
        swarm.exported()
    assert not (tmp_path / "out").exists()


def test_a_block_that_looks_at_whole_texts_is_not_exported(tmp_path: Path) -> None:
    swarm = Swarm(run_with(block="transformer", hidden=0, heads=2), tmp_path / "peers")
    with pytest.raises(ConfigError, match="is transformer; allowed for an export: ffn or ffn1"):
        swarm.exported()


def test_experts_of_another_run_or_block_are_left_out(tmp_path: Path) -> None:
    swarm = Swarm(run_with(), tmp_path / "peers")
    for uid in swarm.uids:
        swarm.keep(uid, 4)
    stranger = HostedExpert(run_with(hidden=20), swarm.uids[0]).snapshot()
    disk = VaultDisk(tmp_path / "peers" / "host" / "vault")
    wrong = pointer_to(stranger, "host", swarm.run, swarm.uids[0], version=50)
    foreign = pointer_to(stranger, "host", run_with(hidden=20), swarm.uids[0], version=60)
    for pointer in (wrong, foreign):
        disk.write(pointer, digests_of(stranger), stranger)
    (note,) = swarm.exported().notes
    assert note.endswith("has another block than the run")


GOOD = ExportedExperts(first=2, block="ffn", hidden=12, grid=[2, 3], top_k=3, missing=["1.0.1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": []}, "experts.grid"),
        ({"grid": [1 << 20]}, "experts.grid"),
        ({"grid": [2, 0]}, "experts.grid"),
        ({"first": 4}, "experts.first"),
        ({"first": -1}, "experts.first"),
        ({"hidden": 0}, "experts.hidden"),
        ({"top_k": 0}, "experts.hidden or experts.top_k"),
        ({"missing": ["1.0"]}, "is not in the grid"),
        ({"missing": ["2.0.0"]}, "is not in the grid"),
        ({"missing": ["../x"]}, "is not the name of an expert"),
        ({"missing": [f"0.{a}.{b}" for a in range(2) for b in range(3)]}, "layer 0 has no expert"),
    ],
)
def test_senseless_values_in_a_config_are_named(change: dict[str, Any], message: str) -> None:
    assert fault_of(GOOD, 4) is None
    assert message in (fault_of(msgspec.structs.replace(GOOD, **change), 4) or "")


def test_a_config_that_claims_other_experts_than_there_are_is_refused(tmp_path: Path) -> None:
    swarm = Swarm(run_with(), tmp_path / "peers")
    for uid in swarm.uids:
        swarm.keep(uid, 4)
    swarm.exported()
    path = tmp_path / "out" / CONFIG
    told = msgspec.json.decode(path.read_bytes())
    told["experts"]["missing"] = ["0.0.1"]
    path.write_bytes(msgspec.json.encode(told))
    with pytest.raises(ConfigError, match=r"does not fit the model: blocks\.2\.mlp\.experts\.0-1"):
        load_export(tmp_path / "out")
