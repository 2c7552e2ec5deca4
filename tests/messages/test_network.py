"""Messages of the network's map have the bytes that were agreed; reports stay small; no number is not one."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import (
    LINE_BYTES_PER_S,
    NETWORK_AGE_S,
    NETWORK_PART_PAIRS,
    NETWORK_REPORT_PAIRS,
    NETWORK_RTT_S,
)
from peerd.core.varint import encode_varint
from peerd.messages.encoding import Message, decode, encode
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport, PairFigures

RUN = bytes(range(16))
GOLDEN = Path(__file__).parents[1] / "golden" / "network_v1.bin"
FIGURES = PairFigures("12D3KooWa", 0.025, 1.25e6, 2.5e6, 3.0, 60.0, True, False)


def messages() -> list[Message]:
    pairs = [MappedPair(0, 1, 0.025, 1.25e6, 2.5e6, 60.0), MappedPair(1, 2, 0.1, 0.0, 1e9, 0.0, True, True, False)]
    return [
        NetworkReport(RUN, [FIGURES, PairFigures("x")]),
        NetworkMapRequest(RUN),
        NetworkMapRequest(RUN, "a", "b"),
        NetworkPart(["a", "b", "c"], pairs, 3, False),
        NetworkPart([], [], 0, False),
    ]


def test_messages_survive_their_encoding_and_look_as_they_always_did() -> None:
    raws = [encode(message) for message in messages()]
    assert [decode(type(message), raw) for message, raw in zip(messages(), raws, strict=True)] == messages()
    assert b"".join(encode_varint(len(raw)) + raw for raw in raws) == GOLDEN.read_bytes()


def test_every_message_of_the_map_is_among_the_golden_ones() -> None:
    made = {kind for kind in Message.__subclasses__() if kind.__module__ == NetworkReport.__module__}
    assert made == {type(message) for message in messages()}


def test_the_largest_messages_stay_small() -> None:
    name = "x" * 64
    figures = PairFigures(name, NETWORK_RTT_S, LINE_BYTES_PER_S, LINE_BYTES_PER_S, NETWORK_AGE_S, NETWORK_AGE_S, True)
    assert len(encode(NetworkReport(RUN, [figures] * NETWORK_REPORT_PAIRS))) < 8 << 10
    most = 2 * NETWORK_PART_PAIRS - 1
    pair = MappedPair(most, most, NETWORK_RTT_S, LINE_BYTES_PER_S, LINE_BYTES_PER_S, NETWORK_AGE_S, True, True, True)
    part = NetworkPart([name] * 2 * NETWORK_PART_PAIRS, [pair] * NETWORK_PART_PAIRS, 9, True)
    assert decode(NetworkPart, encode(part)) == part
    assert len(encode(part)) < 100 << 10


@pytest.mark.parametrize("field", ["rtt_s", "up_bytes_per_s", "down_bytes_per_s", "rtt_age_s", "rate_age_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_a_figure_is_a_number_within_bounds(field: str, value: float) -> None:
    bad = msgspec.structs.replace(FIGURES, **{field: value})
    with pytest.raises(ProtocolViolation):
        decode(NetworkReport, encode(NetworkReport(RUN, [bad])))


@pytest.mark.parametrize("field", ["rtt_s", "there_bytes_per_s", "back_bytes_per_s", "age_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_a_map_has_numbers_within_bounds(field: str, value: float) -> None:
    bad = msgspec.structs.replace(MappedPair(0, 0, 0.0, 0.0, 0.0, 0.0), **{field: value})
    with pytest.raises(ProtocolViolation):
        decode(NetworkPart, encode(NetworkPart(["a"], [bad], 1, False)))


def test_more_pairs_than_a_report_holds_are_refused() -> None:
    with pytest.raises(ProtocolViolation):
        decode(NetworkReport, encode(NetworkReport(RUN, [FIGURES] * (NETWORK_REPORT_PAIRS + 1))))
