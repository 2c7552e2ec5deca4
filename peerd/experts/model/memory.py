"""Memory that experts need on their host, and how many of them fit.

Counts what each expert keeps between jobs (weights and moments), plus, once for all experts, the memory of one job
(gradients, and what the backward of `experts.max_batch` samples keeps of the forward) and of a snapshot. Shapes are
those of the block itself, built on the meta device, so nothing here takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil
import torch
from torch import Tensor, nn

from peerd.codec.gpu import free_bytes
from peerd.experts.model.blocks import block_outline
from peerd.experts.model.hosted_expert import optimizer_section
from peerd.model.shapes.stage_memory import moment_names
from peerd.run.grid import grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile

FREE_SHARE: Final = 0.8  # of the free memory, without a user's limit: other programs need some, too
_FLOAT_BYTES: Final = 4
_GRADIENT_COPIES: Final = 3  # each tensor's, the flat tensor of all, and the update's copy
_SNAPSHOT_COPIES: Final = 2  # the tensors, and the file's bytes


@dataclass(frozen=True, slots=True)
class ExpertFootprint:
    """Bytes that the experts of a run need."""

    parameters: int  # of one expert
    held_bytes: int  # per expert, between jobs
    job_bytes: int  # once for all experts, on their device
    snapshot_bytes: int  # once for all experts, in host memory


def expert_footprint(run: RunFile) -> ExpertFootprint:
    """Memory of the experts of `run`; raises ConfigError if the block cannot be built."""
    section = run.experts or ExpertsSection()
    module = block_outline(run)
    learnt = sum(p.numel() for p in module.parameters() if p.requires_grad)
    fixed = sum(p.numel() for p in module.parameters()) - learnt + sum(b.numel() for b in module.buffers())
    moments = len(moment_names(optimizer_section(section.optimizer)))
    held = _FLOAT_BYTES * (learnt * (1 + moments) + fixed)
    job = _FLOAT_BYTES * learnt * _GRADIENT_COPIES + section.max_batch * kept_for_backward(run, module)
    return ExpertFootprint(learnt + fixed, held, job, held * _SNAPSHOT_COPIES)


def kept_for_backward(run: RunFile, module: nn.Module) -> int:
    """Bytes per sample that a backward keeps of the forward, including input and output."""
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
    return sum(found.values()) // rows + 2 * ends  # each with its gradient or frame


def experts_that_fit(run: RunFile, device: str = "cpu", hosted: int = 0) -> int:
    """Number of experts that this peer can host in addition to its `hosted` ones.

    It is set by `limits.experts`, or else by memory: limits.memory_gb minus the memory that the process uses now, or
    without that limit a share of the free memory. Never more than the grid has places.
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
    """Bytes available to experts on their device."""
    limit = run.limits.memory_gb * 1e9
    if device.startswith("cuda"):
        free, _ = free_bytes(device)  # within the limit, if there is one
        return free if limit else FREE_SHARE * free
    if limit:
        held: int = psutil.Process().memory_info().rss
        return limit - held
    free = psutil.virtual_memory().available
    return FREE_SHARE * free
