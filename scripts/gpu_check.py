"""Checks one GPU: quantization, copies during computation, offload, exactness of a swarm on it, speed and memory.

    python scripts/gpu_check.py                     all checks on the first CUDA device, in at most eight minutes
    python scripts/gpu_check.py --device cpu        the same on the CPU, with a small model
    python scripts/gpu_check.py --only codes,copies
    python scripts/gpu_check.py --json              the report as one JSON object on the last line

Two stages of two replicas train in float64 and in float32, as separate processes on one device; their parameters are
compared with those of plain torch on the same device. A stage with `limits.offload` must compute the same as one
without it, bit for bit in float64, and use less of the device's memory. Speed and memory of two stages are compared
with those of plain torch with the same model and batch, but only reported. The exit code is 1 if a check fails.
Needs Linux, and peerd installed into an environment with torch (`pip install --no-deps -e .`).
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

import msgspec
import torch

from peerd.codec import frames
from peerd.codec.format.blockwise import CODES
from peerd.codec.kernels import ops, reference
from peerd.codec.policy import CodingPlan
from peerd.core.decoders import convert
from peerd.model.shapes.model_size import stage_sizes
from peerd.model.stage.footprint import footprint
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import LimitsSection, RunFile
from scripts.alike import CONTEXT, alike_run, difference, write_text
from scripts.check_report import add_json, data_folder, show
from scripts.plain_torch import PlainTraining, median_step_s
from scripts.process_swarm import ProcessSwarm, SwarmFailed
from scripts.process_usage import resident_bytes

PARTS: Final = ("codes", "copies", "offload", "exact", "speed")
MOST_S: Final = 480.0  # for all checks
STAGES: Final = 2
REPLICAS: Final = 2
EXACT_STEPS: Final = 10
EXACT: Final = {"float64": 1e-10, "float32": 1e-5}  # largest relative difference from plain torch
LENGTHS: Final = (1, 63, 64, 65, 4_097, 1_000_003)
MODELS: Final[dict[str, dict[str, int]]] = {
    "cuda": {"d_model": 1024, "heads": 16, "layers": 8, "context": 512},
    "cpu": {"d_model": 96, "heads": 3, "layers": 2, "context": 64},
}
MICROBATCHES: Final = 8
WARM_STEPS: Final = 3
VOCAB: Final = 256  # tokens are bytes


@dataclass(slots=True)
class DeviceSwarm(ProcessSwarm):
    """Two stages of some replicas on one device, which must finish until `deadline`."""

    deadline: float = field(kw_only=True)

    def wait_until_step(self, step: int) -> None:
        self.wait_for_step(step, max(0.0, min(240.0, self.deadline - time.monotonic())))


def run_file(text: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        **alike_run(text),
        "run": "gpu-check",
        "model": model,
        "pipeline": {"stages": STAGES, "microbatch": 4},
        "batch": {"target_samples": 4 * MICROBATCHES},
        "checkpoint": {"every_steps": 1, "keep": 4},  # peers leave one after another, and some reach a later step
        **sections,
    }


# --- codes and copies ---------------------------------------------------------------------------------------------


def codes(device: torch.device) -> dict[str, Any]:
    """Compare each code and dtype, at even and odd lengths, bit for bit with the reference on the CPU."""
    wrong = []
    for dtype in ops.DTYPES:
        for length in LENGTHS:
            values = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
            for code, how in CODES.items():
                expected = reference.quantize(values, code, how.block)
                found = ops.best(device).quantize(values.to(device), code, how.block)
                again = torch.empty(length, dtype=dtype, device=device)
                torch.ops.peerd.dequantize_blockwise.out(*found, code, how.block, out=again)
                back = reference.dequantize(*expected, code, how.block, torch.empty_like(values))
                same = all(torch.equal(f.cpu(), e) for f, e in zip((*found, again), (*expected, back), strict=True))
                wrong += [] if same else [f"{code} of {length} {dtype}"]
    return {"implementation": " ".join(ops.described(device)).strip(), "wrong": wrong}


def copies(device: torch.device) -> dict[str, Any]:
    """Encode and decode activations while the device computes, and compare the bytes with those of the CPU."""
    wrong, work = [], torch.randn(2048 if device.type == "cuda" else 128, device=device).outer
    for number in range(20):
        values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(number))
        plan = CodingPlan(("none", "int8", "dynamic8", "bf16")[number % 4], lossless=number % 8 >= 4)
        made = values.to(device) * 1.0  # still being computed when it is coded
        busy = work(torch.ones(2048 if device.type == "cuda" else 128, device=device))
        for _ in range(10):
            busy = busy @ busy * 1e-3
        frame, expected = frames.encode(made, plan), frames.encode(values, plan)
        same = bytes(frame.payload) == bytes(expected.payload)
        back = frames.decode(frame, device=device)
        same &= torch.equal(back.cpu(), frames.decode(expected))
        wrong += [] if same else [str(plan)]
    return {"wrong": wrong}


# --- parameters in the machine's memory ---------------------------------------------------------------------------


def offload(device: torch.device) -> dict[str, Any]:
    """Compare both stages with and without `limits.offload`: results, peak memory, and time of a backward pass."""
    size = MODELS[device.type if device.type in MODELS else "cuda"]
    sgd = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "offload": True}  # SGD does not amplify small differences
    wrong, figures = [], {}
    for dtype, most in EXACT.items():
        run = convert(run_file(Path(), size | {"dtype": dtype}, optimizer=sgd), RunFile)
        for stage in range(STAGES):
            near, far = (one_stage(run, stage, device, limits) for limits in ({"recompute": True}, {"offload": True}))
            apart = [relative(near.results[name], value) for name, value in far.results.items()]
            if max(apart) > (0.0 if dtype == "float64" else most):
                wrong.append(f"stage {stage} in {dtype}: {max(apart):.1e} apart")
            if near.peak_bytes and far.peak_bytes > near.peak_bytes:
                wrong.append(f"stage {stage} in {dtype}: {far.peak_bytes} bytes at most, {near.peak_bytes} without it")
            figures[f"stage {stage} {dtype}"] = {
                "peak_bytes": [far.peak_bytes, near.peak_bytes],
                "foretold_bytes": far.foretold_bytes,
                "backward_s": [far.backward_s, near.backward_s],
            }
    return {"wrong": wrong, "with_and_without": figures}


@dataclass
class StageAlone:
    """Results, memory and time of one stage in this process."""

    results: dict[str, torch.Tensor]
    peak_bytes: int  # on a GPU, else 0
    foretold_bytes: int
    backward_s: float


def one_stage(run: RunFile, stage: int, device: torch.device, limits: dict[str, Any]) -> StageAlone:
    """Compute some microbatches and a step of one stage. With `limits.offload`, layers are copied even on the CPU."""
    cuda = device.type == "cuda"
    run = msgspec.structs.replace(run, limits=convert(limits, LimitsSection))
    gc.collect()  # free the previous stage
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with patch("peerd.model.stage.offload.has_own_memory", return_value=True):
        module = StageModule(run, stage, str(device))
    if run.limits.recompute:
        module.recompute()
    numbers, samples = torch.Generator().manual_seed(stage), (run.pipeline.microbatch, run.model.context)
    times = []
    for _ in range(WARM_STEPS):
        tokens = torch.randint(VOCAB, samples, generator=numbers)
        x, gradient = (torch.randn(*samples, run.model.d_model, generator=numbers, dtype=module.dtype) for _ in "xy")
        began = time.perf_counter()
        module.backward(tokens if module.first else x, tokens if module.last else gradient)
        module.settle()
        times.append(time.perf_counter() - began)
    results = {"the sum of gradients": module.gradient().cpu().clone()}
    module.apply(results["the sum of gradients"], WARM_STEPS * run.pipeline.microbatch)
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    return StageAlone(results | module.state(), peak, footprint(run, stage).on("cuda")[0], median(times))


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference, divided by the largest absolute value of `one`."""
    largest = float(one.abs().max())
    return float((one - other).abs().max()) / largest if largest else float(other.abs().max())


