"""A trainer's books: nothing is counted twice, nothing is forgotten, samples return when a step did not count them."""

from __future__ import annotations

import random

import pytest

from peerd.messages.swarm import Redo, Seqs, TrainerAnswer
from peerd.swarm.batch.trainer_ledger import Begun, DropMicrobatch, Repeat, Start, TrainerLedger


def answer(step: int, admitted: list[int], **more: object) -> TrainerAnswer:
    fields: dict[str, object] = {
        "term": 1,
        "step": step,
        "taken": True,
        "admitted": admitted,
        "redo": [],
        "counted": [],
        "evaluate": False,
        "complete": False,
        "waits_for": "",
        "version": 1,
        "members": None,
        **more,
    }
    for name in ("admitted", "early", "counted", "counted_early"):
        if isinstance(numbers := fields.get(name), list):
            fields[name] = Seqs.of(numbers)
    return TrainerAnswer(**fields)  # type: ignore[arg-type]


@pytest.fixture
def books() -> TrainerLedger[str]:
    books: TrainerLedger[str] = TrainerLedger(session=1)
    books.waiting = ["a", "b", "c"]
    books.wish(2)
    return books


def started(books: TrainerLedger[str], step: int = 0) -> list[Begun[str]]:
    orders = books.answered(answer(step, books.open()), [])
    return [order.item for order in orders if isinstance(order, Start)]


def test_wishes_start_when_they_are_admitted(books: TrainerLedger[str]) -> None:
    assert [item.load for item in started(books)] == ["a", "b"]
    assert started(books) == []
    assert books.waiting == ["c"]


def test_a_wish_that_was_not_admitted_may_start_in_the_next_step(books: TrainerLedger[str]) -> None:
    first, second = books.open()
    assert [o.item.load for o in books.answered(answer(0, [first]), []) if isinstance(o, Start)] == ["a"]
    orders = books.answered(answer(1, [second], counted=[first]), [])
    assert [o.item.load for o in orders if isinstance(o, Start)] == ["b"]


def test_news_is_told_until_it_was_taken(books: TrainerLedger[str]) -> None:
    item = started(books)[0]
    books.finish(item, ["p", "q"])
    said = books.news()
    assert [(d.seq, d.holders) for d in said] == [(item.seq, ["p", "q"])]
    books.answered(answer(0, list(books.items), taken=False), said)
    assert books.news() == said
    books.answered(answer(0, list(books.items)), said)
    assert books.news() == []
    books.repeat_all()
    assert books.news() == said


def test_a_lost_gradient_is_repeated_once_on_its_stage(books: TrainerLedger[str]) -> None:
    item = started(books)[0]
    books.finish(item, ["p", "q"])
    books.answered(answer(0, list(books.items)), books.news())
    lost = answer(0, list(books.items), redo=[Redo(item.seq, 1)])
    assert books.answered(lost, []) == [Repeat(item, 1)]
    assert books.answered(lost, []) == []
    books.repeated(item, 1, "r")
    assert [d.holders for d in books.news()] == [["p", "r"]]
    assert books.tally.redone == 1


def test_what_is_to_be_repeated_and_is_here_no_more_is_named_while_the_conductor_asks_for_it(
    books: TrainerLedger[str],
) -> None:
    item = started(books)[0]
    gone = item.seq - 1
    assert books.answered(answer(0, list(books.items), redo=[Redo(gone, 0)]), []) == []
    assert books.unknown == [gone]
    assert books.answered(answer(0, list(books.items)), []) == []
    assert books.unknown == []


def test_what_was_counted_by_the_step_that_the_same_answer_closes_is_named_too(books: TrainerLedger[str]) -> None:
    item = started(books)[0]
    books.finish(item, ["p"])
    books.answered(answer(1, [], counted=[item.seq], redo=[Redo(item.seq, 0)]), books.news())
    assert books.unknown == [item.seq]


