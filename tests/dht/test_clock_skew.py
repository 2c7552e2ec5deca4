"""Clocks agree on the median, whatever a minority says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr
from peerd.core.ids import PeerId
from peerd.dht.clock_skew import VOTES, ClockSkew

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(100)]


# Each in a network of its own.
ADDRS = [tcp_addr(f"45.{n}.0.1", 4001) for n in range(100)]


def seen_by(own: float, others: list[float], addrs: list[Multiaddr] = ADDRS) -> ClockSkew:
    """A peer whose clock is off by `own` looks at clocks that are off by these."""
    skew = ClockSkew()
    for peer, addr, other in zip(PEERS, addrs, others, strict=False):
        skew.sample(peer, addr, own, own + 0.1, other + 0.05)
    return skew


def test_a_wrong_clock_is_corrected_and_reported() -> None:
    skew = seen_by(60.0, [0.0, 0.0, 0.1])
    assert abs(skew.correction_s() + 60.0) < 0.2
    warning = skew.warning()
    assert warning is not None
    assert "ahead" in warning


def test_right_clocks_stay_right_beside_a_wrong_one() -> None:
    skew = seen_by(0.0, [0.0, 3600.0])
    assert skew.correction_s() == 0.0
    assert skew.warning() is None


def test_two_peers_cannot_say_who_is_wrong_but_say_that_they_differ() -> None:
    skew = seen_by(0.0, [10.0])
    assert skew.correction_s() == 0.0
    warning = skew.warning()
    assert warning is not None
    assert "differ by 10.0 s" in warning


def test_samples_with_long_or_negative_round_trips_do_not_count() -> None:
    skew = ClockSkew()
    skew.sample(PEERS[0], ADDRS[0], 0.0, 10.0, 99.0)
    skew.sample(PEERS[1], ADDRS[1], 0.0, -1.0, 99.0)
    assert skew.votes == 0


def test_the_shortest_round_trip_is_believed_until_it_is_contradicted() -> None:
    skew = ClockSkew()
    skew.sample(PEERS[1], ADDRS[1], 0.0, 0.0, 0.0)
    skew.sample(PEERS[0], ADDRS[0], 0.0, 0.1, 5.05)
    skew.sample(PEERS[0], ADDRS[0], 10.0, 11.0, 15.9)  # within its own error of the better sample
    assert abs(skew.measured_s() - 0.0) < 1e-9
    skew.sample(PEERS[2], ADDRS[2], 0.0, 0.1, 5.05)
    assert abs(skew.measured_s() - 2.5) < 1e-9  # median of 0, 0, 5, 5
    skew.sample(PEERS[0], ADDRS[0], 20.0, 21.0, 120.5)  # its clock was set
    assert abs(skew.measured_s() - 2.5) < 1e-9
    skew.sample(PEERS[2], ADDRS[2], 20.0, 20.1, 120.05)
    assert abs(skew.measured_s() - 50.0) < 1e-6


def test_votes_are_bounded() -> None:
    assert seen_by(0.0, [1.0] * 100).votes == VOTES


@given(offsets=st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=30))
def test_peers_that_see_the_same_clocks_correct_to_the_same_time(offsets: list[float]) -> None:
    corrected = []
    for index, own in enumerate(offsets):
        others = offsets[:index] + offsets[index + 1 :]
        corrected.append(own + seen_by(own, others).correction_s())
    assert max(corrected) - min(corrected) < 1e-6


@given(honest=st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=20), data=st.data())
def test_a_lying_minority_cannot_move_time_beyond_honest_clocks(honest: list[float], data: st.DataObject) -> None:
    lies = data.draw(st.lists(st.floats(-1e9, 1e9), max_size=len(honest) - 1))
    correction = seen_by(honest[0], honest[1:] + lies).correction_s()
    assert min(honest) - 1e-6 <= honest[0] + correction <= max(honest) + 1e-6


def test_identities_of_one_network_have_one_vote() -> None:
    crowd = [tcp_addr(f"46.0.{n}.1", 4001) for n in range(50)]
    skew = seen_by(0.0, [0.1, 0.2, *[1e12] * 50], [*ADDRS[:2], *crowd])
    assert 0.0 <= skew.correction_s() <= 0.2
    assert seen_by(0.0, [50.0] * 20, crowd).correction_s() == 0.0


def test_a_crowd_does_not_push_out_what_other_networks_said() -> None:
    crowd = [tcp_addr(f"46.0.{n}.1", 4001) for n in range(VOTES + 20)]
    skew = seen_by(0.0, [*[60.0] * 3, *[0.0] * 80], [*ADDRS[:3], *crowd])
    assert skew.networks == 4
    assert skew.correction_s() == 60.0


def test_what_no_time_zone_explains_is_shown_and_not_applied() -> None:
    skew = seen_by(0.0, [1e12] * 6)
    assert skew.correction_s() == 0.0
    warning = skew.warning()
    assert warning is not None
    assert "too far to correct: set it" in warning
    assert seen_by(0.0, [14 * 3600.0] * 6).correction_s() == 14 * 3600.0


def test_each_machine_of_a_laboratory_has_a_vote_and_this_one_has_one() -> None:
    lab = [tcp_addr(f"192.168.1.{n}", 4001) for n in range(1, 4)]
    assert abs(seen_by(60.0, [0.0] * 3, lab).correction_s() + 60.0) < 0.2
    here = [tcp_addr("127.0.0.1", 4001 + n) for n in range(6)]
    assert seen_by(60.0, [0.0] * 6, here).correction_s() == 0.0


def test_what_no_correction_mends_is_shown_for_as_long_as_records_are_refused() -> None:
    day = 86_400.0
    assert seen_by(0.0, []).uncorrected_s() == 0.0
    assert seen_by(0.0, [2.0]).uncorrected_s() == 0.0, "records bear that"
    assert abs(seen_by(0.0, [3600.0]).uncorrected_s() - 3600.0) < 0.1, "of two clocks nobody can say which is wrong"
    assert seen_by(0.0, [3600.0, 3600.0]).uncorrected_s() == 0.0, "it is corrected"
    assert abs(seen_by(0.0, [37 * day, 37 * day]).uncorrected_s() - 37 * day) < 0.1, "too far to correct"
    assert seen_by(0.0, [0.0, 37 * day]).uncorrected_s() == 0.0, "ours is right: another one shows the same"


def test_a_slow_answer_shows_a_wrong_clock_by_no_more_than_is_sure() -> None:
    heard = ClockSkew(60.0)
    heard.sample(PEERS[0], ADDRS[0], 0.0, 20.0, 18.0)  # 8 s ahead, give or take 10
    assert heard.uncorrected_s() == 0.0
    heard.sample(PEERS[0], ADDRS[0], 100.0, 120.0, 3710.0)
    assert abs(heard.uncorrected_s() - 3590.0) < 0.1
