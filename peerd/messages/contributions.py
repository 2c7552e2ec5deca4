"""Contributions to a run: each peer's own figures, the conductor's counts, and why a member rests.

The records are published for the leaderboard. `Contributed` has a peer's unverified figures; `CountedPage` has the
conductor's counts, from its ledger of the steps that were made. A publisher's name is in the record's token, which the
organizer signed for that peer; readers verify it. All values come from strangers, so they are bounded.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peerd.core.ids import Key
from peerd.core.limits import COUNTED_PAGES, COUNTED_ROWS, FORESEEABLE_S, LINE_BYTES_PER_S
from peerd.messages.encoding import Message, decode
from peerd.messages.token import Seconds, TokenData

StepSeconds = Annotated[float, msgspec.Meta(ge=0, le=FORESEEABLE_S)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Contributed(Message, frozen=True):
    """The totals of one peer in one role, over all its sessions."""

    samples: Count  # that it contributed to global steps or computed gradients of; role expert: its updates
    bytes_aggregated: Count  # of gradients that it summed for others
    seconds: Count  # of participation
    since: Seconds  # Unix time of its first participation
    token: TokenData = b""


def contributions_key(run: str) -> Key:
    """DHT key of the contributions to a run; one sub-key for each role of a peer."""
    return Key.of(f"{run}/contributions")


def decode_contributed(value: bytes) -> Contributed:
    """Decode the totals in a record's value. Raises ProtocolViolation."""
    return decode(Contributed, value)


class CountedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Samples of one peer in the steps that a conductor counted."""

    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # the peer's
    computed: Count  # samples whose gradients it held, over all stages
    brought: Count  # as a trainer


class CountedPage(Message, frozen=True):
    """A part of the conductor's counts, sorted by samples, most first. Each page is a record with its own suffix."""

    since_step: Count  # the step from which samples were counted, perhaps by an earlier conductor
    step: Count  # the step after the last counted batch
    unlisted: Count  # number of peers with too few samples for any page
    rows: Annotated[list[CountedRow], msgspec.Meta(max_length=COUNTED_ROWS)]
    token: TokenData = b""


# Suffix of each page's record, in order.
PAGE_SUFFIXES: Final = tuple(str(page).encode() for page in range(COUNTED_PAGES))


def counted_key(run: str) -> Key:
    """DHT key of the conductor's counts; one sub-key for each page."""
    return Key.of(f"{run}/ledger")


def decode_counted(value: bytes) -> CountedPage:
    """Decode the page in a record's value. Raises ProtocolViolation."""
    return decode(CountedPage, value)


class Rest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The conductor's reason why a member should rest: the predicted time of a step with the member's gradients and
    without them, in seconds.

    `needed_bytes_per_s` is the bandwidth, in the slower direction, at which the member would not delay a step; 0 if no
    bandwidth is enough because the member computes too slowly.
    """

    with_s: StepSeconds
    without_s: StepSeconds
    needed_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=LINE_BYTES_PER_S)] = 0.0
