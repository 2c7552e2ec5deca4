"""Experts of an exported model: the newest intact checkpoint of each, and their description in `config.json`.

The caller finds the checkpoints and passes them as `SavedExpert`. A damaged checkpoint is replaced by an older one of
the same expert. An expert without any is left out, and the mixture works without it, as in training. Only blocks that
process each token separately can be exported, because generation needs outputs before the whole text exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.experts.model.blocks import block_outline
from peerd.model.shapes.model_shapes import first_with_experts
from peerd.model.stage.partition import DTYPES
from peerd.run.grid import Grid, Uid, grid_of, parse_uid
from peerd.run.runfile import ExpertsSection, RunFile

PLACES: Final = 1 << 17  # maximum number of experts of an exported model
_PARAMETER: Final = "param/"
_NAMED: Final = 5  # experts listed in a message


class ExportedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of an exported model, as in its `config.json`."""

    first: int  # the first block with experts; all later blocks have them, too
    block: Literal["ffn", "ffn1"]
    hidden: int
    grid: list[int]
    top_k: int
    missing: list[str] = []  # experts without a checkpoint, as layer.coordinates


@dataclass(frozen=True, slots=True)
class SavedExpert:
    """A checkpoint of an expert, not read yet. The one with the higher `rank` is newer."""

    uid: Uid
    rank: tuple[int, int, bytes]
    path: Path
    read: Callable[[], bytes]  # returns the snapshot's checked bytes; raises ValueError or OSError


@dataclass(frozen=True, slots=True)
class GatheredExperts:
    """Description and tensors of the gathered experts (by plain name), and notes for users."""

    described: ExportedExperts
    tensors: dict[str, Tensor]
    notes: list[str]


def gather_experts(run: RunFile, saved: Iterable[SavedExpert], root: Path) -> GatheredExperts:
    """The newest intact checkpoint of each expert; raises ConfigError if a layer has none or the block cannot be
    exported.
    """
    section, grid, first = run.experts or ExpertsSection(), grid_of(run), first_with_experts(run)
    if section.block not in ("ffn", "ffn1"):
        raise ConfigError(f"experts.block of run {run.run!r} is {section.block}; allowed for an export: ffn or ffn1")
    if grid.layers * grid.places > PLACES:
        raise ConfigError(f"run {run.run!r} has {grid.layers * grid.places:,} experts; an export has up to {PLACES:,}")
    by_uid: dict[Uid, list[SavedExpert]] = {}
    for one in saved:
        if grid.is_expert(one.uid):
            by_uid.setdefault(one.uid, []).append(one)
    wanted = {name: tuple(p.shape) for name, p in block_outline(run).named_parameters()}
    tensors: dict[str, Tensor] = {}
    missing: list[Uid] = []
    notes: list[str] = []
    for uid in map(grid.uid, range(grid.layers * grid.places)):
        state = _newest(by_uid.get(uid, ()), wanted, notes)
        if state is None:
            missing.append(uid)
            continue
        where = f"blocks.{first + uid.layer}.mlp.experts.{'-'.join(map(str, uid.at))}"
        tensors |= {f"{where}.{name}": value.to(DTYPES[run.model.dtype]) for name, value in state.items()}
    _need_some(run, missing, root)
    if missing:
        notes.append(f"no checkpoint of {len(missing)} of {grid.layers * grid.places} experts: {_listed(missing)}")
    described = ExportedExperts(
        first=first,
        block=section.block,  # type: ignore[arg-type]  # checked above
        hidden=section.hidden or 4 * run.model.d_model,
        grid=list(grid.sides),
        top_k=section.top_k,
        missing=[str(uid) for uid in missing],
    )
    return GatheredExperts(described, tensors, notes)


def _newest(
    saved: Iterable[SavedExpert], wanted: dict[str, tuple[int, ...]], notes: list[str]
) -> dict[str, Tensor] | None:
    """The parameters of the newest intact checkpoint, or None without an intact one."""
    for one in sorted(saved, key=lambda one: one.rank, reverse=True):
        try:
            return _parameters(one, wanted)
        except (OSError, ValueError) as error:
            notes.append(f"left out: {error}")
    return None


def _parameters(one: SavedExpert, wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    try:
        state = safetensors.torch.load(one.read())
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"{one.path} is damaged: {error}") from None
    found = {name.removeprefix(_PARAMETER): tensor for name, tensor in state.items() if name.startswith(_PARAMETER)}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != wanted:
        raise ValueError(f"{one.path} has another block than the run")
    if any(tensor.dtype != torch.float32 for tensor in found.values()):
        raise ValueError(f"{one.path} has parameters that are not float32")
    return found


def _need_some(run: RunFile, missing: list[Uid], root: Path) -> None:
    grid = grid_of(run)
    for layer in range(grid.layers):
        if sum(uid.layer == layer for uid in missing) == grid.places:
            raise ConfigError(
                f"{root} contains no checkpoint of an expert of layer {layer} of run {run.run!r}; use a folder that "
                "also contains the data directories of its expert hosts, or of a backbone that keeps their checkpoints"
            )


def _listed(uids: list[Uid]) -> str:
    shown = ", ".join(map(str, uids[:_NAMED]))
    return f"{shown}, ..." if len(uids) > _NAMED else shown


def fault_of(experts: ExportedExperts, blocks: int) -> str | None:
    """The first invalid value in the experts part of `config.json`, in words, or None. `blocks`: of the model."""
    places = math.prod(experts.grid)
    if not (1 <= len(experts.grid) <= 3 and min(experts.grid) >= 1 and places <= PLACES):
        return f"experts.grid is not 1 to 3 sides of {PLACES} places at most"
    if not (0 <= experts.first < blocks and (blocks - experts.first) * places <= PLACES):
        return f"experts.first is {experts.first}; the model has {blocks} blocks, and up to {PLACES} experts"
    if not (1 <= experts.hidden <= 1 << 20 and experts.top_k >= 1):
        return "experts.hidden or experts.top_k is not a number of units or of experts"
    there = [places] * (blocks - experts.first)
    for name in set(experts.missing):
        try:
            uid = parse_uid(name)
        except ValueError as error:
            return f"experts.missing: {error}"
        if not Grid(len(there), tuple(experts.grid)).is_expert(uid):
            return f"experts.missing: {name[:40]} is not in the grid"
        there[uid.layer] -= 1
    return None if min(there) >= 1 else f"experts.missing: layer {there.index(0)} has no expert"
