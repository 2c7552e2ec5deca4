"""Contributions: what each peer says it has given to a run, what the conductor counted, and why a member gives nothing.

Records are published for the leader-board. The figures of `Contributed` are the peer's own word, those of `CountedPage`
the conductor's count of what its ledger held in the steps that were made. A publisher's name is neither: it stands in
the token that travels along, which the organizer signed for this very peer; readers of the record check that. Values
come from strangers, so all are bounded.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peerd.core.ids import Key
from peerd.core.limits import COUNTED_PAGES, COUNTED_ROWS, FORESEEABLE_S, LINE_BYTES_PER_S
from peerd.core.messages.encoding import Message, decode
from peerd.core.messages.token import Seconds, TokenData

StepSeconds = Annotated[float, msgspec.Meta(ge=0, le=FORESEEABLE_S)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Contributed(Message, frozen=True):
    """The totals of one peer in one role, over all times that it took part."""

    samples: Count  # that it brought into global steps, or whose gradients it did; of role expert: updates made
    bytes_aggregated: Count  # of gradients that it summed for others
    seconds: Count  # that it took part
    since: Seconds  # Unix time of its first part in the run
    token: TokenData = b""


def contributions_key(run: str) -> Key:
    """DHT key for the contributions to a run; one sub-key for each role of a peer."""
    return Key.of(f"{run}/contributions")


def decode_contributed(value: bytes) -> Contributed:
    """The totals in a record's value. Raises ProtocolViolation."""
    return decode(Contributed, value)


class CountedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Samples of one peer in the steps that a conductor counted."""

    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # the peer's
    computed: Count  # in each stage: those whose gradients it held
    brought: Count  # as a trainer


class CountedPage(Message, frozen=True):
    """A part of the conductor's counts, the peers with the most samples first; pages are the record's suffixes."""

    since_step: Count  # the step from which on samples were counted, perhaps by an earlier conductor,
    step: Count  # and the one that the last counted batch led to
    unlisted: Count  # number of peers that have too little for any page
    rows: Annotated[list[CountedRow], msgspec.Meta(max_length=COUNTED_ROWS)]
    token: TokenData = b""


# The suffix of each page's record, in order.
PAGE_SUFFIXES: Final = tuple(str(page).encode() for page in range(COUNTED_PAGES))


def counted_key(run: str) -> Key:
    """DHT key for the conductor's counts; one sub-key for each page."""
    return Key.of(f"{run}/ledger")


def decode_counted(value: bytes) -> CountedPage:
    """The page in a record's value. Raises ProtocolViolation."""
    return decode(CountedPage, value)


class Rest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The conductor's reason for a member to rest: how long its model of a step says that one takes with the member's
    gradients, and without them.

    `needed_bytes_per_s` is the rate, in its narrower direction, at which the member's line would cost nobody anything;
    0 if no line is enough, because the member computes too slowly.
    """

    with_s: StepSeconds
    without_s: StepSeconds
    needed_bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=LINE_BYTES_PER_S)] = 0.0
