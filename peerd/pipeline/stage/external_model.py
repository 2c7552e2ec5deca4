"""A member's external model, used instead of a stage of the run's model: the user's code computes with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from peerd.model.stage.user_model import UserModel


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A user's model. `changing` is entered around each change of its parameters.

    It waits until the user's thread does not use the parameters. Unless called with patient=True, it raises Refused
    after a time limit.
    """

    model: UserModel
    changing: Callable[[bool], AbstractAsyncContextManager[None]]
    saves: bool  # True if this member should write checkpoints
