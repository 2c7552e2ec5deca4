"""Memory that experts take on their host, and how many of them fit.

Counts what an expert holds between jobs (weights and moments), once for all experts what one job takes (gradients, and
what the backward of `experts.max_batch` samples keeps of the forward), and the copy that a snapshot is. Shapes are
those of the block itself, built without values, so nothing here takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil
import torch
from torch import Tensor, nn

from peerd.compute.experts.blocks import block_outline
from peerd.compute.experts.hosted_expert import optimizer_section
from peerd.compute.gpu import free_bytes
from peerd.core.experts.grid import grid_of, sample_shapes
from peerd.core.model.stage_memory import moment_names
from peerd.core.run.runfile import ExpertsSection, RunFile

FREE_SHARE: Final = 0.8  # of the memory that is free now, where the user names no limit: others live there, too
_FLOAT_BYTES: Final = 4
_GRADIENT_COPIES: Final = 3  # each tensor's, all in one flat tensor, and what the update makes of it
_SNAPSHOT_COPIES: Final = 2  # the tensors, and the file made of them


@dataclass(frozen=True, slots=True)
class ExpertFootprint:
    """Bytes that the experts of a run take."""

    parameters: int  # of one expert
    held_bytes: int  # each expert, between jobs
    job_bytes: int  # once for all, where they compute
    snapshot_bytes: int  # once for all, in main memory


def expert_footprint(run: RunFile) -> ExpertFootprint:
    """Footprint of the experts of `run`; ConfigError when the block cannot be built."""
    section = run.experts or ExpertsSection()
    module = block_outline(run)
    learnt = sum(p.numel() for p in module.parameters() if p.requires_grad)
    fixed = sum(p.numel() for p in module.parameters()) - learnt + sum(b.numel() for b in module.buffers())
    moments = len(moment_names(optimizer_section(section.optimizer)))
    held = _FLOAT_BYTES * (learnt * (1 + moments) + fixed)
    job = _FLOAT_BYTES * learnt * _GRADIENT_COPIES + section.max_batch * kept_for_backward(run, module)
    return ExpertFootprint(learnt + fixed, held, job, held * _SNAPSHOT_COPIES)


def kept_for_backward(run: RunFile, module: nn.Module) -> int:
    """Bytes that a backward keeps of the forward for each sample, its input and output included."""
    into, out = sample_shapes(run)
    own = {id(p) for p in module.parameters()}
    found: dict[tuple[int, ...], int] = {}
    rows = 2

    def count(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and tensor.ndim and not tensor.shape[0] % rows:
            found[(id(tensor.untyped_storage()), *tensor.shape)] = tensor.nbytes
        return tensor

    device = next(module.parameters()).device
    x = torch.zeros((rows, *into), device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y = module(x)
    del y
    ends = _FLOAT_BYTES * (torch.Size(into).numel() + torch.Size(out).numel())
    return sum(found.values()) // rows + 2 * ends  # each with its gradient or its frame


def experts_that_fit(run: RunFile, device: str = "cpu", hosted: int = 0) -> int:
    """Number of experts that this peer can host beside the `hosted` ones that it has: `limits.experts`, else by memory.

    With limits.memory_gb the process may take so much, what it holds now included; without, a share of what is free.
    Never more than the grid has.
    """
    grid = grid_of(run)
    most = grid.layers * grid.places - hosted
    if run.limits.experts:
        return max(0, min(most, run.limits.experts - hosted))
    taken = expert_footprint(run)
    on_gpu = device.startswith("cuda")
    room = _room(run, device)
    once = taken.job_bytes + (0 if on_gpu else taken.snapshot_bytes)
    return max(0, min(most, int(room - once) // max(1, taken.held_bytes)))


def _room(run: RunFile, device: str) -> float:
    """Bytes that experts may take where they compute."""
    limit = run.limits.memory_gb * 1e9
    if device.startswith("cuda"):
        free, _ = free_bytes(device)  # within the limit, if there is one
        return free if limit else FREE_SHARE * free
    if limit:
        held: int = psutil.Process().memory_info().rss
        return limit - held
    free = psutil.virtual_memory().available
    return FREE_SHARE * free
