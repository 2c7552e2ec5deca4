"""Codes of gradients: bytes, time to encode and decode, and the loss of a small model after the same samples.

Bytes and time are those of one gradient of configs/replicas.yaml's model: the median processor time of one thread to
encode it and to decode a sum. Losses are those of configs/tiny.yaml's model without stages, trained in one process for
four members, with the same samples and initial parameters for all codes. They are in nats per byte of held-out text,
after the learning rate has decayed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from peerd.codec.error_feedback import feedback_of
from peerd.codec.powersgd import Vector, low_rank_of
from peerd.data.stream import samples_of
from peerd.model.stage.stage_module import StageModule
from peerd.run.config import load_run
from peerd.run.runfile import AveragingSection, RunFile
from scripts.benchmarks._report import Figure, Report

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PEERS = 4
CODES = (
    *(AveragingSection(code="none"), AveragingSection(code="int8"), AveragingSection(code="int4")),
    *(AveragingSection(code="powersgd", rank=rank) for rank in (1, 4, 16)),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement."""

    rounds: int  # of encoding and decoding
    steps: int  # of training
    samples: int  # of one step, over all members
    valid_samples: int


QUICK = Sizes(7, 100, 32, 256)
FULL = Sizes(21, 400, 32, 256)


def name_of(averaging: AveragingSection) -> str:
    return f"powersgd_{averaging.rank}" if averaging.code == "powersgd" else averaging.code


def with_code(run: RunFile, averaging: AveragingSection) -> RunFile:
    return msgspec.structs.replace(run, averaging=averaging)


# --- one gradient -------------------------------------------------------------------------------------------------


def gradient_of(module: StageModule) -> Vector:
    drawn: Vector = torch.randn(module.layout.count, generator=torch.Generator().manual_seed(1)).numpy()
    return drawn


def cost(module: StageModule, averaging: AveragingSection, rounds: int) -> tuple[int, float]:
    """Bytes sent for one gradient, and median seconds of a member to encode it and decode a sum."""
    gradient, feedback = gradient_of(module), feedback_of(averaging)
    low_rank = low_rank_of(averaging, module.layout, module.dtype, 0)
    sent_bytes, spent_s = gradient.nbytes, []
    for _ in range(rounds):
        vector, began = gradient.copy(), time.thread_time()
        if low_rank is not None:
            first = low_rank.begin(vector)
            second = low_rank.project(first)
            low_rank.settle(low_rank.finish(second))
            sent_bytes = first.nbytes + second.nbytes
        elif feedback is not None:
            feedback.begin(vector)
            frame = feedback.encode(0, vector)
            feedback.decode(frame, vector)
            feedback.settle()
            sent_bytes = frame.payload.nbytes
        spent_s.append(time.thread_time() - began)
    return sent_bytes, statistics.median(spent_s)


# --- learning -----------------------------------------------------------------------------------------------------


def added(vectors: Sequence[Vector]) -> Vector:
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def sums_of(run: RunFile, module: StageModule) -> Callable[[Sequence[Vector]], Vector]:
    """Function from the members' gradients to the sum with which all members step."""
    factors = [low_rank_of(run.averaging, module.layout, module.dtype, run.seed) for _ in range(PEERS)]
    codings = [feedback_of(run.averaging) for _ in range(PEERS + 1)]  # the last one is of the sums

    def of_factors(gradients: Sequence[Vector]) -> Vector:
        members = [member for member in factors if member is not None]
        first = added([member.begin(gradient) for member, gradient in zip(members, gradients, strict=True)])
        second = added([member.project(first) for member in members])
        found = [member.finish(second) for member in members]
        for member, ready in zip(members, found, strict=True):
            member.settle(ready)
        return found[0].total

    def coded(number: int, vector: Vector) -> Vector:
        coding = codings[number]
        if coding is None:
            return vector
        coding.begin(vector)
        seen = np.empty_like(vector)
        coding.encode(0, vector, seen)
        coding.settle()
        return seen

    def of_parts(gradients: Sequence[Vector]) -> Vector:
        return coded(PEERS, added([coded(number, gradient) for number, gradient in enumerate(gradients)]))

    return of_parts if factors[0] is None else of_factors


def loss_after(run: RunFile, samples: Tensor, valid: Tensor) -> float:
    """Train on `samples` [steps, samples per step, tokens + 1]. Returns the loss in nats per byte of `valid`."""
    module = StageModule(run, 0)
    total = sums_of(run, module)
    for batch in samples:
        gradients = []
        for part in batch.chunk(PEERS):
            module.backward(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            gradients.append(module.gradient().numpy())
            module.clear()
        module.apply(torch.from_numpy(total(gradients)) / len(batch))
    return module.loss(valid[:, :-1].contiguous(), valid[:, 1:].contiguous())


def tiny(steps: int) -> RunFile:
    run = load_run(CONFIGS / "tiny.yaml").run
    optimizer = msgspec.structs.replace(run.optimizer, total_steps=steps)
    return msgspec.structs.replace(run, pipeline=msgspec.structs.replace(run.pipeline, stages=1), optimizer=optimizer)


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    torch.set_num_threads(1)
    module, run = StageModule(load_run(CONFIGS / "replicas.yaml").run, 0), tiny(sizes.steps)
    samples = samples_of(run, "bench").take(sizes.steps * sizes.samples)
    samples = samples.reshape(sizes.steps, sizes.samples, -1)
    valid = samples_of(run, "all", "valid").take(sizes.valid_samples)
    sections = []
    for averaging in CODES:
        name, words = name_of(averaging), name_of(averaging).replace("_", ", rank ")
        sent_bytes, spent_s = cost(module, averaging, sizes.rounds)
        loss = loss_after(with_code(run, averaging), samples, valid)
        sections.append(
            [
                Figure(f"{name}_bytes", f"{words}: a gradient of {module.layout.count:,} values", sent_bytes, "B", 0),
                Figure(f"{name}_ms", f"{words}: to code it and decode a sum", spent_s * 1e3, "ms", 1),
                Figure(f"{name}_loss", f"{words}: loss after {sizes.steps} steps", loss, "nats per byte", 3),
            ]
        )
    return Report("codes of gradients", sections, "bytes and time: configs/replicas.yaml; loss: configs/tiny.yaml")
