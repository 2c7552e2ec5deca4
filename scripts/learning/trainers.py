"""Asynchronous trainers in simulated time: many batches in flight, each call to experts late, some failed.

A batch takes the trunk's parameters (all that is not an expert) of when it begins, passes through the layers of experts
and back, and adds its gradient to the trunk when it ends; experts are updated as each backward comes. Every exchange
with a layer takes an exponential time, of which a batch's whole has the mean `delay_s`. A request to an expert fails
with probability `failing`, forward and backward each by itself; then it leaves the mean, or counts as a constant. What
is computed takes no time: only the order of events matters to what is learnt.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peerd.compute.experts.expert_mixture import imbalance, mixed
from peerd.core.experts.grid import grid_of
from peerd.core.run.runfile import ExpertsSection, RunFile
from scripts.learning.expert_stack import ExpertStack

BETAS = (0.0, 0.99)  # of the trunk's Adam: what is so stale has momentum enough

Leaves = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Trunk(Protocol):
    """A model without its experts, as functions of its parameters."""

    parameters: Leaves

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor: ...

    def junction(self, leaves: Leaves, layer: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts' mean is added to, samples [N, D], scores [N, G]."""
        ...

    def loss(self, leaves: Leaves, h: Tensor, targets: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Weather:
    """What the trainers live with."""

    trainers: int
    delay_s: float  # mean, of a whole batch
    failing: float  # share of requests


@dataclass(slots=True)
class Layers:
    """The layers of experts of a run, and the columns of each expert's scores."""

    run: RunFile
    stacks: list[ExpertStack]
    columns_Ed: Tensor

    @classmethod
    def of(cls, run: RunFile) -> Layers:
        grid = grid_of(run)
        starts = [sum(grid.sides[:i]) for i in range(len(grid.sides))]
        at = [[s + c for s, c in zip(starts, grid.uid(i).at, strict=True)] for i in range(grid.places)]
        return cls(run, [ExpertStack(run, layer) for layer in range(grid.layers)], torch.tensor(at))

    @property
    def section(self) -> ExpertsSection:
        return self.run.experts or ExpertsSection()

    def best(self, scores_NG: Tensor) -> Tensor:
        """Numbers of the experts with the best scores, [N, K]."""
        whole_NE = scores_NG.detach()[:, self.columns_Ed].sum(-1)
        return whole_NE.topk(self.section.top_k, dim=1).indices


class TooFew(Exception):
    """A batch with a sample that no expert answered; it begins again."""


@dataclass(slots=True)
class _Stop:
    samples: Tensor
    experts_NK: Tensor
    came_NK: Tensor
    outputs: Tensor


class Swarm:
    """Trainers, their trunk and their experts. `failed` counts batches that had to begin again."""

    def __init__(self, trunk: Trunk, layers: Layers, weather: Weather, lr: float, seed: int) -> None:
        self.trunk, self.layers, self.weather = trunk, layers, weather
        self.failed = 0
        self.done = 0
        self.now_s = 0.0
        self._time = random.Random(f"time {seed}")
        self._luck = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(list(trunk.parameters.values()), lr=lr, betas=BETAS)

    def train(self, batches: Iterator[Batch], count: int, look: Callable[[int], None]) -> None:
        """Let `count` batches end; `look` is called after each, with their number."""
        line = [(0.0, i, self._batch(next(batches))) for i in range(self.weather.trainers)]
        each_s = self.weather.delay_s / (2 * len(self.layers.stacks))
        number = len(line)
        while self.done < count:
            self.now_s, _, one = heapq.heappop(line)
            number += 1
            try:
                next(one)
            except StopIteration:
                self.done += 1
                look(self.done)
                one = self._batch(next(batches))
            except TooFew:
                self.failed += 1
                one = self._batch(next(batches))
            wait_s = self._time.expovariate(1 / each_s) if each_s else 0.0
            heapq.heappush(line, (self.now_s + wait_s, number, one))

    @torch.no_grad()
    def loss(self, batch: Batch, measure: Callable[[Leaves, Tensor, Tensor], Tensor]) -> float:
        """What `measure` says of the trunk's last state for a batch, without delay or failures."""
        h = self.trunk.enter(self.trunk.parameters, batch[0])
        for layer, stack in enumerate(self.layers.stacks):
            residual, samples, scores = self.trunk.junction(self.trunk.parameters, layer, h)
            experts = self.layers.best(scores)
            outputs = _ask(stack, samples, experts, torch.ones_like(experts, dtype=torch.bool))
            h = residual + self._mean(scores, experts, torch.ones_like(experts, dtype=torch.bool), outputs, residual)
        return float(measure(self.trunk.parameters, h, batch[1]))

    # --- one batch ----------------------------------------------------------------------------------------------

    def _batch(self, batch: Batch) -> Iterator[None]:
        """One batch there and back; each yield is a call on its way."""
        leaves = {name: p.detach().clone().requires_grad_() for name, p in self.trunk.parameters.items()}
        h, stops, balance = self.trunk.enter(leaves, batch[0]), [], torch.zeros(())
        for layer, stack in enumerate(self.layers.stacks):
            residual, samples, scores = self.trunk.junction(leaves, layer, h)
            experts = self.layers.best(scores)
            yield
            came = self._answering(experts)
            if not bool(came.any(1).all()):
                raise TooFew
            outputs = _ask(stack, samples.detach(), experts, came).requires_grad_()
            stops.append(_Stop(samples, experts, came, outputs))
            h = residual + self._mean(scores, experts, came, outputs, residual)
            balance = balance + imbalance(scores, grid_of(self.layers.run).sides)
        total = self.trunk.loss(leaves, h, batch[1]) + self.layers.section.balance * balance
        for layer in reversed(range(len(stops))):
            stop = stops[layer]
            (slopes,) = torch.autograd.grad(total, stop.outputs, retain_graph=True)
            yield
            back = self._give(self.layers.stacks[layer], stop, slopes)
            total = total + (stop.samples * back).sum()  # so that the rest of the way back has the experts' gradients
        gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        for parameter, gradient in zip(self.trunk.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(list(self.trunk.parameters.values()), 1.0)
        self._optimizer.step()

    def _mean(self, scores: Tensor, experts: Tensor, came: Tensor, outputs: Tensor, like: Tensor) -> Tensor:
        return mixed(scores, self.layers.columns_Ed[experts], came, outputs).view_as(like)

    def _answering(self, experts_NK: Tensor) -> Tensor:
        """Which requests succeed: one request carries all the rows for one expert."""
        count = len(self.layers.columns_Ed)
        return (torch.rand(count, generator=self._luck) >= self.weather.failing)[experts_NK]

    def _give(self, stack: ExpertStack, stop: _Stop, slopes_NKD: Tensor) -> Tensor:
        """Gradients of the samples, [N, D]."""
        here = stop.came_NK & self._answering(stop.experts_NK)
        back = torch.zeros_like(slopes_NKD)
        if bool(here.any()):
            rows = stop.samples.detach()[:, None].expand_as(slopes_NKD)[here]
            back[here] = stack.backward(rows, stop.experts_NK[here], slopes_NKD[here])
        return back.sum(1)


def _ask(stack: ExpertStack, samples_ND: Tensor, experts_NK: Tensor, came_NK: Tensor) -> Tensor:
    """Outputs [N, K, D], zeros where none came."""
    outputs = torch.zeros(*experts_NK.shape, samples_ND.shape[1])
    outputs[came_NK] = stack.forward(samples_ND[:, None].expand_as(outputs)[came_NK], experts_NK[came_NK])
    return outputs
