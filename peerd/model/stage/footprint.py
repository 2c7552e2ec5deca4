"""Memory that a stage needs on this machine.

`model/shapes/stage_memory` computes it from the parameter counts of the model, which is built on the meta device and
takes no memory. Only the activations of a user's own layers are measured, by building their stage
(`measured_footprint`). A peer refuses to serve a stage that surely does not fit, or whose gradient is too large for
averaging rounds, and `peerd doctor` reports it in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import outcome
import psutil
import torch
from torch import Tensor

from peerd.codec.flat import FlatLayout
from peerd.codec.gpu import free_bytes
from peerd.codec.powersgd import rights_outline
from peerd.codec.tensors import dtype_name
from peerd.core.errors import ConfigError
from peerd.data.tokenizer import load_vocabulary
from peerd.messages.state import TensorSpec
from peerd.model.precision import Precision
from peerd.model.shapes.averaged_vector import check_vector, vector_sizes
from peerd.model.shapes.stage_memory import (
    ITEM_BYTES,
    LOSS_VALUES,
    Activations,
    StageFootprint,
    activations_of,
    footprint_of,
    layer_counts,
    moment_names,
)
from peerd.model.stage.offload import offloads
from peerd.model.stage.partition import DTYPES, ModelPiece, build, outline
from peerd.model.stage.shared_buffers import buffers_of
from peerd.run.local_code import guarded
from peerd.run.runfile import RunFile
from peerd.run.user_code import torchs_random_numbers

_TOLERATED = 1.05  # times limits.memory_gb, as in `daemon/control/memory_limit`
_CPU: Final = torch.device("cpu")
_LEAST_ROOM_BYTES = 16 << 20  # for activations: a stage needs room for a few microbatches


def footprint(run: RunFile, stage: int) -> StageFootprint:
    """The memory that `stage` of `run` needs, without the activations of a user's own layers; raises ConfigError if the
    model cannot be built.
    """
    layers = _counts(_shapes(run, stage))
    if run.model.kind != "gpt":
        return footprint_of(run, stage, layers)
    return footprint_of(run, stage, layers, activations_of(run, stage, load_vocabulary(run.model.vocab).size))


def measured_footprint(run: RunFile, stage: int) -> StageFootprint:
    """Like `footprint`, with the activations of a user's own layers, which are built and run on the CPU to measure
    them.

    Also raises ConfigError if a layer fails.
    """
    if run.model.kind == "gpt":
        return footprint(run, stage)
    piece = build(run, [stage])
    return footprint_of(run, stage, _counts(piece), _measured_activations(run, stage, piece))


def state_outline(run: RunFile, stage: int) -> list[TensorSpec]:
    """Name, dtype and shape of each tensor in the state of `stage`, as in `ServedStage.outline`, but without allocating
    the stage. Raises ConfigError if the model cannot be built.
    """
    piece, dtype = _shapes(run, stage), run.model.dtype
    shapes = {name: tuple(parameter.shape) for name, parameter in piece.named_parameters()}
    specs = [TensorSpec(f"param/{name}", dtype, shape) for name, shape in shapes.items()]
    for moment in moment_names(run.optimizer):
        specs += [TensorSpec(f"opt/{name}/{moment}", dtype, shape) for name, shape in shapes.items()]
    if run.averaging.code == "powersgd":
        layout = FlatLayout(tuple(shapes), tuple(map(torch.Size, shapes.values())))
        specs += [TensorSpec(name, dtype, shape) for name, shape in rights_outline(layout, run.averaging.rank).items()]
    buffers = buffers_of(piece)()
    specs += [TensorSpec(f"buffer/{name}", dtype_name(t.dtype), tuple(t.shape)) for name, t in buffers.items()]
    return sorted([*specs, TensorSpec("step", "int64", ())], key=lambda spec: spec.name)


def _counts(piece: ModelPiece) -> list[int]:
    return layer_counts({name: tensor.numel() for name, tensor in piece.named_parameters()})


@dataclass(frozen=True, slots=True)
class _Pass:
    """Bytes of one forward pass, by layer. `saved`: tensors that no earlier layer saved. `inputs`: the layer's input; 0
    for tokens and for the last layer.
    """

    saved: list[int]
    inputs: list[int]


def _measured_activations(run: RunFile, stage: int, piece: ModelPiece) -> Activations:
    """Measure the activations of one microbatch of `piece`, a stage of the user's own layers: what torch saves for the
    backward. Raises ConfigError with the layer that failed.

    Saved bytes grow linearly with the samples, except for tensors that are saved once, such as 16-bit copies of
    weights. Two passes on the CPU, with one and two samples, determine this function, so no full microbatch is ever
    in memory here.
    """
    with torchs_random_numbers(run.seed):
        one, two = (_passed(run, stage, piece, samples) for samples in (1, 2))
    grows = [after - before for before, after in zip(one.saved, two.saved, strict=True)]
    once = sum(max(0, before - more) for before, more in zip(one.saved, grows, strict=True))
    inputs = sum(two.inputs) - sum(one.inputs)
    if stage == run.pipeline.stages - 1:
        scores = run.model.context * load_vocabulary(run.model.vocab).size
        grows[-1] += LOSS_VALUES * ITEM_BYTES[run.model.dtype] * scores
    samples = run.pipeline.microbatch
    return Activations(once + samples * sum(grows), once + samples * (inputs + max(grows)))


def _passed(run: RunFile, stage: int, piece: ModelPiece, samples: int) -> _Pass:
    """Run one forward pass with `samples` samples, and measure its tensors."""
    m = run.model
    if stage:
        x = torch.randn(samples, m.context, m.d_model, dtype=DTYPES[m.dtype], requires_grad=True)
    else:
        x = torch.randint(load_vocabulary(m.vocab).size, (samples, m.context))
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*piece.parameters(), *piece.buffers())}
    found = _Pass([], [])

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found.saved[-1] += storage.nbytes()
        return tensor.detach()

    layers = piece.layers
    with torch.enable_grad(), Precision(run.precision, _CPU).casting():
        for index, layer in enumerate(layers):
            found.saved.append(0)
            found.inputs.append(x.nbytes if x.is_floating_point() and index < len(layers) - 1 else 0)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                x = guarded(partial(layer, x), f"model.kind {m.kind}: layer {index} ({type(layer).__name__}) failed")
    return found


def recomputes(run: RunFile, stage: int, device: str) -> bool:
    """True if the backward recomputes layers, as `limits.recompute` sets.

    By default it does if the activations of a microbatch would take more than half of the memory that the stage leaves
    free. Always True if parameters are copied to the device one layer at a time. Call it before the stage is built.
    Raises ConfigError if the activations of a user's own layers cannot be measured.
    """
    if offloads(run, device):
        return True
    if run.limits.recompute is not None:
        return run.limits.recompute
    taken = measured_footprint(run, stage)
    if device.startswith("cuda"):
        free, _ = free_bytes(device)
        return taken.activations.kept > (free - taken.device_bytes) / 2
    free = psutil.virtual_memory().available
    if run.limits.memory_gb:
        free = min(free, int(run.limits.memory_gb * 1e9) - _held_bytes())
    return taken.activations.kept > (free - taken.device_bytes - taken.machine_bytes) / 2


def _shapes(run: RunFile, stage: int) -> ModelPiece:
    """The stage as shapes only, or with values if the user's own function fails on the meta device."""
    shapes = outcome.capture(outline, run, [stage])
    if isinstance(shapes, outcome.Value):
        return shapes.value
    if not isinstance(shapes.error, Exception) or run.model.kind == "gpt":
        raise shapes.error
    return build(run, [stage])


