"""The tensors that a call with a microbatch may bring, sans-IO: judged by frame headers, before they are received.

Whatever the stage, a frame has tokens or targets [samples, tokens] of whole numbers, or an activation or gradient
[samples, tokens, d_model] in the run's dtype. So what a call makes a stage peer receive, decode and compute is bounded
by the run file: no more samples than a microbatch has, no more tokens than the context. Which of both forms is due, and
exactly how many samples, the stage checks. Hostile input: headers of any content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from peerd.core.errors import Refused
from peerd.core.frame import DTYPES, FrameHeader, TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import HELD_PADDING_BYTES, RPC_MESSAGE_FRAME_BYTES
from peerd.core.run.runfile import RunFile
from peerd.machine.rpc.declaration import Declaration

_FRAMES: Final = 2  # of a call: the input; and the output's gradient or the targets
_TOKEN_BYTES: Final = 8


class MicrobatchShapes:
    """The shapes of one run's microbatches."""

    def __init__(self, run: RunFile) -> None:
        self._samples = run.pipeline.microbatch
        self._tokens, self._width, self._dtype = run.model.context, run.model.d_model, run.model.dtype

    def bound(self, declared: Declaration) -> Declaration:
        """The declaration of calls that bring a microbatch: two frames, the largest are activations, or tokens."""
        each = max(self._width * DTYPES[self._dtype].itemsize, _TOKEN_BYTES)
        size = _FRAMES * self._samples * self._tokens * each + HELD_PADDING_BYTES
        size = min(size, RPC_MESSAGE_FRAME_BYTES)
        return replace(declared, frames=_FRAMES, frame_bytes=size, rows=self._samples)

    def objection(self, peer: PeerId, headers: Sequence[FrameHeader | TensorFrame]) -> Refused | None:
        """The reason to refuse a call with such frames; None: each may be part of a microbatch."""
        return next((Refused(fault) for header in headers if (fault := self._fault(header))), None)

    def _fault(self, header: FrameHeader | TensorFrame) -> str:
        shape, floats = header.shape, DTYPES[header.dtype].floating
        form = [self._width] if floats else []
        if len(shape) != 2 + floats or list(shape[2:]) != form or (floats and header.dtype != self._dtype):
            found = f"a frame of {header.dtype} {list(shape)}"
            return f"{found}; expected [samples, tokens] or {self._dtype} [samples, tokens, {self._width}]"
        if not 1 <= shape[0] <= self._samples:
            return f"a frame of {shape[0]} samples; allowed: {self._samples} samples"
        if not 1 <= shape[1] <= self._tokens:
            return f"a frame of {shape[1]} tokens; a sample has up to {self._tokens} tokens"
        return ""
