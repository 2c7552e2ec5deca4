"""Histories of a run's states: which batches led from the start to the state that a peer has, whatever was lost.

A swarm that loses a whole stage goes back to a restore point and makes steps again, with other batches: what was in
step 7 has no one answer. Each commit is kept under the digest of the state that it led to; from any state the way leads
back to the start. Two batches may lead to one state, such as those of the same samples once a swarm has begun anew; the
position says which of them it was. One plain torch process then makes the same steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from peerd.codec.frames import from_frame
from peerd.messages.swarm import Mb, Position, Prepare, Prepared
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import StageModule
from peerd.pipeline.stage.orders import PostOrders
from peerd.pipeline.stage.post_state import PostState
from peerd.run.runfile import RunFile
from tests.kit.exact import TOLERANCE, Batches, Sample, distance, plain_torch, replayed


@dataclass
class Part:
    """Microbatches that one attempt to average sums in one stage, each with what its peer saw of it."""

    at: dict[Mb, int] = field(default_factory=dict)  # of the parameters that each was computed with, the step
    inputs: dict[Mb, torch.Tensor] = field(default_factory=dict)  # of the first stage
    targets: dict[Mb, torch.Tensor] = field(default_factory=dict)  # of the last one

    def add(self, served: ServedStage) -> None:
        """Add what one peer holds, now that it holds what it is to contribute and no more."""
        for mb, kept in served._held.items():
            self.at[mb] = kept.at
            if served.module.first:
                self.inputs[mb] = from_frame(kept.frames[0]).long()
            if served.module.last:
                self.targets[mb] = from_frame(kept.frames[1]).long()

    def samples(self) -> dict[Mb, Sample]:
        """All of a run of one stage."""
        return {mb: (self.inputs[mb], self.targets[mb], at) for mb, at in self.at.items()}


@dataclass
class Commit:
    """One step of one stage: the state before it, the batch, and the parameters after it."""

    step: int
    before: bytes
    origin: Position
    part: Part
    after: dict[str, torch.Tensor]


class Histories:
    """All steps of this process's peers, from `watch` on."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bytes, Position], Commit] = {}  # by stage, the state after it and its position
        self._parts: dict[tuple[int, bytes], Part] = {}  # by stage and attempt
        self._brought: dict[tuple[int, bytes], set[bytes]] = defaultdict(set)  # attempts whose sums one adds further
        self._attempts: WeakKeyDictionary[PostState, bytes] = WeakKeyDictionary()  # of the sum that lies prepared

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep each step from now on."""
        part_of, average, step_of = PostOrders._part_of, PostOrders._average, PostState.step

        def noted_part(orders: PostOrders, order: Prepare) -> Any:
            given = part_of(orders, order)
            if not isinstance(given, list):
                self._parts.setdefault((order.stage, order.attempt), Part()).add(orders._state.model)
            return given

        async def noted_average(orders: PostOrders, order: Prepare, plans: Any) -> Prepared:
            if order.brings is not None and orders._ctx.host.id.text not in order.listeners:
                self._brought[order.stage, order.attempt].add(order.brings)
            prepared = await average(orders, order, plans)
            if prepared.ok:
                self._attempts[orders._state] = order.attempt
            return prepared

        async def noted_step(state: PostState, target: Position, total: Any) -> Any:
            module, before, origin = state.model.module, state.model.module.digest(), state.position
            leap = await step_of(state, target, total)
            part = self._whole(module.stage, self._attempts[state])
            made = Commit(target.step - 1, before, origin, part, parameters_of(module))
            self._made.setdefault((module.stage, module.digest(), target), made)
            return leap

        monkeypatch.setattr(PostOrders, "_part_of", noted_part)
        monkeypatch.setattr(PostOrders, "_average", noted_average)
        monkeypatch.setattr(PostState, "step", noted_step)

    def _whole(self, stage: int, attempt: bytes) -> Part:
        """The batch in an attempt's sum: what its members brought themselves, and what is in the sums they brought."""
        whole, seen, left = Part(), set[bytes](), {attempt}
        while left:
            seen.add(each := left.pop())
            left |= self._brought[stage, each] - seen
            if own := self._parts.get((stage, each)):
                whole.at |= own.at
                whole.inputs |= own.inputs
                whole.targets |= own.targets
        return whole

    def faults(self, run: RunFile, states: list[PostState]) -> list[str]:
        """Empty where all came one way, each step of it had a whole batch, and plain torch comes to the same state.

        Compared at the last step that all of them have made. Of a run that plain torch cannot follow only the ways are
        looked at: one with lossy codes, or a delayed one in several stages, where a microbatch may be of another age in
        each stage.
        """
        ways: dict[int, list[Commit]] = {}
        found = list[str]()
        for state in states:
            module, way = state.served.module, self._way(state)
            mates = ways.setdefault(module.stage, way)
            if [commit.step for commit in way] != list(range(module.step)):
                found.append(f"stage {module.stage}: step {module.step} is made of {[commit.step for commit in way]}")
            if any(one is not other for one, other in zip(way, mates, strict=False)):
                found.append(f"stage-mates of stage {module.stage} came other ways")
        if not found and ways.keys() != set(range(run.pipeline.stages)):
            found.append(f"only the stages {sorted(ways)} have a peer")
        return found or self._differences(run, ways, min(state.served.module.step for state in states))

    def _differences(self, run: RunFile, ways: dict[int, list[Commit]], steps: int) -> list[str]:
        batches, found = Batches(), list[str]()
        parts = {step: [way[step].part for way in ways.values()] for step in range(steps)}
        for step, stages in parts.items():
            if any(part.at.keys() != stages[0].at.keys() for part in stages):
                found.append(f"stages had other batches at step {step}: {[sorted(part.at) for part in stages]}")
            batches.inputs[step] = {mb: tokens for part in stages for mb, tokens in part.inputs.items()}
            batches.targets[step] = {mb: tokens for part in stages for mb, tokens in part.targets.items()}
        found += batches.faults(run.batch.target_samples // run.pipeline.microbatch, steps)
        lossy = (run.averaging.code, run.pipeline.boundary.code) != ("none", "none")
        if found or not steps or lossy or (run.optimizer.delayed and len(ways) > 1):
            return found
        if run.optimizer.delayed:
            samples = {step: part.samples() for step, (part,) in parts.items()}
            model = replayed(run, samples, steps)
        else:
            model = plain_torch(run, batches, steps)
        expected = {name: value.detach() for name, value in model.named_parameters()}
        for stage, way in ways.items():
            for name, value in way[steps - 1].after.items():
                if not (difference := distance(value, expected.pop(name))) <= TOLERANCE[run.model.dtype]:
                    found.append(f"{name} of stage {stage} differs by {difference:.2e} after step {steps}")
        return found + [f"no stage has {name}" for name in sorted(expected)]

    def _way(self, state: PostState) -> list[Commit]:
        """The commits that led to a peer's state, in order, from the start or from a state that nobody made here."""
        way: list[Commit] = []
        module = state.served.module
        at, position = module.digest(), state.position
        while (commit := self._made.get((module.stage, at, position))) is not None:
            way.append(commit)
            at, position = commit.before, commit.origin
        return way[::-1]


def parameters_of(module: StageModule) -> dict[str, torch.Tensor]:
    """Copies of a stage's parameters, by their names in the whole model."""
    state = module.state().items()
    return {name.removeprefix("param/"): value for name, value in state if name.startswith("param/")}
