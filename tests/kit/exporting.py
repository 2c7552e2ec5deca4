"""Checkpoints as a run's peers leave them, with settings beside them, for tests of what is exported from them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import safetensors
import torch

from peerd.model.checkpoint import Checkpoints
from peerd.model.run_record import write_record
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, PipelineSection, RunFile, fingerprint

MODEL = ModelSection(d_model=16, heads=2, layers=4, context=12)


def make_run(stages: int = 1, **model: object) -> RunFile:
    section = msgspec.structs.replace(MODEL, **model)
    return RunFile(run="out", model=section, pipeline=PipelineSection(stages=stages, microbatch=2))


def stages_of(run: RunFile) -> list[StageModule]:
    """The stages of a run at step 3, with parameters that no run starts with and that make no token certain."""
    stages = [StageModule(run, stage) for stage in range(run.pipeline.stages)]
    generator = torch.Generator().manual_seed(5)
    for stage in stages:
        state = stage.state()
        for name, tensor in state.items():
            if name.startswith("param/"):
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.add_((0.3 * noise).to(tensor.dtype))
        stage.load_state(state | {"step": torch.tensor(3)})
    return stages


def save(
    peer: Path, run: RunFile, stage: StageModule, steps: Sequence[int], lineage: str = "aa", record: bool = True
) -> Path:
    """What a stage peer with the data directory `peer` has saved of `steps`; gives its folder of checkpoints."""
    above = peer / "stage" / "checkpoints" / run.run
    if record:
        write_record(above, run, fingerprint(run))
    folder = above / f"stage-{stage.stage}"
    for step in steps:
        state = stage.state() | {"step": torch.tensor(step)}
        Checkpoints(folder, 9, fingerprint(run), stage.stage).save(step, state, {"lineage": lineage})
    return folder


def save_all(root: Path, run: RunFile, steps: Sequence[int] = (3,)) -> list[StageModule]:
    """One peer for each stage of `run`, below `root`."""
    stages = stages_of(run)
    for stage in stages:
        save(root / f"peer-{stage.stage}", run, stage, steps)
    return stages


def logits(stages: Sequence[StageModule], tokens: torch.Tensor) -> torch.Tensor:
    """What the stages compute together, as in training."""
    x = tokens
    for stage in stages:
        x = stage.forward(x)
    return x


# No site-packages but those of torch and safetensors, no environment, no working directory.
ALONE = """
import json, sys, traceback
sys.path[:0] = json.loads(sys.argv[1])
try:
    import peerd
except ImportError:
    pass
else:
    sys.exit("peerd can be imported")
from pathlib import Path
import torch
torch.set_num_threads(1)
def answer(folder, tokens):
    sys.path.insert(0, folder)
    try:
        import model
        gpt, encode, decode = model.load(Path(folder))
        with torch.no_grad():
            logits = gpt(torch.tensor(tokens))
        text = decode(list(model.generate(gpt, encode("ab ba"), 30, temperature=0.9, top_k=20, seed=4)))
        return logits.tolist(), text
    except Exception:
        return None, traceback.format_exc()
    finally:
        sys.path.remove(folder)
        sys.modules.pop("model", None)
for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)
"""

Alone = Callable[[Path, torch.Tensor], tuple[torch.Tensor, str]]


@contextmanager
def process_without_peerd() -> Iterator[Alone]:
    """A process that has no peerd, asked for the logits and the text of a folder's `model.py`."""
    places = sorted({str(Path(package.__file__ or "").parent.parent) for package in (torch, safetensors)})
    command = [sys.executable, "-I", "-S", "-c", ALONE, json.dumps(places)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def ask(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
            requests.write(json.dumps([str(folder), tokens.tolist()]) + "\n")
            requests.flush()
            line = answers.readline()
            assert line, "the process has ended; its standard error says why"
            found, text = json.loads(line)
            assert found is not None, text
            return torch.tensor(found, dtype=torch.float64), text

        yield ask
