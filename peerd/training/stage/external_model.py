"""What a member holds in place of a stage of the run's own model: a model that somebody else computes with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from peerd.compute.model.user_model import UserModel


@dataclass(frozen=True, slots=True)
class Own:
    """`changing` is entered around each change of the model's parameters.

    It waits until whoever computes lets them go; unless it is told to be patient it may raise Refused: not now.
    """

    model: UserModel
    changing: Callable[[bool], AbstractAsyncContextManager[None]]
    saves: bool  # whether checkpoints are of use to anybody
