"""A trainer's work with experts in words, for the details column of `peerd status`."""

from __future__ import annotations

from typing import Any

from peerd.commands.status.role_words import details


def said(**experts: Any) -> str:
    return " | ".join(details({"role": "trainer", "experts": experts}))


def test_what_became_of_calls_to_experts_is_one_phrase() -> None:
    told = said(
        updates=12,
        in_flight=64,
        began_again={"too_few_experts": 2, "network": 1},
        staleness={"mean": 1.25, "most": 7},
        calls={"lost_updates": 4},
    )
    expected = "12 updates of experts, 1.25 stale on average, 7 at most, 64 microbatches on their way, 3 begun again, "
    assert told == expected + "4 updates lost with their hosts"


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert said(updates=0, in_flight=0, began_again={}, staleness={"mean": 0.0, "most": 0}, calls={}) == (
        "0 updates of experts"
    )


def test_a_figure_of_that_name_of_another_role_is_a_figure() -> None:
    assert list(details({"role": "mine", "experts": 5})) == ["experts 5"]
