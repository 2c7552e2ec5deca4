"""Experts without weights, and frames for them: for tests of what stands between callers, hosts and vaults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from peerd.codec.format.frame import TensorFrame
from peerd.run.grid import Uid

WIDTH = 4


def frame(*rows: float, width: int = WIDTH, dtype: str = "float32") -> TensorFrame:
    """Samples that hold one value each."""
    values = np.repeat(np.array(rows, dtype)[:, None], width, axis=1)
    return TensorFrame(dtype, values.shape, values.tobytes())


def rows_of(found: TensorFrame) -> list[float]:
    """The first value of each sample."""
    return np.frombuffer(found.payload, found.dtype).reshape(found.shape)[:, 0].tolist()  # type: ignore[no-any-return]


class WrongRequest(ValueError):
    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


@dataclass
class FakeExpert:
    """Multiplies by ten and adds its version; a gradient comes back doubled. Writes down its batches.

    `seed`: text that its state keeps; "NaN" does not load. `size`: of a state, at least. `names_faults`: tells which
    request of a batch was wrong. `crashes`: fails by its own fault.
    """

    uid: Uid
    version: int = 0
    seed: str = "anew"
    size: int = 0
    names_faults: bool = True
    crashes: bool = False
    nbytes: int = 100
    batches: list[list[int]] = field(default_factory=list)  # samples of each request

    def forward(self, xs: Sequence[TensorFrame]) -> list[TensorFrame]:
        self._look(xs)
        self.batches.append([x.shape[0] for x in xs])
        return [frame(*(10 * value + self.version for value in rows_of(x))) for x in xs]

    def backward(self, pairs: Sequence[tuple[TensorFrame, TensorFrame]]) -> list[TensorFrame]:
        self._look([x for x, _ in pairs])
        self.batches.append([x.shape[0] for x, _ in pairs])
        self.version += 1
        return [frame(*(2 * value for value in rows_of(gradient))) for _, gradient in pairs]

    def snapshot(self) -> bytes:
        return f"{self.uid}|{self.seed}|{self.version}|".encode().ljust(self.size, b".")

    def load(self, data: bytes | bytearray) -> None:
        uid, seed, version, _ = data.decode().split("|")
        if seed == "NaN":
            raise ValueError("it holds NaN")
        if uid != str(self.uid):
            raise ValueError(f"a state of {uid}, not of {self.uid}")
        self.seed, self.version, self.size = seed, int(version), len(data)

    def _look(self, xs: Sequence[TensorFrame]) -> None:
        if self.crashes:
            raise RuntimeError("the device is on fire")
        for index, x in enumerate(xs):
            if not np.isfinite(rows_of(x)).all():
                message = "the samples have values that are not finite"
                raise WrongRequest(message, index) if self.names_faults else ValueError(message)


@dataclass
class FakeHosted:
    """An expert as its host has it."""

    model: FakeExpert
    generation: int = 0


_ids = itertools.count()


def request_id() -> bytes:
    return next(_ids).to_bytes(16, "big")