# --- a swarm beside plain torch -----------------------------------------------------------------------------------


def exact(folder: Path, device: str, deadline: float) -> dict[str, Any]:
    """Train two stages of two replicas, and report the largest relative difference from plain torch on the device."""
    found: dict[str, Any] = {}
    for dtype in EXACT:
        model = {"d_model": 64, "heads": 2, "layers": 2, "context": CONTEXT, "dtype": dtype}
        of = folder / dtype
        of.mkdir()
        run = run_file(write_text(folder), model)
        with DeviceSwarm(of, run, options=("--device", device), deadline=deadline) as swarm:
            swarm.start_pipeline(REPLICAS)
            swarm.wait_until_step(EXACT_STEPS)
            if late := swarm.leave():
                raise SwarmFailed(f"{late} did not leave: see the logs in {of}")
            apart, steps = difference(convert(run, RunFile), swarm.replicas(REPLICAS), device)
        found[dtype] = {"largest_difference": apart, "steps": steps}
    return found


def speed(folder: Path, device: str, deadline: float) -> dict[str, Any]:
    """Measure tokens per second and memory of two stages, and of plain torch with the same model and batch."""
    model: dict[str, Any] = MODELS["cuda" if device.startswith("cuda") else "cpu"]
    section = {"optimizer": {"name": "adamw", "lr": 1e-4}}
    run = run_file(write_text(folder), model, **section, averaging={"code": "int8"})
    parameters = [size.parameters for size in stage_sizes(convert(run, RunFile), VOCAB)]
    plain = plain_torch(convert(run, RunFile), device)
    own = folder / "speed"
    own.mkdir()
    with DeviceSwarm(own, run, options=("--device", device), deadline=deadline) as swarm:
        swarm.start_pipeline()
        steps = WARM_STEPS + (20 if device.startswith("cuda") else 10)
        swarm.wait_until_step(steps)
        memory = [memory_bytes(peer.popen.pid, device) for peer in swarm.peers[1 : 1 + STAGES]]
        ends = swarm.steps()[WARM_STEPS:steps]
    tokens_per_s = step_tokens(model) / median(b - a for a, b in itertools.pairwise(ends))
    each = [b / count for b, count in zip(memory, parameters, strict=True) if b]
    return {
        "parameters": parameters,
        "tokens_per_s": tokens_per_s,
        "torch_tokens_per_s": plain["tokens_per_s"],
        "over_torch": tokens_per_s / plain["tokens_per_s"],
        "bytes_per_parameter": each,  # of a stage's whole process
        "torch_bytes_per_parameter": plain["bytes_per_parameter"],
    }