def lacking(taken: StageFootprint, device: str, own_limit_bytes: float = 0, least: bool = True) -> str | None:
    """Explain which memory is too small for a stage, or return None if there is enough.

    `own_limit_bytes`: limit for this process, including the memory that it already uses (Python, torch); 0: no limit.
    `least`: as in `StageFootprint.on`.
    """
    there, here = taken.on(device, least=least)
    name = f"stage {taken.stage} ({taken.parameters:,} parameters)"
    if device.startswith("cuda"):
        free, _ = free_bytes(device)
        if there > free:
            advice = "" if taken.offload or taken.copies_bytes > free else " (limits.offload needs less of it)"
            return f"{name} takes {_gb(there)} of {device}'s memory, and {_gb(free)} are free{advice}"
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    if own_limit_bytes and own_limit_bytes < (held := _held_bytes()) + here:
        beside = f"beside the {_gb(held)} that this process holds"
        return f"{name} takes {_gb(here)} of memory {beside}, and limits.memory_gb allows {_gb(own_limit_bytes)}"
    if here > free:
        return f"{name} takes {_gb(here)} of memory, and {_gb(free)} are free"
    return None


def refuse_if_not_averaged(run: RunFile, stage: int) -> None:
    """Raise ConfigError if the gradient of `stage` is too large for averaging rounds, or the model cannot be built."""
    piece = _shapes(run, stage)
    shapes = [tuple(parameter.shape) for parameter in piece.parameters()]
    if buffers := buffers_of(piece)():
        shapes += [(1,), *((buffer.numel(),) for buffer in buffers.values())]  # as in `SharedBuffers.shapes`
    check_vector(run.averaging, max(vector_sizes(run.averaging, shapes)), ITEM_BYTES[run.model.dtype])


