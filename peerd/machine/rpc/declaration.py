"""Declarations: what a method asks of its callers, the most that one call may take, and its callers' shares.

A method cannot be registered without one. The server checks each call against it before the call's frames are received:
bytes, rows, membership, and the shares by peer, place and network. Each module that serves methods lists their
declarations in a dictionary `DECLARED`; the table in peerd/SECURITY.md is made of these (`scripts/method_table.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from peerd.core.limits import RPC_CALLS, RPC_CALLS_PER_PEER, RPC_DEADLINE_S, RPC_DEFAULT_BODY_BYTES
from peerd.machine.budget.book import Bounds, shared_out


class Shows(StrEnum):
    """What a caller must show; the values are how people read them.

    The server checks membership. `CHECKED_BEFORE_FRAMES` is the method's objection to check, by the call's body; the
    others its handler checks, before it does anything for the call.
    """

    NOTHING = "nothing"
    MEMBERSHIP = "membership"
    GRANT = "a grant"
    TICKET = "a ticket of ours"
    CONDUCTOR = "that it conducts"
    ROUND = "a part in the round"
    OWNER = "its signature as owner"


CHECKED_BEFORE_FRAMES: Final = frozenset({Shows.GRANT, Shows.TICKET, Shows.CONDUCTOR})
# A call that has shown one of these belongs to the round under way: it waits for others' work, and so do its frames.
IN_ROUND: Final = frozenset({Shows.GRANT, Shows.TICKET, Shows.ROUND})


class Needs(StrEnum):
    """An amount that grows with the run's model: the run file or the model sets it when the method is registered."""

    MICROBATCH = "a microbatch"
    EXPERT_BATCH = "an expert's batch"
    STATE = "a state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What one method asks and takes. Calls beyond it are refused, or answered with Overloaded."""

    shows: Shows
    rows: int | Needs | None  # samples of each frame, its first dimension; None: its frames are not samples
    memory_bytes: int | Needs  # held for one call, beside its message and its answer
    device_s: float | Needs  # of this machine's computing device, for one call
    body_bytes: int = RPC_DEFAULT_BODY_BYTES  # of a request or part
    frames: int = 0  # of a request or part
    frame_bytes: int = 0  # payloads of these frames together
    calls_per_peer: int = RPC_CALLS_PER_PEER  # at once
    calls: int = RPC_CALLS  # at once, all peers together
    deadline_s: float = RPC_DEADLINE_S  # callers that would wait longer are cut to this
    fetches: bool = False  # the handler fetches from its caller: a caller that gives nothing holds its place in vain

    @property
    def share(self) -> Bounds:
        """Calls at once: of one peer, place and network, and those that are kept for members."""
        return shared_out(self.calls, self.calls_per_peer)

    @property
    def in_round(self) -> bool:
        """True when a call, once it is taken, belongs to the round under way: its caller need keep no least rate."""
        return self.shows in IN_ROUND

    def objection(self, body_bytes: int, frames: int, frame_bytes: int, rows: int = 0) -> str | None:
        """Reason to refuse such a message, or None if it is allowed. `rows`: the most that one of its frames has."""
        if body_bytes > self.body_bytes:
            return f"a body of {body_bytes} bytes; allowed: {self.body_bytes}"
        if frames > self.frames:
            return f"a message of {frames} frames; allowed: {self.frames}"
        if isinstance(self.rows, int) and rows > self.rows:
            return f"a frame of {rows} samples; allowed: {self.rows} samples"
        if frame_bytes > self.frame_bytes:
            return f"frames of {frame_bytes} bytes; allowed: {self.frame_bytes}"
        return None