def step_tokens(model: dict[str, Any]) -> int:
    return 4 * MICROBATCHES * int(model["context"])


def plain_torch(run: RunFile, device: str) -> dict[str, float]:
    """Measure the same steps in one process: tokens per second, and peak bytes per parameter (0 on the CPU)."""
    training = PlainTraining(run, device=device)
    rows = torch.randint(VOCAB, (run.batch.target_samples, run.model.context + 1), device=device)
    step_s = median_step_s(training, [rows], MICROBATCHES, WARM_STEPS, 5)
    peak = torch.cuda.max_memory_allocated(device) if rows.is_cuda else 0
    tokens = run.batch.target_samples * run.model.context
    return {"tokens_per_s": tokens / step_s, "bytes_per_parameter": peak / training.parameters}


def memory_bytes(pid: int, device: str) -> float:
    """Memory of a process: on the GPU, as the driver reports it (0 if it does not), or main memory."""
    if not device.startswith("cuda"):
        return resident_bytes(pid)
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout if shutil.which(ask[0]) else ""
    rows = [line.split(",") for line in told.splitlines() if line.count(",") == 1]
    return next((float(mb) * (1 << 20) for one, mb in rows if one.strip() == str(pid) and mb.strip().isdigit()), 0.0)


def measure(device: str, only: list[str], folder: Path) -> dict[str, Any]:
    """Run the checks, until the time is over."""
    deadline, on = time.monotonic() + MOST_S, torch.device(device)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "codes": lambda: codes(on),
        "copies": lambda: copies(on),
        "offload": lambda: offload(on),
        "exact": lambda: exact(folder, device, deadline),
        "speed": lambda: speed(folder, device, deadline),
    }
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for part in only or parts:
        began = time.monotonic()
        try:
            report[part] = parts[part]()
        except SwarmFailed as error:
            report[part] = {"failed": str(error)}
        report[part]["seconds"] = time.monotonic() - began
        print(f"{part}: {report[part]}", file=sys.stderr)
    report["met"] = all(is_met(part, report[part]) for part in only or parts)
    return report


def is_met(part: str, found: dict[str, Any]) -> bool:
    if "failed" in found or found.get("wrong"):
        return False
    return part != "exact" or all(found[dtype]["largest_difference"] <= most for dtype, most in EXACT.items())


def main() -> int:
    parser = argparse.ArgumentParser(description="Check one GPU.")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu")
    parser.add_argument("--only", default="", help=f"of {', '.join(PARTS)}, with commas between")
    add_json(parser)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --device cpu checks the same on the CPU", file=sys.stderr)
        return 2
    only = [part for part in options.only.split(",") if part]
    if wrong := set(only) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(wrong))}: known are {', '.join(PARTS)}")
    with data_folder("peerd-gpu-check-") as folder:
        report = measure(options.device, only, folder)
    return show(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
