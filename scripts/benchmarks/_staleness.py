"""Part of the benchmark of delayed updates: how much the loss grows if gradients are one step old.

Trains one stage in one process. In a delayed run, each batch is computed before the previous step is made, so all
gradients are one step old. In a swarm only some are, so this is the upper bound.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.data.stream import samples_of
from peerd.messages.swarm import Mb
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import BatchSection, DataSection, ModelSection, OptimizerSection, PipelineSection, RunFile

BATCH = 64  # samples, one microbatch
HELD_OUT = 256
TAIL = 5  # last evaluations, whose mean is a run's loss
EVERY = 5  # steps between evaluations


@dataclass(frozen=True, slots=True)
class Losses:
    """Final held-out losses in nats, one for each order of samples."""

    synchronous: list[float]
    delayed: list[float]

    @property
    def difference(self) -> float:
        return statistics.mean(self.delayed) - statistics.mean(self.synchronous)

    @property
    def noise(self) -> float:
        """Spread of the synchronous runs over the orders of samples."""
        return max(self.synchronous) - min(self.synchronous)


def run_file(delayed: bool) -> RunFile:
    return RunFile(
        run="staleness",
        seed=3,
        model=ModelSection(d_model=48, heads=1, layers=2, context=32),
        pipeline=PipelineSection(microbatch=BATCH),
        optimizer=OptimizerSection(name="adamw", lr=3.0e-3, warmup_steps=10, delayed=delayed),
        batch=BatchSection(target_samples=BATCH),
        data=DataSection(path="stdlib", shuffle_buffer=2_000),
    )


def compared(steps: int, orders: int) -> Losses:
    """Train `orders` runs of each kind. The n-th runs of both kinds have the same samples."""
    held_out = samples_of(run_file(False), "all", "valid").take(HELD_OUT)
    batches = [samples_of(run_file(False), f"order {n}").take(BATCH * steps).split(BATCH) for n in range(orders)]
    return Losses(*([trained(delayed, each, held_out) for each in batches] for delayed in (False, True)))


def trained(delayed: bool, batches: tuple[Tensor, ...], held_out: Tensor) -> float:
    stage, losses = ServedStage(run_file(delayed), 0, "cpu"), []
    for step in range(len(batches)):
        for ahead in (step, step + 1) if delayed and not step else (step + delayed,):
            if ahead < len(batches):
                stage.backward(ahead, Mb("t", ahead), pair(batches[ahead]), ())
        stage.commit(step, stage.vector(), BATCH)
        if (left := len(batches) - 1 - step) < TAIL * EVERY and left % EVERY == 0:
            losses.append(stage.loss(*pair(held_out)).loss_sum / HELD_OUT)
    return statistics.mean(losses)


def pair(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Split samples [B, L + 1] into inputs and targets, [B, L] each."""
    return samples[:, :-1].to(torch.int64).contiguous(), samples[:, 1:].to(torch.int64).contiguous()
