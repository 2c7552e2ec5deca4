"""Era of a microbatch: the parameters of the trunk that all its segments are computed with.

In a synchronous run these are the parameters of now, or in a delayed run of the step before. With an asynchronous trunk
the parameters go on while a microbatch waits for experts, so it holds a snapshot: a copy of the parameters is made when
a step changes them, once for all microbatches that began with them, and is freed with the last of these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor

from peerd.compute.model.served_stage import Stale

new_load = itertools.count(1).__next__  # a number for each state that a trunk takes; no two trunks share one


class TooOld(Stale):
    """The parameters of a microbatch are further behind than an asynchronous trunk allows."""


class Snapshot:
    """Parameters of one step, flat; `flat` is None until a step has changed them."""

    __slots__ = ("__weakref__", "flat")

    def __init__(self) -> None:
        self.flat: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Era:
    """The parameters that a microbatch is computed with: those of `at` global steps, since they were loaded last."""

    at: int
    loads: int
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)
