"""Rest: the conductor's answer to a member whose gradients cost the swarm more time than they are worth."""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerd.core.limits import FORESEEABLE_S, LINE_BYTES_PER_S

Seconds = Annotated[float, msgspec.Meta(ge=0, le=FORESEEABLE_S)]


class Rest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A step's duration with the member's gradients and without them, as the conductor's model has it.

    `needed_bytes_per_s` is the rate, in its narrower direction, at which the member's line would cost nobody anything;
    0 if no line is enough, because the member computes too slowly.
    """

    with_s: Seconds
    without_s: Seconds
    needed_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=LINE_BYTES_PER_S)] = 0.0
