"""Declarations: what a method requires of its callers, the most that one call may use, and the callers' shares.

A method cannot be registered without one. The server checks each call against it before it receives the call's frames:
bytes, rows, membership, and the shares by peer, place and network. Each module that serves methods lists their
declarations in a dictionary `DECLARED`, from which `scripts/method_table.py` makes the table in peerd/SECURITY.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from peerd.core.limits import RPC_CALLS, RPC_CALLS_PER_PEER, RPC_DEADLINE_S, RPC_DEFAULT_BODY_BYTES
from peerd.wire.budget.book import Bounds, shared_out


class Shows(StrEnum):
    """What a caller must prove; the values are for display.

    The server checks membership. For `CHECKED_BEFORE_FRAMES` the method's `objection` checks the proof in the call's
    body; for the others the handler checks it before it does anything for the call.
    """

    NOTHING = "nothing"
    MEMBERSHIP = "membership"
    GRANT = "a grant"
    TICKET = "a ticket of ours"
    CONDUCTOR = "that it conducts"
    ROUND = "a part in the round"
    OWNER = "its signature as owner"


CHECKED_BEFORE_FRAMES: Final = frozenset({Shows.GRANT, Shows.TICKET, Shows.CONDUCTOR})
# A call with one of these proofs belongs to the current round: it and its frames may wait for others' work.
IN_ROUND: Final = frozenset({Shows.GRANT, Shows.TICKET, Shows.ROUND})


class Needs(StrEnum):
    """An amount that depends on the run's model: the run file or the model sets it when the method is registered."""

    MICROBATCH = "a microbatch"
    EXPERT_BATCH = "an expert's batch"
    STATE = "a state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What one method requires and allows. Calls beyond it are refused, or answered with Overloaded."""

    shows: Shows
    rows: int | Needs | None  # samples per frame, its first dimension, or None if its frames are not samples
    memory_bytes: int | Needs  # memory for one call, besides its message and its answer
    device_s: float | Needs  # seconds of this machine's computing device for one call
    body_bytes: int = RPC_DEFAULT_BODY_BYTES  # of a request or part
    frames: int = 0  # of a request or part
    frame_bytes: int = 0  # payloads of these frames together
    calls_per_peer: int = RPC_CALLS_PER_PEER  # concurrent calls of one peer
    calls: int = RPC_CALLS  # concurrent calls of all peers together
    deadline_s: float = RPC_DEADLINE_S  # longer timeouts of callers are cut to this
    fetches: bool = False  # the handler fetches data from its caller, which may occupy its slot without sending any

    @property
    def share(self) -> Bounds:
        """Bounds of concurrent calls: of one peer, place and network, and the number reserved for members."""
        return shared_out(self.calls, self.calls_per_peer)

    @property
    def in_round(self) -> bool:
        """True if an accepted call belongs to the current round; then its caller need not keep a least rate."""
        return self.shows in IN_ROUND

    def objection(self, body_bytes: int, frames: int, frame_bytes: int, rows: int = 0) -> str | None:
        """Reason to refuse such a message, or None if it is allowed. `rows`: largest first dimension of its frames."""
        if body_bytes > self.body_bytes:
            return f"a body of {body_bytes} bytes; allowed: {self.body_bytes}"
        if frames > self.frames:
            return f"a message of {frames} frames; allowed: {self.frames}"
        if isinstance(self.rows, int) and rows > self.rows:
            return f"a frame of {rows} samples; allowed: {self.rows} samples"
        if frame_bytes > self.frame_bytes:
            return f"frames of {frame_bytes} bytes; allowed: {self.frame_bytes}"
        return None
