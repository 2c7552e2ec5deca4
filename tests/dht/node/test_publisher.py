"""Own records are renewed as long as they are wanted, outbid their past, and stay withdrawn."""

from __future__ import annotations

from peerd.core.ids import Key
from peerd.core.limits import RECORD_TTL_S
from peerd.dht.node.publisher import Publisher
from tests.worlds.simulation.heapsim import StandInSigner

WALL = 1_800_000_000.0
KEY = Key.of("key")


def publisher(repeat_s: float = 300.0) -> Publisher:
    return Publisher(StandInSigner(b"p" * 32), repeat_s)


def test_a_long_wish_is_served_by_leases_that_are_renewed_in_time() -> None:
    ours, wall = publisher(), WALL
    record = ours.publish(wall, KEY, b"", b"v", 3 * RECORD_TTL_S)
    assert record.expires == wall + RECORD_TTL_S
    seen = [record]
    while (due := ours.due_at()) is not None and wall < WALL + 4 * RECORD_TTL_S:
        wall = due
        assert seen[-1].tombstone or wall <= seen[-1].expires  # never after the lease has run out
        seen += ours.due(wall)
    assert max(r.expires for r in seen) == WALL + 3 * RECORD_TTL_S
    assert [r.version for r in seen] == sorted(r.version for r in seen)
    assert all(r.value == b"v" for r in seen)
    assert ours.due_at() is None


def test_a_short_record_is_offered_again_unchanged() -> None:
    ours = publisher(repeat_s=20.0)
    record = ours.publish(WALL, KEY, b"", b"v", 100.0)
    assert ours.due(WALL + 19) == []
    assert ours.due(WALL + 20) == [record]
    assert ours.due(WALL + 40) == [record]
    assert ours.due(WALL + 100) == []
    assert len(ours) == 0


def test_versions_rise_even_within_a_millisecond_and_over_a_restart() -> None:
    ours = publisher()
    versions = [ours.publish(WALL, KEY, b"", b"v", 10.0).version for _ in range(3)]
    assert versions == sorted(set(versions))
    assert publisher().publish(WALL + 1, KEY, b"", b"v", 10.0).version > versions[-1]


def test_a_later_version_that_others_hold_is_outbid() -> None:
    ours = publisher()
    record = ours.publish(WALL, KEY, b"", b"v", 10.0)
    later = ours.outbid(WALL, record, record.version + 5_000_000)
    assert later is not None
    assert later.version > record.version + 5_000_000
    assert later.value == record.value
    assert ours.outbid(WALL, record, later.version + 1) is None  # no longer our latest
    assert ours.outbid(WALL, later, 1 << 60) is None  # nobody can drive us to the end of the numbers


def test_a_tombstone_outlives_every_lease_that_was_given() -> None:
    ours = publisher()
    ours.publish(WALL, KEY, b"", b"long", 3000.0)
    ours.publish(WALL, KEY, b"", b"short", 10.0)
    gone = ours.withdraw(WALL + 1, KEY, b"")
    assert gone is not None
    assert gone.expires == WALL + 3000.0
    assert ours.withdraw(WALL + 2, KEY, b"") is None
    assert ours.own(WALL + 2, KEY) == [gone]
    assert ours.own(WALL + 3001, KEY) == []


def test_a_shorter_second_wish_ends_the_first_one_too() -> None:
    """A peer that missed the second record must not show the first one after the second has ended."""
    ours = publisher()
    ours.publish(WALL, KEY, b"", b"long", 3000.0)
    ours.publish(WALL, KEY, b"", b"short", 10.0)
    (gone,) = ours.due(WALL + 10)
    assert gone.tombstone
    assert gone.expires == WALL + 3000.0


def test_a_record_that_stays_is_not_withdrawn_with_the_others() -> None:
    ours = publisher()
    ours.publish(WALL, KEY, b"stays", b"v", 10.0, stays=True)
    ours.publish(WALL, KEY, b"goes", b"v", 10.0)
    assert [record.suffix for record in ours.withdraw_all(WALL)] == [b"goes"]
    assert [(r.suffix, r.tombstone) for r in ours.own(WALL, KEY)] == [(b"stays", False), (b"goes", True)]
    gone = ours.withdraw(WALL, KEY, b"stays")
    assert gone is not None
    assert gone.tombstone


def test_withdrawing_what_is_not_published_does_nothing() -> None:
    ours = publisher()
    assert ours.withdraw(WALL, KEY, b"") is None
    ours.publish(WALL, KEY, b"a", b"v", 10.0)
    ours.publish(WALL, KEY, b"b", b"v", 10.0)
    assert {r.suffix for r in ours.withdraw_all(WALL)} == {b"a", b"b"}
    assert ours.withdraw_all(WALL) == []
