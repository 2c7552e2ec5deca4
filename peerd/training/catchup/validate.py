"""Validation of a fetched state: its tensors, after the checks that any member can make by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from peerd.compute.frozen_state import MappedRoom
from peerd.compute.model.served_stage import state_of
from peerd.compute.tensors import all_finite
from peerd.core.messages.swarm import Position
from peerd.service.state.snapshot import StateItem

_PIECE_VALUES: Final = 1 << 20


def state_at(position: Position, items: Sequence[StateItem]) -> dict[str, Tensor]:
    """The state, sharing memory with `items`; ValueError when its own step is another."""
    state = state_of((item.name, item.dtype, item.shape, item.payload) for item in items)
    if int(state["step"]) != position.step:
        raise ValueError(f"the state offered as that of step {position.step} says it is of step {int(state['step'])}")
    return state


def checked(position: Position, items: Sequence[StateItem], room: MappedRoom | None = None) -> dict[str, Tensor]:
    """The state, as by `state_at`; ValueError also when a tensor of it is not finite. `room`: where `items` lie; what
    was checked is put out of memory.
    """
    state = state_at(position, items)
    bad = next((name for name, tensor in state.items() if not _is_finite(tensor, room)), None)
    if bad is not None:
        raise ValueError(f"{bad} of the state offered is not finite")
    return state


def _is_finite(tensor: Tensor, room: MappedRoom | None) -> bool:
    for piece in torch.split(tensor.reshape(-1), _PIECE_VALUES):
        if not all_finite(piece):
            return False
        if room is not None:
            room.used(piece.nbytes)
    return True