def test_a_conductor_that_names_what_is_not_there_is_not_heard(books: TrainerLedger[str]) -> None:
    item = started(books)[0]
    books.finish(item, ["p", "q"])
    books.answered(answer(0, list(books.items)), books.news())
    lies = [Redo(item.seq, 2), Redo(item.seq + 1000, 0)]
    assert books.answered(answer(0, [*books.items, 7], redo=lies), []) == []
    assert item.redoing == set()


@pytest.mark.parametrize("step", [1, pytest.param(3, id="after missed steps")])
def test_what_the_step_did_not_count_begins_again(books: TrainerLedger[str], step: int) -> None:
    a, b = started(books)
    books.finish(a, ["p", "q"])
    books.finish(b, ["p", "q"])
    orders = books.answered(answer(step, [], counted=[a.seq]), [])
    assert orders == [DropMicrobatch(a), DropMicrobatch(b)]
    assert books.waiting == ["b", "c"]
    assert (books.tally.counted, books.tally.requeued, books.tally.lost) == (1, 1, 0)


def test_an_outcome_that_nobody_knows_is_admitted_as_a_loss(books: TrainerLedger[str]) -> None:
    a, b = started(books)
    books.finish(a, ["p", "q"])
    books.answered(answer(5, [], counted=None), [])
    assert (books.tally.lost, books.tally.requeued) == (1, 1)
    assert b.load in books.waiting


def test_what_is_no_longer_admitted_is_dropped_and_begins_again(books: TrainerLedger[str]) -> None:
    a, b = started(books)
    assert books.answered(answer(0, [b.seq]), []) == [DropMicrobatch(a)]
    assert books.waiting == ["a", "c"]


def test_early_work_begins_beside_this_step_s_and_goes_on_as_the_next_one_s(books: TrainerLedger[str]) -> None:
    a, b = books.open()
    orders = books.answered(answer(0, [a], early=[b]), [])
    assert [order.item.step for order in orders if isinstance(order, Start)] == [0, 1]
    assert books.early() == [b]
    for item in books.items.values():
        books.finish(item, ["p"])
    books.answered(answer(0, [a], early=[b]), books.news())
    assert books.news() == []
    assert books.answered(answer(1, [b], counted=[a]), []) == [DropMicrobatch(Begun(a, "a", 0, True, holders=["p"]))]
    assert list(books.items) == [b]
    assert books.early() == []
    books.answered(answer(2, [], counted=[b]), [])
    assert books.tally.counted == 2


def test_a_lost_gradient_of_the_next_step_is_repeated_too(books: TrainerLedger[str]) -> None:
    a, b = books.open()
    books.answered(answer(0, [a], early=[b]), [])
    item = books.items[b]
    books.finish(item, ["p"])
    books.answered(answer(0, [a], early=[b]), books.news())
    assert books.answered(answer(0, [a], early=[b], redo=[Redo(b, 0)]), []) == [Repeat(item, 0)]


def test_what_was_begun_for_one_step_does_not_count_in_another(books: TrainerLedger[str]) -> None:
    """A conductor that knows nothing of it gives it a place in the wrong batch: its samples get another number."""
    a, b = books.open()
    books.answered(answer(0, [a], early=[b]), [])
    item = books.items[b]
    orders = books.answered(answer(0, [a, b]), [])
    assert orders == [DropMicrobatch(item)]
    assert books.waiting == ["b", "c"]


def test_whoever_missed_two_steps_learns_what_both_counted(books: TrainerLedger[str]) -> None:
    a, b = books.open()
    books.answered(answer(0, [a], early=[b]), [])
    books.answered(answer(2, [], counted=[a], counted_early=[b]), [])
    assert (books.tally.counted, books.tally.requeued, books.tally.lost) == (2, 0, 0)


def test_when_the_swarm_returns_to_an_older_step_all_begins_again(books: TrainerLedger[str]) -> None:
    a, b = books.open()
    books.answered(answer(5, []), [])
    books.answered(answer(5, [a], early=[b]), [])
    books.answered(answer(4, []), [])
    assert books.items == {}
    assert sorted(books.waiting) == ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(20))
