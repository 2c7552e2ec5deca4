"""Failed moves: whose word on where it could go counts, and for how long it does not."""

from __future__ import annotations

from peerd.swarm.positions.failed_moves import FailedMoves


def test_a_second_failure_costs_a_member_its_word_for_a_while_and_the_next_one_for_longer() -> None:
    moves = FailedMoves()
    moves.failed(0.0, "a/1")
    assert not moves.doubted
    moves.failed(1.0, "a/1")
    assert moves.doubted == {"a/1"}
    moves.look(60.9)
    assert moves.doubted == {"a/1"}
    before = moves.version
    moves.look(61.0)
    assert not moves.doubted
    assert moves.version > before
    moves.failed(70.0, "a/1")
    moves.look(189.9)
    assert moves.doubted == {"a/1"}, "twice as long"
    moves.arrived("a/1")
    assert not moves.doubted
    moves.failed(200.0, "a/1")
    assert not moves.doubted, "it begins anew"


def test_a_member_that_is_slow_is_doubted_after_five_tries() -> None:
    moves = FailedMoves()
    for attempt in range(4):
        moves.failed(float(attempt), "a/1", slow=True)
    assert not moves.doubted
    moves.failed(5.0, "a/1", slow=True)
    assert moves.doubted == {"a/1"}
