"""The messages of `network/1`: what peers measure of the links between them, and parts of the conductor's map.

A stage peer, helper or trainer reports to its run's conductor what changed of the pairs that it is part of; the map is
told by pairs, in the order of their names, a part in each answer. Hostile input: figures that are not true, of peers
that do not exist; neither NaN nor infinity passes the decoder, and every list is bounded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from peerd.core.limits import (
    LINE_BYTES_PER_S,
    MEMBERS,
    NETWORK_AGE_S,
    NETWORK_PART_PAIRS,
    NETWORK_REPORT_PAIRS,
    NETWORK_RTT_S,
)
from peerd.core.messages.encoding import Message
from peerd.core.messages.microbatches import PeerText
from peerd.core.messages.swarm import Fingerprint

RoundTrip = Annotated[float, msgspec.Meta(ge=0, le=NETWORK_RTT_S)]  # seconds; 0: unknown
SeenRate = Annotated[float, msgspec.Meta(ge=0, le=LINE_BYTES_PER_S)]  # bytes/s; 0: unknown
Age = Annotated[float, msgspec.Meta(ge=0, le=NETWORK_AGE_S)]  # seconds
PeerIndex = Annotated[int, msgspec.Meta(ge=0, lt=2 * NETWORK_PART_PAIRS)]


class PairFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's figures of its links to `peer`."""

    peer: PeerText
    rtt_s: RoundTrip = 0.0  # the least of the last minutes
    up_bytes_per_s: SeenRate = 0.0  # the most that was seen to pass, from the sender to `peer`
    down_bytes_per_s: SeenRate = 0.0
    rtt_age_s: Age = 0.0
    rate_age_s: Age = 0.0  # of the younger rate
    # True: that rate is what the pair gave, while the sender's own line had room for twice as much.
    up_limited: bool = False
    down_limited: bool = False


class NetworkReport(Message, frozen=True):
    """A peer's figures of pairs that it is part of: those that changed, or were not told for long."""

    run: Fingerprint
    pairs: Annotated[list[PairFigures], msgspec.Meta(max_length=NETWORK_REPORT_PAIRS)]


class NetworkMapAsk(Message, frozen=True):
    """A question for the pairs that come after this one, in the order of names; "" and "": for the first."""

    run: Fingerprint
    one: PeerText = ""
    other: PeerText = ""


class MappedPair(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One pair of the map; its peers by their places in the answer's list. 0: unknown."""

    one: PeerIndex
    other: PeerIndex
    rtt_s: RoundTrip
    there_bytes_per_s: SeenRate  # from `one` to `other`
    back_bytes_per_s: SeenRate
    age_s: Age  # of the oldest of the measured figures
    rtt_estimated: bool = False
    there_estimated: bool = False
    back_estimated: bool = False


class NetworkPart(Message, frozen=True):
    """A part of the conductor's map: all pairs of a small swarm, of a large one the measured pairs."""

    peers: Annotated[list[PeerText], msgspec.Meta(max_length=2 * NETWORK_PART_PAIRS)]
    pairs: Annotated[list[MappedPair], msgspec.Meta(max_length=NETWORK_PART_PAIRS)]
    total_peers: Annotated[int, msgspec.Meta(ge=0, le=MEMBERS * 4)]
    more: bool  # there are further pairs, for the next question
