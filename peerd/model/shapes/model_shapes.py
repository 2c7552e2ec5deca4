"""Shapes of a gpt's parameters and its division into stages, computed from the run file and the vocabulary size.

The torch modules with these parameters are in `model/layers`; a test checks that both agree. Shapes are torch's:
a matrix is [out, in].
"""

from __future__ import annotations

import itertools
import math

from peerd.core.errors import ConfigError
from peerd.run.grid import grid_of
from peerd.run.runfile import RunFile

Shapes = dict[str, tuple[int, ...]]


def feed_forward_width(d_model: int) -> int:
    """F, the width of the gated feed-forward: 8/3 of `d_model` (D), rounded up to a multiple of 16.

    Its three matrices then have as many values as the two matrices of an ungated layer of width 4 D.
    """
    return -(-8 * d_model // (3 * 16)) * 16


def stage_spans(run: RunFile, vocab_size: int) -> list[range]:
    """Blocks of each stage of a gpt, chosen so that the slowest stage costs as little as possible.

    Costs are multiply-adds per token: a block's matrices and attention, and the head's matrix in the last stage.
    """
    m, stages = run.model, run.pipeline.stages
    block = m.d_model * (4 * m.d_model + 3 * feed_forward_width(m.d_model) + m.context)
    head = m.d_model * vocab_size
    if stages == 1:
        return [range(m.layers)]

    def slowest(in_last: int) -> tuple[int, int]:
        others = -(-(m.layers - in_last) // (stages - 1))
        return max(others * block, in_last * block + head), -in_last

    last = min(range(1, m.layers - stages + 2), key=slowest)
    return [*even_parts(m.layers - last, stages - 1), range(m.layers - last, m.layers)]


def even_parts(count: int, parts: int) -> list[range]:
    """0 to `count` cut into `parts` ranges whose lengths differ by at most one, longer ones first."""
    short, longer = divmod(count, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def first_with_experts(run: RunFile) -> int:
    """Index of the first block whose feed-forward is a layer of experts; all later blocks have experts, too.

    Returns the number of blocks if the run has no experts.
    """
    if run.experts is None:
        return run.model.layers
    return max(0, run.model.layers - grid_of(run).layers)


def need_known_sizes(run: RunFile) -> None:
    """Raise ConfigError for a user's own model, whose layer sizes only its code knows."""
    if run.model.kind != "gpt":
        raise ConfigError(f"model.kind {run.model.kind}: only its own code knows the sizes of its layers")


def stage_shapes(run: RunFile, stage: int, vocab_size: int) -> Shapes:
    """Shape of each parameter of a gpt's stage, by its name in the whole model. ConfigError for other models."""
    need_known_sizes(run)
    width, blocks = run.model.d_model, stage_spans(run, vocab_size)[stage]
    shapes: Shapes = {"embed.table": (vocab_size, width)} if stage == 0 else {}
    if run.model.share_layers:
        shapes |= _block(f"block{blocks.start}", width)
    else:
        for index in blocks:
            gated = index >= first_with_experts(run)
            shapes |= _block(f"block{index}", width, sum(grid_of(run).sides) if gated else None)
    if stage == run.pipeline.stages - 1:
        shapes |= {"head.norm.gain": (width,), "head.out.weight": (vocab_size, width)}
    return shapes


def _block(name: str, width: int, scores: int | None = None) -> Shapes:
    """Shapes of a transformer block. With `scores`, it has a gate of that many outputs instead of a feed-forward,
    which experts on other peers compute.
    """
    feed = feed_forward_width(width)
    shapes: Shapes = {
        "attention_norm.gain": (width,),
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "feed_norm.gain": (width,),
    }
    if scores is None:
        shapes |= {"feed.up.weight": (2 * feed, width), "feed.down.weight": (width, feed)}
    else:
        shapes["gate.weight"] = (scores, width)
    return {f"{name}.{own}": shape for own, shape in shapes.items()}


def count_of(shapes: Shapes) -> int:
    """Number of parameters with these shapes."""
    return sum(map(math.prod, shapes.values()))
