"""One batch of a hosted expert, as a job for the device's thread: requests in, results out.

Synchronous. A request that cannot be computed affects only its own caller: before the model changes anything, it
reports which request is at fault, and the others are computed without it. A backward that is older than its caller
accepts is left out. Its age is measured at the beginning of the batch; the weights cannot change in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import ProtocolViolation

Frames = tuple[TensorFrame, ...]


class ExpertModel(Protocol):
    """An expert's weights and optimizer, as in `experts/model`.

    ValueError means that nothing was changed; its `index`, if it has one, is that of the request at fault.
    """

    @property
    def version(self) -> int:
        """Number of updates made."""
        ...

    def forward(self, xs: Sequence[TensorFrame]) -> list[TensorFrame]:
        """Outputs of several requests."""
        ...

    def backward(self, pairs: Sequence[tuple[TensorFrame, TensorFrame]]) -> list[TensorFrame]:
        """Input gradients of several requests; makes one update."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One request of a batch. `most_stale`: the number of updates since its forward that its caller accepts; -1:
    any.
    """

    frames: Frames
    forward_version: int = 0
    most_stale: int = -1


@dataclass(frozen=True, slots=True)
class Result:
    """One request's result: a frame and the version of the weights, or the fault of the request.

    `stale` is True if the request was only too old.
    """

    version: int
    frame: TensorFrame | None = None
    fault: str = ""
    stale: bool = False


def too_old(age: int, most_stale: int) -> str:
    """The error text for the caller of a stale backward."""
    return f"{age} updates were made since its forward; its caller accepts {most_stale}"


def compute_batch(model: ExpertModel, backward: bool, parts: Sequence[BatchPart]) -> list[Result]:
    """The results of all parts, in their order."""
    run = _backward if backward else _forward
    results = dict[int, Result]()
    if backward:
        for i, part in enumerate(parts):
            age = model.version - part.forward_version
            if 0 <= part.most_stale < age:
                results[i] = Result(model.version, fault=too_old(age, part.most_stale), stale=True)
    left = [i for i in range(len(parts)) if i not in results]
    _attempt(model, run, parts, left, results)
    return [results[i] for i in range(len(parts))]


_Run = Callable[[ExpertModel, Sequence[Frames]], list[TensorFrame]]


def _attempt(
    model: ExpertModel, run: _Run, parts: Sequence[BatchPart], left: list[int], results: dict[int, Result]
) -> None:
    """Compute the requests `left` together; then without the first faulty one; then, if there are more faults, each
    alone.
    """
    for _ in range(2):
        if not left:
            return
        try:
            frames = run(model, [parts[i].frames for i in left])
        except (ValueError, ProtocolViolation) as error:
            at = getattr(error, "index", 0 if len(left) == 1 else None)
            if not isinstance(at, int) or not 0 <= at < len(left):
                break
            results[left.pop(at)] = Result(model.version, fault=str(error))
        else:
            results |= {i: Result(model.version, frame) for i, frame in zip(left, frames, strict=True)}
            return
    for i in left:
        try:
            (frame,) = run(model, [parts[i].frames])
        except (ValueError, ProtocolViolation) as error:
            results[i] = Result(model.version, fault=str(error))
        else:
            results[i] = Result(model.version, frame)


def _forward(model: ExpertModel, frames: Sequence[Frames]) -> list[TensorFrame]:
    return model.forward([x for (x,) in frames])


def _backward(model: ExpertModel, frames: Sequence[Frames]) -> list[TensorFrame]:
    return model.backward([(x, gradient) for x, gradient in frames])
