"""Validation of a run file's `experts` section, and of the keys that choose how the trunk steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from peerd.core.limits import EXPERT_PLACES, EXPERT_SIDE, EXPERT_TOP_K, RPC_MESSAGE_FRAME_BYTES, STAGES
from peerd.run.runfile import MOST_STALE, ExpertsSection, RunFile

_OWN = re.compile(r"[^:]+:[^:]+")
_DIMS = 3  # of a grid
_AXES = 6  # of one sample
_STALE_STEPS = 65536  # of an asynchronous trunk


def experts_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of the section, as (path, message); empty if the run has no experts."""
    if run.experts is None:
        return []
    faults = [*_block(run.experts), *_grid(run, run.experts), *_calls(run.experts), *_times(run.experts)]
    faults += _optimizer(run.experts)
    if run.pipeline.stages != 1:
        faults.append(("stages", f"is {run.pipeline.stages} in pipeline; a run with experts has 1"))
    if run.model.share_layers:
        faults.append(("layers", "cannot be counted: model.share_layers is true; allowed with experts: false"))
    return [(f"experts.{key}", message) for key, message in faults]


def trunk_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of `optimizer.trunk` and `optimizer.most_stale`, as (path, message), for runs with or without experts."""
    o = run.optimizer
    if not o.asynchronous:
        told = f"is {o.most_stale}, but optimizer.trunk is synchronous: no gradient is that old; leave it out"
        return [("optimizer.most_stale", told)] if o.most_stale != MOST_STALE else []
    faults = []
    if run.experts is None:
        told = "is asynchronous, but the run has no experts, and so no trunk; allowed: synchronous"
        faults.append(("optimizer.trunk", told))
    if o.delayed:
        told = "is true, but an asynchronous trunk does not wait for averaging in any case; leave it out"
        faults.append(("optimizer.delayed", told))
    if not 1 <= o.most_stale <= _STALE_STEPS:
        faults.append(("optimizer.most_stale", f"is {o.most_stale}; allowed: 1 to {_STALE_STEPS} steps"))
    return faults


def _block(e: ExpertsSection) -> Iterator[tuple[str, str]]:
    own = _OWN.fullmatch(e.block) is not None
    if not own and e.block not in ("ffn", "ffn1", "transformer"):
        yield "block", f"is {e.block!r}; allowed: ffn, ffn1, transformer, or module:function of a local file"
    if e.block_digest and not re.fullmatch("[0-9a-f]{64}", e.block_digest):
        yield "block_digest", "is not a SHA-256 in hex; allowed: 64 of 0-9 and a-f"
    elif e.block_digest and not own:
        yield "block_digest", f"is of a function's source, but experts.block is {e.block}"
    if not 0 <= e.hidden <= 1 << 20:
        yield "hidden", f"is {e.hidden}; allowed: 0 (four times the input) to {1 << 20}"
    if not 1 <= e.heads <= 1024:
        yield "heads", f"is {e.heads}; allowed: 1 to 1024"


def _grid(run: RunFile, e: ExpertsSection) -> Iterator[tuple[str, str]]:
    layers = e.layers or run.model.layers
    if not 1 <= layers <= STAGES:
        yield "layers", f"is {layers}; allowed: 0 (model.layers) to {STAGES}"
    if not 1 <= len(e.grid) <= _DIMS or not all(2 <= side <= EXPERT_SIDE for side in e.grid):
        yield "grid", f"is {e.grid}; allowed: 1 to {_DIMS} numbers from 2 to {EXPERT_SIDE}"
    elif math.prod(e.grid) * max(1, layers) > EXPERT_PLACES:
        yield "grid", f"has {math.prod(e.grid) * layers} places in {layers} layers; allowed: up to {EXPERT_PLACES}"
    elif not 1 <= e.top_k <= min(EXPERT_TOP_K, math.prod(e.grid)):
        yield "top_k", f"is {e.top_k}; allowed: 1 to {min(EXPERT_TOP_K, math.prod(e.grid))}"
    for key, shape in (("input", e.input), ("output", e.output)):
        if len(shape) > _AXES or not all(1 <= side <= 1 << 20 for side in shape):
            yield key, f"is {shape}; allowed: up to {_AXES} numbers from 1 to {1 << 20}"
    built_in = _OWN.fullmatch(e.block) is None
    if built_in and e.output and e.output != (e.input or e.output):
        yield "output", f"is {e.output}, but a {e.block} block gives back its input's shape; leave it out"
    if e.block == "transformer" and e.input and len(e.input) != 2:
        yield "input", f"is {e.input}; allowed for a transformer block: [tokens, width]"


def _calls(e: ExpertsSection) -> Iterator[tuple[str, str]]:
    if not 1 <= e.k_min <= max(1, e.top_k):
        yield "k_min", f"is {e.k_min}; allowed: 1 to top_k ({e.top_k})"
    if e.most_stale < -1:
        yield "most_stale", f"is {e.most_stale}; allowed: -1 (any number of updates) and more"
    sample = 4 * math.prod(e.input) if e.input else 1
    if not 1 <= e.max_batch <= 1 << 20 or e.max_batch * sample > RPC_MESSAGE_FRAME_BYTES // 2:
        most = f"1 to {1 << 20} samples, of {RPC_MESSAGE_FRAME_BYTES // 2} bytes together"
        yield "max_batch", f"is {e.max_batch}; allowed: {most}"
    if e.dtype == "bfloat16" and e.code not in ("none", "bf16"):
        yield "code", f"is {e.code}; allowed for samples in bfloat16: none, bf16"
    if not 0 <= e.balance <= 1000:
        yield "balance", f"is {e.balance}; allowed: 0 to 1000"


def _times(e: ExpertsSection) -> Iterator[tuple[str, str]]:
    for key, least, most in (("timeout_s", 0.1, 3600), ("announce_s", 0.5, 600), ("checkpoint_s", 0.1, 86400)):
        if not least <= getattr(e, key) <= most:
            yield key, f"is {getattr(e, key)}; allowed: {least} to {most}"
    if not 0 <= e.grace_s <= e.timeout_s:
        yield "grace_s", f"is {e.grace_s}; allowed: 0 to timeout_s ({e.timeout_s})"
    if not 1 <= e.checkpoint_updates <= 1 << 40:
        yield "checkpoint_updates", f"is {e.checkpoint_updates}; allowed: 1 to {1 << 40}"
    if not 0 <= e.copies <= 16:
        yield "copies", f"is {e.copies}; allowed: 0 to 16"


def _optimizer(e: ExpertsSection) -> Iterator[tuple[str, str]]:
    o, share = e.optimizer, "allowed: 0 up to (not including) 1"
    rules = [
        (o.lr > 0, "lr", "must be above 0"),
        (o.warmup_updates >= 0, "warmup_updates", "must not be negative"),
        (o.total_updates >= 0, "total_updates", "must not be negative"),
        (0 <= o.final_lr_share <= 1, "final_lr_share", "allowed: 0 to 1"),
        (o.weight_decay >= 0, "weight_decay", "must not be negative"),
        (0 <= o.momentum < 1, "momentum", share),
        (0 <= o.beta1 < 1, "beta1", share),
        (0 <= o.beta2 < 1, "beta2", share),
        (o.eps > 0, "eps", "must be above 0"),
        (o.clip_norm >= 0, "clip_norm", "must not be negative"),
    ]
    for ok, key, message in rules:
        if not ok:
            yield f"optimizer.{key}", f"is {getattr(o, key)}; {message}"
    if o.momentum and o.name != "sgd":
        yield "optimizer.momentum", f"is {o.momentum}, but {o.name} has none; leave it out"
    if o.decay != "none" and o.total_updates <= o.warmup_updates:
        yield "optimizer.decay", "needs total_updates above warmup_updates"
