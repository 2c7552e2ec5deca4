"""What a conductor counts of each peer's work: what the ledger held in steps that were made, bounded, and handed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sized

from hypothesis import given
from hypothesis import strategies as st

from peerd.swarm.batch.counted_work import CountedWork, PeerWork


def made(work: CountedWork, step: int, held: Mapping[str, int], brought: Mapping[str, Sized]) -> None:
    work.batch_closed(held, brought)
    work.step_made(step)


NAMES = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.tuples(NAMES, st.integers(0, 2)), st.integers(1, 9)),
        st.dictionaries(NAMES, st.integers(1, 9)),
    )
)


def test_a_step_counts_for_those_that_held_gradients_and_those_that_brought_samples() -> None:
    work = CountedWork(samples=4)
    made(work, 11, {"a/0": 2, "a/1": 1, "b/0": 1}, {"t": [7, 8], "a": {9: None}})
    assert work.of == {"a": PeerWork(12, 4), "b": PeerWork(4, 0), "t": PeerWork(0, 8)}
    assert (work.since_step, work.step) == (10, 11)


@given(STEPS)
def test_counts_are_the_sums_over_all_steps(steps: list[tuple[dict[tuple[str, int], int], dict[str, int]]]) -> None:
    work, computed, brought = CountedWork(samples=2), Counter[str](), Counter[str]()
    for step, (held, trainers) in enumerate(steps, 1):
        made(
            work,
            step,
            {f"{name}/{stage}": n for (name, stage), n in held.items()},
            {t: range(n) for t, n in trainers.items()},
        )
        for (name, _), count in held.items():
            computed[name] += 2 * count
        brought.update({name: 2 * count for name, count in trainers.items()})
    assert work.of == {name: PeerWork(computed[name], brought[name]) for name in computed | brought}
    assert work.since_step == (0 if steps else None)


def test_a_batch_whose_step_is_not_made_does_not_count() -> None:
    work = CountedWork(samples=1)
    work.batch_closed({"a/0": 5}, {"a": [1]})
    assert (work.of, work.since_step) == ({}, None)
    work.batch_closed({"b/0": 1}, {})
    work.step_made(1)
    assert work.of == {"b": PeerWork(1, 0)}
    work.step_made(2)  # no batch is counted twice
    assert work.of == {"b": PeerWork(1, 0)}


def test_nothing_is_counted_before_the_first_step() -> None:
    work = CountedWork(samples=1)
    assert (work.since_step, work.step, work.largest(9)) == (None, 0, [])


def test_those_with_the_fewest_samples_are_dropped_first() -> None:
    work = CountedWork(samples=1, most=2)
    made(work, 1, {"a/0": 3, "b/0": 1}, {"c": range(2)})
    assert work.of == {"a": PeerWork(3, 0), "c": PeerWork(0, 2)}
    made(work, 2, {"b/0": 9}, {})
    assert list(work.of) == ["b", "a"]
    assert work.largest(1) == [("b", PeerWork(9, 0))]
    assert CountedWork(samples=1)._most == 4096


def test_the_next_conductor_adds_to_what_was_counted_before() -> None:
    work = CountedWork(samples=1)
    made(work, 21, {"a/0": 1}, {})
    work.go_on_from(5, 19, [("a", PeerWork(10, 1)), ("gone", PeerWork(0, 3))])
    assert work.of == {"a": PeerWork(11, 1), "gone": PeerWork(0, 3)}
    assert (work.since_step, work.step) == (5, 21)
    fresh = CountedWork(samples=1)
    fresh.go_on_from(5, 19, [])
    assert (fresh.since_step, fresh.step) == (5, 19)


def test_a_step_that_is_made_again_after_the_run_went_back_counts_again() -> None:
    work = CountedWork(samples=1)
    for step in (31, 32, 3):
        made(work, step, {"a/0": 1}, {})
    assert work.of == {"a": PeerWork(3, 0)}
    assert (work.since_step, work.step) == (2, 3)


def test_counts_stay_within_what_a_record_holds() -> None:
    work, most = CountedWork(samples=1 << 40), (1 << 62) - 1
    work.go_on_from(0, 1, [("a", PeerWork(most, most))])
    made(work, 2, {"a/0": 1}, {"a": [1]})
    assert work.of == {"a": PeerWork(most, most)}
