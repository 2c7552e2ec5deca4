"""A post whose memory is short for activations computes layers again, says so, and keeps the bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio

from peerd.codec.tensors import state_digest
from peerd.core.decoders import convert
from peerd.log import EventLog
from peerd.model.stage import footprint as footprint_file
from peerd.model.stage.served_stage import ServedStage
from peerd.pipeline.stage.post_state import PostState
from peerd.run.runfile import RunFile
from peerd.swarm.roster import START
from tests.worlds.simulation.clock import SimClock

HELD_BYTES = 1_000_000_000  # by the process, as the tests have it
pytestmark = pytest.mark.no_watchdog("computes on the loop")
SHORT_GB = (HELD_BYTES + 30_000_000) / 1e9  # the stage takes 9 MB, its activations 40 MB, or 7 MB computed again
SIZES = {"d_model": 64, "heads": 2, "layers": 6, "context": 64}
BATCH, STEPS = 16, 2

OWN_LAYERS = """
import torch
from torch import nn
from torch.nn import functional

class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 10 * width), nn.Linear(10 * width, width)

    def forward(self, x):
        %s
        return x + self.down(functional.gelu(self.up(x)))

def layers(run):
    width = run.model.d_model
    return [nn.Embedding(256, width), *(Mix(width) for _ in range(5)), nn.Linear(width, 256)]
"""


class AtOnce:
    """A worker that computes at once."""

    async def run(self, job: Callable[[], Any], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        return job()


@pytest.fixture(autouse=True)
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_file, "_held_bytes", lambda: HELD_BYTES)


def run(memory_gb: float, sections: dict[str, Any] | None = None, **model: Any) -> RunFile:
    return convert(
        {
            "run": "short",
            "model": SIZES | model,
            "pipeline": {"stages": 1, "microbatch": BATCH},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "batch": {"target_samples": BATCH},
            "limits": {"memory_gb": memory_gb},
        }
        | (sections or {}),
        RunFile,
    )


async def built(run: RunFile) -> tuple[PostState, list[str]]:
    """A post's state on stage 0, and the names of what its log has."""
    log = EventLog(SimClock(1, "post"))
    ctx: Any = SimpleNamespace(run=run, device="cpu", log=log, worker=lambda device: AtOnce())
    state = PostState(ctx, 0, saving=SimpleNamespace(positions=[]))  # type: ignore[arg-type]
    await state.build()
    return state, [str(event["name"]) for event in log.recent()]


def trained(stage: ServedStage) -> tuple[bytes, int]:
    """The digest of the state after some steps, and the bytes that a microbatch kept for its backward."""
    numbers = torch.Generator().manual_seed(1)
    module = stage.module
    for _ in range(STEPS):
        tokens = torch.randint(256, (BATCH, SIZES["context"] + 1), generator=numbers)
        module.backward(tokens[:, :-1], tokens[:, 1:])
        module.apply(module.gradient(), BATCH)
    return state_digest(module.state()), module.activation_bytes - module.layout.count * 4


@pytest.mark.slow
async def test_layers_are_computed_again_where_memory_is_short_with_the_same_bits() -> None:
    (short, told), (roomy, told_roomy) = await built(run(SHORT_GB)), await built(run(0))
    assert (short.recomputes, told) == (True, ["stage.recomputes"])
    assert (roomy.recomputes, told_roomy) == (False, [])
    (digest, kept_bytes), (expected, most_bytes) = trained(short.served), trained(roomy.served)
    assert digest == expected
    assert kept_bytes < 0.25 * most_bytes
    await short.load_saved(START)  # builds the stage anew
    assert short.recomputes
    assert trained(short.served) == (digest, kept_bytes)


async def test_a_user_who_says_no_is_obeyed() -> None:
    state, told = await built(run(SHORT_GB, {"limits": {"memory_gb": SHORT_GB, "recompute": False}}))
    assert (state.recomputes, told) == (False, [])


async def test_a_trunk_goes_from_segment_to_segment_whatever_the_memory() -> None:
    experts = {"experts": {"grid": [2, 2], "layers": 6, "hidden": 8}, "limits": {"recompute": True}}
    state, told = await built(run(0, experts))
    assert (state.recomputes, told) == (False, [])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a file with layers of one's own, which do so in a forward; returns model.kind."""
    monkeypatch.chdir(tmp_path)

    def write(forward: str) -> str:
        (tmp_path / "own_layers.py").write_text(OWN_LAYERS % forward)
        return "own_layers.py:layers"

    return write


@pytest.mark.slow
async def test_layers_of_ones_own_are_computed_again_where_memory_is_short(own: Callable[[str], str]) -> None:
    kind = own("pass")
    (short, told), (roomy, _) = await built(run(SHORT_GB, kind=kind)), await built(run(0, kind=kind))
    assert (short.recomputes, roomy.recomputes, told) == (True, False, ["stage.recomputes"])
    (digest, kept_bytes), (expected, most_bytes) = trained(short.served), trained(roomy.served)
    assert digest == expected
    assert kept_bytes < 0.5 * most_bytes


async def test_where_own_layers_cannot_be_measured_the_log_says_so_and_the_stage_is_built(
    own: Callable[[str], str],
) -> None:
    state, told = await built(run(0, kind=own("assert len(x) == 16, 'only whole microbatches'")))
    assert (state.built, state.recomputes, told) == (True, False, ["stage.activations_unknown"])