def refuse_if_too_large(run: RunFile, stage: int, device: str) -> None:
    """Raise ConfigError, before anything is allocated, if the gradient of `stage` is too large for averaging rounds, or
    if this machine lacks the memory for the stage.
    """
    refuse_if_not_averaged(run, stage)
    lack = lacking(footprint(run, stage), device, run.limits.memory_gb * 1e9)
    if lack is not None:
        raise ConfigError(f"{lack}; give this peer a smaller stage (limits.stage) or a machine with more memory")


def spare_bytes(run: RunFile, state_bytes: int, kept_bytes: int = 0) -> int:
    """Bytes of memory that this peer may use for optional data, such as copies of a state or totals of steps; at most
    `state_bytes`.

    With limits.memory_gb, at most what the limit leaves after reserving the gradient sums and the checkpoint copy,
    which are allocated as training goes on. `kept_bytes`: optional data that the peer already holds.
    """
    if not run.limits.memory_gb:
        return state_bytes
    left = int(run.limits.memory_gb * 1e9) - (_held_bytes() - kept_bytes) - 2 * state_bytes
    return max(0, min(left, state_bytes))


def room_for_activations(run: RunFile, kept_bytes: int = 0) -> int:
    """Bytes allowed for the tensors of microbatches that a stage keeps or computes: limits.activations_mb, or else half
    of the free memory within limits.memory_gb. `kept_bytes`: what such tensors already take.
    """
    if run.limits.activations_mb:
        return run.limits.activations_mb << 20
    free: int = psutil.virtual_memory().available
    if run.limits.memory_gb:
        free = min(free, int(run.limits.memory_gb * 1e9) - _held_bytes())
    return max(_LEAST_ROOM_BYTES, (free + kept_bytes) // 2)


def lacking_for_call(run: RunFile, needed_bytes: int) -> str | None:
    """Explain which memory is too small for one more microbatch of `needed_bytes`, or return None if it fits now.

    Like `daemon/control/memory_limit`, it tolerates slightly more than limits.memory_gb: freed memory may not be
    returned to the system yet.
    """
    if not needed_bytes:
        return None
    free, own_limit = psutil.virtual_memory().available + psutil.swap_memory().free, run.limits.memory_gb * 1e9
    if needed_bytes > free:
        return f"it takes {_gb(needed_bytes)}, and {_gb(free)} of the machine's memory are free"
    if own_limit and (held := _held_bytes()) + needed_bytes > _TOLERATED * own_limit:
        beside = f"beside the {_gb(held)} that this process holds"
        return f"it takes {_gb(needed_bytes)} {beside}, and limits.memory_gb allows {_gb(own_limit)}"
    return None


def _held_bytes() -> int:
    held: int = psutil.Process().memory_info().rss
    return held


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
