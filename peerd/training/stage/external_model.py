"""External model of a member, in place of a stage of the run's own: the user's code computes with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from peerd.compute.model.user_model import UserModel


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A user's model. `changing` is entered around each change of its parameters.

    It waits until the user's thread lets them go; unless it is told to be patient it may raise Refused: not now.
    """

    model: UserModel
    changing: Callable[[bool], AbstractAsyncContextManager[None]]
    saves: bool  # True when checkpoints are of use to the user
