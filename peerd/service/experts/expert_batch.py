"""One batch of a hosted expert, as a job for the device's thread: requests in, results out.

Synchronous. A request that cannot be computed costs its own caller alone: a model says which one it was before it has
changed anything, and the rest is computed without it. A backward whose forward is older than its caller accepts is
left out, by the version that the weights have when the batch begins: nothing can come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peerd.core.errors import ProtocolViolation
from peerd.core.frame import TensorFrame

Frames = tuple[TensorFrame, ...]


class ExpertModel(Protocol):
    """An expert's weights and optimizer, as `compute/experts` has them.

    ValueError means that nothing was changed; its `index`, if it has one, is that of the request which was at fault.
    """

    @property
    def version(self) -> int:
        """Updates made."""
        ...

    def forward(self, xs: Sequence[TensorFrame]) -> list[TensorFrame]:
        """Outputs of several requests."""
        ...

    def backward(self, pairs: Sequence[tuple[TensorFrame, TensorFrame]]) -> list[TensorFrame]:
        """Gradients of several requests' samples; makes one update."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One request of a batch. `most_stale`: updates since its forward that its caller accepts; -1: any number."""

    frames: Frames
    forward_version: int = 0
    most_stale: int = -1


@dataclass(frozen=True, slots=True)
class Result:
    """One request's result: a frame and the version that it belongs to, or what is wrong with the request.

    `stale`: nothing but its age.
    """

    version: int
    frame: TensorFrame | None = None
    fault: str = ""
    stale: bool = False


def too_old(age: int, most_stale: int) -> str:
    """What the caller of a stale backward is told."""
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
    """Compute what is left together; without the first that is wrong; and each by itself when there are more."""
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
