"""A large state over real connections: one donor is lost half-way, one lies, and nothing begins anew."""

from __future__ import annotations

import pytest

from tests.kit.statepeers import download


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.no_watchdog("four peers, and the threads of two workers, share one interpreter")
@pytest.mark.parametrize("lose_by", ["", "SIGKILL", "SIGSTOP"])
async def test_a_state_of_64_mb_comes_from_three_donors_of_whom_one_is_lost_and_one_lies(lose_by: str) -> None:
    outcome = await download(64_000_000, lose_by)
    report = outcome.report
    assert outcome.right
    assert report.liars == [outcome.liar]
    assert any(outcome.liar[-6:] in note and "wrong digest" in note for note in outcome.notes)
    assert 0.5 <= outcome.lost_at_share < 0.6
    assert report.by_donor[outcome.lost] > 0
    # Asked again is what was under way at the two, and what was tried of the dead one until it was given up.
    assert report.asked <= report.pieces + 3 * 8
    assert sum(report.by_donor.values()) <= report.pieces + 8
