"""Validation of a fetched state: converts it to tensors after the checks that a member can make without other peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from peerd.codec.tensors import all_finite
from peerd.messages.swarm import Position
from peerd.model.frozen_state import MappedRoom
from peerd.model.stage.served_stage import state_of
from peerd.state.snapshot import StateItem

_PIECE_VALUES: Final = 1 << 20


def state_at(position: Position, items: Sequence[StateItem]) -> dict[str, Tensor]:
    """The state as tensors that share memory with `items`. Raises ValueError if it contains another step than
    `position`.
    """
    state = state_of((item.name, item.dtype, item.shape, item.payload) for item in items)
    if int(state["step"]) != position.step:
        raise ValueError(f"the state offered as that of step {position.step} says it is of step {int(state['step'])}")
    return state


def checked(position: Position, items: Sequence[StateItem], room: MappedRoom | None = None) -> dict[str, Tensor]:
    """Like `state_at`, but also raises ValueError if a tensor has values that are not finite.

    `room` is the mapped memory that contains `items`, if any. Its pages are returned to the system once checked.
    """
    state = state_at(position, items)
    bad = next((name for name, tensor in state.items() if not _is_finite(tensor, room)), None)
    if bad is not None:
        raise ValueError(f"tensor {bad} of the downloaded state is not finite")
    return state


def _is_finite(tensor: Tensor, room: MappedRoom | None) -> bool:
    for piece in torch.split(tensor.reshape(-1), _PIECE_VALUES):
        if not all_finite(piece):
            return False
        if room is not None:
            room.used(piece.nbytes)
    return True
