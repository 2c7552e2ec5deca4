"""Validation of a fetched state: its tensors, after the checks that any member can make by itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peerd.compute.model.served_stage import state_of
from peerd.compute.tensors import all_finite
from peerd.core.messages.swarm import Position
from peerd.service.state.snapshot import StateItem


def state_at(position: Position, items: Sequence[StateItem]) -> dict[str, Tensor]:
    """The state, sharing memory with `items`; ValueError when its own step is another."""
    state = state_of((item.name, item.dtype, item.shape, item.payload) for item in items)
    if int(state["step"]) != position.step:
        raise ValueError(f"the state offered as that of step {position.step} says it is of step {int(state['step'])}")
    return state


def checked(position: Position, items: Sequence[StateItem]) -> dict[str, Tensor]:
    """The state, as by `state_at`; ValueError also when a tensor of it is not finite."""
    state = state_at(position, items)
    bad = [name for name, tensor in state.items() if not all_finite(tensor)]
    if bad:
        raise ValueError(f"{bad[0]} of the state offered is not finite")
    return state
