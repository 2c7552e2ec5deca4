"""A trainer's work with experts in words, for the details column of `peerd status`."""

from __future__ import annotations

from typing import Any

from peerd.status.view.role_words import details


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
    expected = "12 updates of experts, 1.25 stale on average, 7 at most, 64 microbatches in flight, 3 restarted, "
    assert told == expected + "4 updates lost with their hosts"


def test_microbatches_that_the_trunk_does_not_count_are_told_and_those_under_way_once() -> None:
    told = {"role": "trainer", "experts": {"updates": 0, "in_flight": 64, "too_old": 3}}
    told |= {"microbatches": {"counted": 8, "in_flight": 64}, "in_flight_why": "64 unless limits say otherwise"}
    phrases = set(details(told))
    assert phrases == {
        "0 updates of experts, 3 too old for the trunk",
        "8 microbatches counted, 64 in flight: 64 unless limits say otherwise",
    }


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert said(updates=0, in_flight=0, began_again={}, staleness={"mean": 0.0, "most": 0}, calls={}) == (
        "0 updates of experts"
    )


def test_a_figure_of_that_name_of_another_role_is_a_figure() -> None:
    assert list(details({"role": "mine", "experts": 5})) == ["experts 5"]


def test_a_stage_peer_says_what_it_has_and_how_microbatches_go_on() -> None:
    ways = {"12D3KooWAAAAaaaa": "direct", "12D3KooWBBBBbbbb": "trainer"}
    handover = {
        "in_flight": 12,
        "queue": 3,
        "kept_bytes": 24_000_000,
        "room_bytes": 4_000_000_000,
        "refused_full": 0,
        "next": ways,
    }
    (told,) = details({"role": "stage", "handover": handover})
    assert told.startswith("12 microbatches in flight, 3 waiting, 24.0 MB of 4.0 GB kept, ")
    assert told.endswith(", forwards to …AAAAaaaa directly, to …BBBBbbbb over the trainer")


def test_a_stage_peer_tells_what_it_does_otherwise_than_the_run_and_to_save_memory() -> None:
    role = {"role": "stage", "precision": "bf16 (limits.precision; the run's is full)", "recomputes": True}
    words = "computes in bf16 (limits.precision; the run's is full)"
    assert list(details(role)) == [words, "recomputes layers in the backward pass, to save memory"]
    assert list(details({"role": "stage", "precision": None, "recomputes": False})) == []


def test_a_trainer_says_why_it_does_not_send_more() -> None:
    told = {"role": "trainer", "microbatches": {"counted": 8, "in_flight": 5}, "in_flight_why": "all stages are full"}
    assert list(details(told)) == ["8 microbatches counted, 5 in flight: all stages are full"]


def test_a_trainer_that_waits_does_not_look_busy() -> None:
    told = {"role": "trainer", "microbatches": {"counted": 8, "in_flight": 5}, "in_flight_why": "all stages are full"}
    told |= {"waits_for": "stage 1 has no peers", "next_step_in_s": 0.0}
    assert list(details(told)) == ["8 microbatches counted, 5 in flight"]
    assert list(details(told | {"next_step_in_s": 7.0}))[-1] == "next step in about 7 s"
    assert list(details(told | {"waits_for": None}))[-1] == "next step any moment"


def test_a_stage_peer_tells_how_busy_it_is_and_where_it_goes() -> None:
    role = {"role": "stage", "busy": 0.834, "moves": "moves from stage 1 to stage 2"}
    assert list(details(role)) == ["busy 83 % of the time", "moves from stage 1 to stage 2"]
    assert list(details({"role": "stage", "busy": 0.0})) == []
