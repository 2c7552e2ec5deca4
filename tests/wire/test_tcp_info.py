"""The system's counts of a connection: bytes count when they come, also while a packet before them is missing."""

from __future__ import annotations

from dataclasses import fields

import pytest

from peerd.wire.tcp_info import TcpInfo


def info(**counts: int) -> TcpInfo:
    return TcpInfo(**dict.fromkeys((field.name for field in fields(TcpInfo)), 0) | counts)


@pytest.mark.parametrize(
    ("came", "data_segs_in", "counted"),
    [
        (14_480, 10, 14_480),
        (14_480, 11, 14_480),  # one of them was the repeat that was waited for
        (500_000, 10, 14_480),  # it let go what had come before
        (0, 10, 0),
        (300, 3, 300),  # small ones
    ],
)
def test_what_waited_for_a_lost_packet_does_not_count_as_come_now(came: int, data_segs_in: int, counted: int) -> None:
    before = info(bytes_received=70_000, data_segs_in=900, segment_bytes=1448)
    now = info(bytes_received=70_000 + came, data_segs_in=900 + data_segs_in, segment_bytes=1448)
    assert now.received_since(before) == counted


def test_where_packets_are_handed_over_as_one_the_bytes_in_order_are_all_that_is_known() -> None:
    before = info(bytes_received=650_000, data_segs_in=10, segment_bytes=1448)
    assert info(bytes_received=975_000, data_segs_in=15, segment_bytes=1448).received_since(before) == 325_000


def test_the_count_of_packets_may_start_again() -> None:
    before = info(data_segs_in=(1 << 32) - 4, segment_bytes=1448)
    assert info(bytes_received=8_000, data_segs_in=6, segment_bytes=1448).received_since(before) == 8_000


def test_packets_that_came_for_nothing_took_the_line_like_others() -> None:
    counts = {"header_bytes": 52, "segment_bytes": 1448}
    before = info(segs_in=100, segs_refused=(1 << 32) - 2, segs_out=50, bytes_repeated=1448, **counts)
    now = info(segs_in=110, segs_refused=1, segs_out=55, bytes_repeated=4344, **counts)
    assert now.overhead_since(before) == (5 * 52 + 2896, 10 * 52 + 3 * 1448)
