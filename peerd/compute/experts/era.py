"""Era of a microbatch: the parameters of the trunk that all its segments use.

In a synchronous run these are the current parameters, or in a delayed run those of the previous step. With an
asynchronous trunk, parameters change while a microbatch waits for experts, so it uses a snapshot: when a step changes
the parameters, they are copied once for all microbatches that began with them, and the copy is freed with the last of
these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor

from peerd.compute.model.served_stage import Stale

new_load = itertools.count(1).__next__  # numbers the states that trunks load, uniquely in this process


class TooOld(Stale):
    """The parameters of a microbatch are older than an asynchronous trunk allows."""


class Snapshot:
    """Flat parameters of one step; `flat` is None until a step has changed them."""

    __slots__ = ("__weakref__", "flat")

    def __init__(self) -> None:
        self.flat: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Era:
    """The parameters of a microbatch: those after `at` global steps, with load number `loads`."""

    at: int
    loads: int
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)
