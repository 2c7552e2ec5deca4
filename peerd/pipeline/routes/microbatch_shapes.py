"""The tensors allowed in a call with a microbatch, sans-IO: checked by frame headers, before the data is received.

For any stage a frame contains either tokens or targets, integers [samples, tokens], or an activation or gradient
[samples, tokens, d_model] in the run's dtype. So the run file bounds what a call makes a stage peer receive, decode and
compute: at most the samples of a microbatch, and at most the tokens of the context. The stage itself checks which of
the two forms is due, and the exact number of samples. Hostile input: headers with any content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from peerd.codec.format.frame import DTYPES, FrameHeader, TensorFrame
from peerd.core.errors import Refused
from peerd.core.ids import PeerId
from peerd.core.limits import HELD_PADDING_BYTES, RPC_MESSAGE_FRAME_BYTES
from peerd.rpc.methods.declaration import Declaration
from peerd.run.runfile import RunFile

_FRAMES: Final = 2  # per call: the input, and the output's gradient or the targets
_TOKEN_BYTES: Final = 8


class MicrobatchShapes:
    """The allowed shapes of one run's microbatches."""

    def __init__(self, run: RunFile) -> None:
        self._samples = run.pipeline.microbatch
        self._tokens, self._width, self._dtype = run.model.context, run.model.d_model, run.model.dtype

    def bound(self, declared: Declaration) -> Declaration:
        """The declaration with bounds for a microbatch: two frames, as large as activations or tokens can be."""
        each = max(self._width * DTYPES[self._dtype].itemsize, _TOKEN_BYTES)
        size = _FRAMES * self._samples * self._tokens * each + HELD_PADDING_BYTES
        size = min(size, RPC_MESSAGE_FRAME_BYTES)
        return replace(declared, frames=_FRAMES, frame_bytes=size, rows=self._samples)

    def objection(self, peer: PeerId, headers: Sequence[FrameHeader | TensorFrame]) -> Refused | None:
        """Reason to refuse a call with these frames, or None if each may be part of a microbatch."""
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
