"""Check of an expert's answer: the requested rows, the run's shape, dtype and code, and neither NaN nor infinity.

An invalid answer is a ProtocolViolation. The size limit of an answer follows from the requested rows, so that nothing
larger is received. A single NaN in an average would ruin the training.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

from peerd.codec.format.blockwise import BLOCKS, CODES, SCALE_BYTES, scale_count
from peerd.codec.format.frame import DTYPES, TensorFrame
from peerd.core.errors import ProtocolViolation
from peerd.core.work import Worker
from peerd.rpc.rpc import Answer

_AT_ONCE_BYTES: Final = 256 << 10  # a tenth of a millisecond
# Exponent bits of the encoded words; if all are set, the value is NaN or infinity.
_EXPONENTS: Final = {"float32": ("<u4", 0x7F80_0000), "bfloat16": ("<u2", 0x7F80), "float16": ("<u2", 0x7C00)}
_WORDS: Final = {"bf16": "bfloat16", "fp16": "float16"}


class AnswerCheck:
    """Checks answers of one kind: their shape per row, dtype and code, and that all values are finite."""

    def __init__(self, shape: tuple[int, ...], dtype: str, code: str, worker: Worker) -> None:
        self._shape, self._dtype, self._code, self._worker = shape, dtype, code, worker

    def most_bytes(self, rows: int) -> int:
        """The size limit of an answer's frame, in bytes."""
        count = rows * math.prod(self._shape)
        scales = SCALE_BYTES * (scale_count(count, min(BLOCKS)) + 1)  # and their checksum
        return DTYPES[self._dtype].itemsize * count + scales

    async def check(self, answer: Answer[Any], rows: int) -> None:
        """Raise ProtocolViolation unless the answer has exactly one frame as requested."""
        if len(answer.frames) != 1:
            raise ProtocolViolation(f"an answer with {len(answer.frames)} frames")
        frame = answer.frames[0]
        if frame.shape != (rows, *self._shape) or frame.dtype != self._dtype:
            asked = f"{self._dtype} {[rows, *self._shape]}"
            raise ProtocolViolation(f"an answer of {frame.dtype} {list(frame.shape)}; expected {asked}")
        if frame.coding not in ("none", self._code):
            raise ProtocolViolation(f"an answer in code {frame.coding}; the run's is {self._code}")
        if frame.lossless:
            raise ProtocolViolation("a compressed answer, which runs with experts never request")
        small = memoryview(frame.payload).nbytes <= _AT_ONCE_BYTES
        finite = is_finite(frame) if small else await self._worker.run(partial(is_finite, frame), name="check answers")
        if not finite:
            raise ProtocolViolation("an answer with NaN or infinity")


def is_finite(frame: TensorFrame) -> bool:
    """True if a frame that is not compressed contains neither NaN nor infinity; for blockwise codes, checks the
    scales.
    """
    import numpy as np

    word, data = _WORDS.get(frame.coding, frame.dtype), memoryview(frame.payload)
    if frame.coding in CODES:
        word, data = "float32", data[: SCALE_BYTES * scale_count(math.prod(frame.shape), frame.block)]
    if word not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[word]
    return not bool(((np.frombuffer(data, dtype=kind) & exponent) == exponent).any())
