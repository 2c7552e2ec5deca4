"""Stage peers that call a microbatch not finite: who is asked next, when two agree, how often one alone counts."""

from __future__ import annotations

from peerd.pipeline.routes.second_opinion import LoneReports, SecondOpinion


def test_another_peer_is_asked_once_where_there_is_one() -> None:
    opinion = SecondOpinion()
    opinion.say(1, "a")
    assert opinion.asks_another(1, ["a", "b", "c"])
    assert not opinion.asks_another(1, ["a"])
    assert not opinion.asks_another(1, [])
    opinion.say(1, "b")
    assert not opinion.asks_another(1, ["c"]), "two are enough"
    opinion.say(2, "d")
    assert opinion.asks_another(2, ["e"]), "of each stage"
    assert opinion.accused == [(1, "a"), (1, "b"), (2, "d")]
    assert opinion.said_by(0) == set()


def test_two_peers_agree_unless_one_peer_brought_both_the_input() -> None:
    opinion = SecondOpinion()
    opinion.say(1, "a")
    assert not opinion.is_agreed(1)
    opinion.say(1, "a")
    assert not opinion.is_agreed(1), "it has only said it again"
    opinion.say(1, "b")
    assert opinion.is_agreed(1), "the trainer brought the input"
    opinion.say(2, "c", "a")
    opinion.say(2, "d", "a")
    assert not opinion.is_agreed(2), "a may have spoilt it"
    opinion.say(3, "c", "a")
    opinion.say(3, "d", "b")
    assert opinion.is_agreed(3)


def test_the_word_of_a_single_peer_counts_a_bounded_number_of_times_a_step() -> None:
    words = LoneReports(16)
    assert [words.take(0) for _ in range(10)] == [True] * 8 + [False] * 2
    assert words.take(1), "another step"
    many = LoneReports(800)
    assert sum(many.take(0) for _ in range(800)) == 100