def test_samples_of_two_steps_are_in_exactly_one_place(seed: int) -> None:
    rng = random.Random(seed)
    books: TrainerLedger[int] = TrainerLedger(session=seed)
    books.waiting = list(range(60))
    step, due, early, counted = 0, list[int](), list[int](), set[int]()
    for _ in range(400):
        books.wish(rng.randrange(1, 8))
        for seq in books.open():
            if seq not in due + early and books.items[seq].step is None and rng.random() < 0.5:
                rng.choice([due, early]).append(seq)
        if rng.random() < 0.1:  # a place is lost
            due = [seq for seq in due if rng.random() < 0.8]
            early = [seq for seq in early if rng.random() < 0.8]
        for item in list(books.items.values()):
            if item.admitted and not item.finished and rng.random() < 0.5:
                books.finish(item, ["p"])
        if rng.random() < 0.2:
            done = [item for item in books.items.values() if item.step == step and item.finished and item.seq in due]
            counted |= {item.load for item in done}
            step, due, early = step + 1, early, []
            books.answered(answer(step, due, counted=[item.seq for item in done]), [])
        else:
            books.answered(answer(step, list(due), early=early, taken=rng.random() < 0.9), books.news())
        places = [item.load for item in books.items.values()] + books.waiting
        assert len(places) == len(set(places))
        assert set(places) | counted == set(range(60))
        assert not set(places) & counted
        assert books.tally.counted == len(counted)
        assert all(item.step in (None, step, step + 1) for item in books.items.values())


def begun(early: int, due: int) -> TrainerLedger[str]:
    """With so many microbatches of the next step's batch and of this one's under way."""
    books: TrainerLedger[str] = TrainerLedger(session=1)
    books.waiting = ["text"] * (early + due)
    books.wish(early + due)
    numbers = books.open()
    books.answered(answer(0, numbers[:due], early=numbers[due:]), [])
    return books


def test_so_many_are_told_together_where_nobody_waits_for_them() -> None:
    books = begun(due=5, early=0)
    told = []
    for item in books.items.values():
        books.finish(item, ["us"])
        told.append(books.pressing(3))
        if told[-1]:
            books.answered(answer(0, list(books.items)), books.news())
    assert told == [False, False, True, False, True]  # the last: nothing is left to begin with


def test_the_last_of_this_step_s_batch_is_told_at_once() -> None:
    books = begun(due=2, early=3)
    items = list(books.items.values())
    books.finish(items[2], ["us"])
    assert not books.pressing(9)
    books.finish(items[0], ["us"])
    assert not books.pressing(9)
    books.finish(items[1], ["us"])
    assert books.pressing(9)
    books.answered(answer(0, [i.seq for i in items[:2]], early=[i.seq for i in items[2:]]), books.news())
    books.finish(items[3], ["us"])
    assert not books.pressing(9)  # others may still have something to do for this step: it does not wait for us


def test_where_one_is_told_at_a_time_each_is_told_at_once() -> None:
    books = begun(due=3, early=0)
    books.finish(next(iter(books.items.values())), ["us"])
    assert books.pressing(1)


def test_what_is_not_finite_is_dropped_with_its_samples_and_told_until_that_is_taken(books: TrainerLedger[str]) -> None:
    item, other = started(books)
    books.dismiss(item)
    assert books.not_finite == [item.seq]
    assert books.waiting == ["c"], "its samples do not come again"
    assert item.seq not in books.open()
    books.answered(answer(0, [other.seq], taken=False), [], [item.seq])
    assert books.not_finite == [item.seq]
    books.answered(answer(0, [other.seq]), [], [item.seq])
    assert books.not_finite == []
    assert books.tally.not_finite == 1


def test_what_is_not_finite_on_a_stage_that_is_done_again_is_given_back(books: TrainerLedger[str]) -> None:
    """The conductor still has it in the batch: it hears that nobody has it any more."""
    item = started(books)[0]
    books.finish(item, ["p"])
    (order,) = books.answered(answer(0, list(books.items), redo=[Redo(item.seq, 0)]), books.news())
    assert isinstance(order, Repeat)
    books.dismiss(item)
    books.answered(answer(0, list(books.items), redo=[Redo(item.seq, 0)]), [], [item.seq])
    assert books.unknown == [item.seq]
