"""Room that a stage takes here: what `core/model/stage_memory` says for the number of its parameters, which is that of
the model itself, built without values, so nothing here takes memory. A post refuses to begin what surely does not fit,
and `peerd doctor` says so before.
"""

from __future__ import annotations

import outcome
import psutil

from peerd.compute.gpu import free_bytes
from peerd.compute.model.offload import offloads
from peerd.compute.model.partition import ModelPiece, build, outline, spans
from peerd.compute.tokenizer import load_vocabulary
from peerd.core.errors import ConfigError
from peerd.core.model.stage_memory import StageFootprint, activations_of, footprint_of, layer_counts
from peerd.core.run.runfile import RunFile

_TOLERATED = 1.05  # times limits.memory_gb, as `control/memory_limit`
_LEAST_ROOM_BYTES = 16 << 20  # for activations: with less than a few microbatches a stage does nothing


def footprint(run: RunFile, stage: int) -> StageFootprint:
    """The room that `stage` of `run` takes; ConfigError when the model cannot be built."""
    layers = layer_counts({name: tensor.numel() for name, tensor in _shapes(run, stage).named_parameters()})
    if run.model.kind != "gpt":
        return footprint_of(run, stage, layers)
    vocab_size, last = load_vocabulary(run.model.vocab).size, stage == run.pipeline.stages - 1
    return footprint_of(run, stage, layers, activations_of(run, spans(run)[stage], vocab_size, last))


def recomputes(run: RunFile, stage: int, device: str) -> bool:
    """Whether layers are computed again in the backward: as `limits.recompute` says, else where the activations of a
    microbatch would take more than half of the memory that the stage leaves free, and always where parameters are
    copied to the device one layer at a time. Before the stage is built.
    """
    if offloads(run, device):
        return True
    if run.limits.recompute is not None:
        return run.limits.recompute
    taken = footprint(run, stage)
    if device.startswith("cuda"):
        free, _ = free_bytes(device)
        return taken.activations.kept > (free - taken.device_bytes) / 2
    free = psutil.virtual_memory().available
    if run.limits.memory_gb:
        free = min(free, int(run.limits.memory_gb * 1e9) - _held_bytes())
    return taken.activations.kept > (free - taken.device_bytes - taken.machine_bytes) / 2


def _shapes(run: RunFile, stage: int) -> ModelPiece:
    """A function of the user's own may compute values, which shapes alone do not have: then it is built with them."""
    shapes = outcome.capture(outline, run, [stage])
    if isinstance(shapes, outcome.Value):
        return shapes.value
    if not isinstance(shapes.error, Exception) or run.model.kind == "gpt":
        raise shapes.error
    return build(run, [stage])


def lacking(taken: StageFootprint, device: str, own_limit_bytes: float = 0) -> str | None:
    """The memory that is too small for a stage, in words; None when there is enough. `own_limit_bytes`: what the user
    lets this process take, with what it holds by now (Python, torch); 0: no limit.
    """
    there, here = taken.on(device, least=True)
    name = f"stage {taken.stage} ({taken.parameters:,} parameters)"
    if device.startswith("cuda"):
        free, _ = free_bytes(device)
        if there > free:
            advice = "" if taken.offload or taken.copies_bytes > free else " (limits.offload takes less of it)"
            return f"{name} takes {_gb(there)} of {device}'s memory, and {_gb(free)} are free{advice}"
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    if own_limit_bytes and own_limit_bytes < (held := _held_bytes()) + here:
        beside = f"beside the {_gb(held)} that this process holds"
        return f"{name} takes {_gb(here)} of memory {beside}, and limits.memory_gb allows {_gb(own_limit_bytes)}"
    if here > free:
        return f"{name} takes {_gb(here)} of memory, and {_gb(free)} are free"
    return None


def refuse_if_too_large(run: RunFile, stage: int, device: str) -> None:
    """Raise ConfigError when this machine lacks the memory for `stage`, before anything is allocated."""
    lack = lacking(footprint(run, stage), device, run.limits.memory_gb * 1e9)
    if lack is not None:
        raise ConfigError(f"{lack}; give this peer a smaller stage (limits.stage) or a machine with more memory")


def spare_bytes(run: RunFile, state_bytes: int) -> int:
    """Memory for what a peer may hold or not, at most `state_bytes`: with limits.memory_gb no more than is left of it
    beside the sums of gradients and the copy for checkpoints, which come as training goes on.
    """
    if not run.limits.memory_gb:
        return state_bytes
    left = int(run.limits.memory_gb * 1e9) - _held_bytes() - 2 * state_bytes
    return max(0, min(left, state_bytes))


def room_for_activations(run: RunFile) -> int:
    """Bytes for tensors of microbatches that a stage keeps or has under way: by limits.activations_mb, else half of the
    memory that is free now, within limits.memory_gb.
    """
    if run.limits.activations_mb:
        return run.limits.activations_mb << 20
    free: int = psutil.virtual_memory().available
    if run.limits.memory_gb:
        free = min(free, int(run.limits.memory_gb * 1e9) - _held_bytes())
    return max(_LEAST_ROOM_BYTES, free // 2)


def lacking_for_call(run: RunFile, needed_bytes: int) -> str | None:
    """The memory that is too small for one more microbatch of `needed_bytes`, in words; None: it fits now.

    As `control/memory_limit`, it tolerates a little more than limits.memory_gb: what was freed may not be back yet.
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
