"""Path choice: the better way wins, nothing flaps, and both sides of a link take the same one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.path_selection import Path, PathKind, choose

rtts = st.none() | st.floats(0.0001, 2)
paths = st.builds(Path, st.sampled_from(PathKind), rtts, st.floats(0, 100), st.booleans())


def path(way: PathKind, rtt_s: float | None = None, at: float = 0.0, *, ours: bool = True) -> Path:
    return Path(way, rtt_s, at, ours)


@given(st.lists(paths, min_size=1, max_size=4), st.booleans())
def test_a_relayed_path_is_used_only_when_there_is_no_other(found: list[Path], prefer_ours: bool) -> None:
    for current in (None, *range(len(found))):
        number, why = choose(found, current, prefer_ours=prefer_ours)
        assert why
        if found[number].way == PathKind.RELAYED:
            assert all(path.way == PathKind.RELAYED for path in found)


@given(st.lists(paths, min_size=1, max_size=4), st.booleans())
def test_what_was_chosen_once_is_chosen_again_while_nothing_changes(found: list[Path], prefer_ours: bool) -> None:
    """Two of one kind aside, whose order the peer ids decide, a choice is a place of rest."""
    distinct = list({path.way: path for path in found}.values())
    number, _ = choose(distinct, None, prefer_ours=prefer_ours)
    for _ in range(3):
        again, _ = choose(distinct, number, prefer_ours=prefer_ours)
        assert again == number


@given(st.lists(paths, min_size=2, max_size=2), st.floats(0.0, 0.2))
def test_a_round_trip_that_wavers_a_little_moves_nobody(found: list[Path], share: float) -> None:
    if found[0].way == found[1].way or None in (found[0].rtt_s, found[1].rtt_s):
        return
    number, _ = choose(found, None, prefer_ours=True)
    loser = found[1 - number]
    assert loser.rtt_s is not None
    found[1 - number] = replace(loser, rtt_s=loser.rtt_s - min(0.009, share * 0.1 * loser.rtt_s))
    assert choose(found, number, prefer_ours=True)[0] == number


@given(st.floats(0, 2.9), st.booleans(), st.sampled_from(PathKind))
def test_both_sides_take_the_same_of_two_links_dialed_at_once(apart_s: float, first_ours: bool, way: PathKind) -> None:
    here = [path(way, at=10.0, ours=first_ours), path(way, at=10.0 + apart_s, ours=not first_ours)]
    there = [replace(one, ours=not one.ours) for one in here]
    mine, why = choose(here, 0, prefer_ours=True)
    theirs, _ = choose(list(reversed(there)), None, prefer_ours=False)
    assert here[mine].ours
    assert mine == 1 - theirs
    assert apart_s == 0 or mine == 0 or "at the same time" in why


@pytest.mark.parametrize("ours", [(True, True), (True, False), (False, True), (False, False)])
def test_a_later_link_replaces_one_that_may_be_dead(ours: tuple[bool, bool]) -> None:
    for prefer_ours in (False, True):
        links = [path(PathKind.DIRECT, at=0, ours=ours[0]), path(PathKind.DIRECT, at=60, ours=ours[1])]
        assert choose(links, 0, prefer_ours=prefer_ours)[0] == 1


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (path(PathKind.RELAYED, 0.01), path(PathKind.PUNCHED, 0.9)),
        (path(PathKind.RELAYED), path(PathKind.DIRECT)),
        (path(PathKind.PUNCHED, 0.05), path(PathKind.DIRECT, 0.05)),
        (path(PathKind.DIRECT), path(PathKind.LOCAL)),
        (path(PathKind.LOCAL, 0.2), path(PathKind.DIRECT, 0.03)),
    ],
)
def test_a_clearly_better_way_is_moved_to_and_said_to_be(worse: Path, better: Path) -> None:
    number, why = choose([worse, better], 0, prefer_ours=True)
    assert number == 1
    assert "better than" in why
    assert choose([worse, better], 1, prefer_ours=False)[0] == 1
