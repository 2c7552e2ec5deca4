"""The messages of `network/1`: measurements of the links between peers, and parts of the conductor's network map.

A stage peer, helper or trainer reports changed measurements of its own links to its run's conductor. The map is sent as
pairs, sorted by name, in several answers. Hostile input: false figures, peers that do not exist; the decoder rejects
NaN and infinity, and every list is bounded.
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
from peerd.messages.encoding import Message
from peerd.messages.microbatches import PeerText
from peerd.messages.swarm import Fingerprint

RoundTrip = Annotated[float, msgspec.Meta(ge=0, le=NETWORK_RTT_S)]  # seconds; 0: unknown
SeenRate = Annotated[float, msgspec.Meta(ge=0, le=LINE_BYTES_PER_S)]  # bytes/s; 0: unknown
Age = Annotated[float, msgspec.Meta(ge=0, le=NETWORK_AGE_S)]  # seconds
PeerIndex = Annotated[int, msgspec.Meta(ge=0, lt=2 * NETWORK_PART_PAIRS)]


class PairFigures(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's measurements of its links to `peer`."""

    peer: PeerText
    rtt_s: RoundTrip = 0.0  # minimum of the last minutes
    up_bytes_per_s: SeenRate = 0.0  # the highest rate observed, from the sender to `peer`
    down_bytes_per_s: SeenRate = 0.0
    rtt_age_s: Age = 0.0
    rate_age_s: Age = 0.0  # of the newer rate
    # True if the pair limited that rate: the reporting peer's own line could carry at least twice as much.
    up_limited: bool = False
    down_limited: bool = False


class NetworkReport(Message, frozen=True):
    """A peer's measurements of its own links: those that changed, or were not reported for a long time."""

    run: Fingerprint
    pairs: Annotated[list[PairFigures], msgspec.Meta(max_length=NETWORK_REPORT_PAIRS)]


class NetworkMapRequest(Message, frozen=True):
    """A request for the pairs after (`one`, `other`), sorted by name; two empty names request the first pairs."""

    run: Fingerprint
    one: PeerText = ""
    other: PeerText = ""


class MappedPair(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One pair of the map; its peers are indices into the answer's list of peers. Figures of 0 are unknown."""

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
    """A part of the conductor's map, which has all pairs of a small swarm, and the measured pairs of a large one."""

    peers: Annotated[list[PeerText], msgspec.Meta(max_length=2 * NETWORK_PART_PAIRS)]
    pairs: Annotated[list[MappedPair], msgspec.Meta(max_length=NETWORK_PART_PAIRS)]
    total_peers: Annotated[int, msgspec.Meta(ge=0, le=MEMBERS * 4)]
    more: bool  # there are further pairs, for the next request
