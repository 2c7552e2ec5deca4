"""Totals: the summed gradients of the last optimizer steps, kept so that a peer that is late can make those steps.

With the same parameters and the same total, an optimizer step gives the same bits everywhere. A newcomer whose state is
a few steps old therefore needs one vector for each step instead of another state. The state that the gradients' code
keeps between steps, such as PowerSGD's Q, is sent with the total.

Invariants: at most `most_bytes` bytes and STATE_TOTALS totals are kept; the oldest is dropped first. A total is stored
under the position before its step, and sent with the position after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from peerd.codec.tensors import all_finite, dtype_name
from peerd.core.limits import STATE_TOTALS, WORTH_A_FILE_BYTES
from peerd.core.work import Worker
from peerd.messages.state import TensorSpec
from peerd.messages.swarm import Position
from peerd.model.stage.served_stage import Model, Vector, items_of, state_of
from peerd.state.snapshot import StateItem
from peerd.state.state_room import StateRoom


class StepTotal(NamedTuple):
    """One optimizer step (a leap): the position that it leads to, and the data needed to make it."""

    target: Position
    total: Vector  # the summed gradient, flat
    code: Mapping[str, Tensor] = {}  # state of the gradients' code after this step, if it keeps any

    @classmethod
    def made(cls, model: Model, target: Position, total: Vector) -> StepTotal:
        """The step that `model` has just made."""
        kept = model.low_rank.state() if model.low_rank is not None else {}
        return cls(target, total, {name: tensor.clone() for name, tensor in kept.items()})

    def make(self, model: Model, samples: int) -> None:
        """Make the step with `model`. Raises ValueError, before any change, if the data do not fit."""
        if not all(all_finite(tensor) for tensor in self.code.values()):
            raise ValueError("the state of the gradients' code that came with the total is not finite")
        model.commit(self.target.step - 1, self.total, samples)
        if model.low_rank is not None:
            model.low_rank.load(self.code)

    @staticmethod
    def outline(model: Model) -> list[TensorSpec]:
        """The tensor specs of `items` for a step of `model`."""
        kept = model.low_rank.outline() if model.low_rank is not None else []
        specs = [TensorSpec(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in sorted(kept)]
        return [model.vector_outline(), *specs]

    def put_out(self, folder: Path) -> StepTotal:
        """The same leap with its total in a file in `folder`, or in memory if the disk is full. Blocks: run it on a
        worker.
        """
        room = StateRoom(self.total.nbytes, folder)
        total = np.frombuffer(room.row, self.total.dtype)
        np.copyto(total, self.total)
        room.put_out()
        return self._replace(total=total)

    def items(self) -> list[StateItem]:
        """The leap as state items, to be sent."""
        total = StateItem("total", self.total.dtype.name, self.total.shape, self.total.data.cast("B"))
        return [total, *(StateItem(*item) for item in items_of(dict(self.code)))]

    @classmethod
    def of(cls, target: Position, items: Sequence[StateItem]) -> StepTotal:
        """The inverse of `items`. Shares the items' memory."""
        total, *code = items
        tensors = state_of((item.name, item.dtype, item.shape, item.payload) for item in code)
        return cls(target, np.frombuffer(total.payload, dtype=total.dtype), tensors)

    @property
    def nbytes(self) -> int:
        return self.total.nbytes + sum(tensor.nbytes for tensor in self.code.values())


class StepTotals:
    """The kept totals of recent steps. Shared, not copied: do not modify them. `most_bytes` may change at any time."""

    def __init__(self, most_bytes: int, most: int = STATE_TOTALS) -> None:
        self.most_bytes, self._most = most_bytes, min(most, STATE_TOTALS)
        self._leaps: dict[Position, StepTotal] = {}  # oldest first
        self._put_out: set[Position] = set()  # positions whose totals are in files

    def keep(self, before: Position, leap: StepTotal) -> None:
        """Keep the step that followed `before`."""
        self._leaps.pop(before, None)
        self._put_out.discard(before)
        self._leaps[before] = leap
        while len(self._leaps) > self._most or self.nbytes > self.most_bytes:
            del self._leaps[next(iter(self._leaps))]

    async def put_out(self, folder: Path, files: Worker) -> None:
        """Move all totals from memory to files in `folder`, one after another.

        The newest one stays in memory if it is smaller than 64 MiB.
        """
        self._put_out &= self._leaps.keys()
        newest = next(reversed(self._leaps), None)
        for before in list(self._leaps):
            if before == newest and self._leaps[before].nbytes < WORTH_A_FILE_BYTES:
                continue
            leap = self._leaps.get(before)
            if leap is None or before in self._put_out:
                continue
            moved = await files.run(partial(leap.put_out, folder), name="write a total")
            if self._leaps.get(before) is leap:
                self._leaps[before] = moved
                self._put_out.add(before)

    def forget(self) -> None:
        """Drop all totals."""
        self._leaps.clear()

    def after(self, before: Position) -> StepTotal | None:
        """The step that followed `before`, or None if it is no longer kept."""
        return self._leaps.get(before)

    @property
    def nbytes(self) -> int:
        return sum(leap.nbytes for leap in self._leaps.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the totals that were not moved to files. (If the disk was full, some moved ones are still in
        memory.)
        """
        return sum(leap.nbytes for before, leap in self._leaps.items() if before not in self._put_out)

    def __len__(self) -> int:
        return len(self._leaps)
