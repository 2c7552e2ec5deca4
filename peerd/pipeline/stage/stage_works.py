"""Compute and traffic of each stage for one microbatch: the input to the planner that assigns peers to stages."""

from __future__ import annotations

from peerd.data.tokenizer import load_vocabulary
from peerd.model.shapes.model_size import FLOPS_OF_TRAINING, boundary_bytes, stage_sizes
from peerd.model.shapes.stage_memory import ITEM_BYTES
from peerd.model.stage.footprint import footprint
from peerd.placement.problem import StageWork
from peerd.run.runfile import RunFile


def stage_works(run: RunFile) -> tuple[StageWork, ...]:
    """The work of each stage. In a user's own model, each parameter counts as an element of a matrix."""
    if run.model.kind == "gpt":
        sizes = stage_sizes(run, load_vocabulary(run.model.vocab).size)
        return tuple(StageWork(one.gradient_bytes, one.sent_bytes, one.flops) for one in sizes)
    tokens, item_bytes = run.pipeline.microbatch * run.model.context, ITEM_BYTES[run.model.dtype]
    found = list[StageWork]()
    for stage in range(run.pipeline.stages):
        parameters, last = footprint(run, stage).parameters, stage == run.pipeline.stages - 1
        flops = FLOPS_OF_TRAINING * tokens * max(1, parameters)
        found.append(StageWork(parameters * item_bytes, 0 if last else boundary_bytes(run), flops))
    return tuple(found)
