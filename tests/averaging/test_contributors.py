"""Which members contribute gradients: the choice beside the best of all choices, for slow lines and weak devices."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from peerd.averaging.contributors import ContributorChoice, ContributorRates, StepCost, least_s_per_byte
from peerd.averaging.shares import MemberLine, Mode, NoSplit, shares

MBIT = 125_000.0


def member(name: str, mbit: float | None, per_s: float = 1.0, mode: Mode = Mode.NODE) -> ContributorRates:
    rate = mbit * MBIT if mbit is not None else None
    return ContributorRates(MemberLine(name, mode, rate, rate), per_s)


def random_members(rng: random.Random, count: int) -> list[ContributorRates]:
    """Members with lines and paces of very different sizes; some only dial out."""
    return [
        member(
            f"p{i}",
            10 ** rng.uniform(-0.5, 3),
            10 ** rng.uniform(-2, 1),
            Mode.CLIENT if i and rng.random() < 0.2 else Mode.NODE,
        )
        for i in range(count)
    ]


def by_shares_s(members: list[ContributorRates], contributing: frozenset[str], cost: StepCost) -> float:
    """The duration of a step by `shares`, written without the choice."""
    lines = []
    for one in members:
        if one.peer in contributing:
            lines.append(one.line)
        elif one.line.mode is Mode.NODE:
            lines.append(MemberLine(one.peer, Mode.AUX, one.line.up_bytes_per_s, one.line.down_bytes_per_s))
    computing_s = cost.microbatches / sum(one.per_s for one in members if one.peer in contributing)
    averaging_s = 0.0
    if len(contributing) > 1:
        try:
            averaging_s = shares(lines).xi_s_per_byte * cost.vector_bytes
        except NoSplit:
            return math.inf
    return max(computing_s, averaging_s) if cost.overlaps else computing_s + averaging_s


@pytest.mark.parametrize("seed", range(120))
def test_the_step_is_within_a_twentieth_of_the_best_choice_of_all(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    members = random_members(rng, rng.randint(2, 7))
    cost = StepCost(rng.randint(1, 64), 10 ** rng.uniform(5, 9), overlaps=seed % 3 == 0)
    names = [one.peer for one in members]
    every = [frozenset(found) for count in range(2, len(names) + 1) for found in combinations(names, count)]
    best_s = min(by_shares_s(members, found, cost) for found in every)
    choice = ContributorChoice(members, cost)
    rests = choice.choose()
    found = frozenset(names) - rests
    assert by_shares_s(members, found, cost) <= 1.05 * best_s
    assert by_shares_s(members, choice.best(), cost) == pytest.approx(best_s, rel=0.01)
    assert choice.step_s(found) == pytest.approx(by_shares_s(members, found, cost), rel=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_its_rounds_last_as_long_as_those_of_the_division_into_shares(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    members = random_members(rng, rng.randint(2, 30))
    nodes = [one.line.up_bytes_per_s or 0.0 for one in members if one.line.mode is Mode.NODE]
    helpers = [10 ** rng.uniform(4, 8) for _ in range(rng.randint(0, 5))]
    lines = [one.line for one in members]
    lines += [MemberLine(f"h{i}", Mode.AUX, rate, rate) for i, rate in enumerate(helpers)]
    slowest = 1 / min(one.line.up_bytes_per_s or 0.0 for one in members)
    found = max(slowest, least_s_per_byte(nodes, helpers, len(members)))
    assert found == pytest.approx(shares(lines).xi_s_per_byte, rel=1e-6)


def test_one_line_of_a_megabit_among_fifteen_of_a_hundred_rests_and_costs_nothing() -> None:
    fast = [member(f"fast{i:02}", 100.0) for i in range(15)]
    cost = StepCost(microbatches=1000, vector_bytes=72e6)
    choice = ContributorChoice([*fast, member("slow", 1.0)], cost)
    assert choice.choose() == {"slow"}
    without = [one.peer for one in fast]
    assert choice.step_s(without) <= 1.05 * ContributorChoice(fast, cost).step_s(without)
    assert choice.step_s([*without, "slow"]) > 8 * choice.step_s(without)


def test_a_slow_line_contributes_where_its_samples_are_worth_more_than_its_time() -> None:
    members = [*(member(f"p{i}", 100.0) for i in range(3)), member("slow", 5.0, per_s=10.0)]
    assert ContributorChoice(members, StepCost(640, 1e7)).choose() == frozenset()


def test_a_member_that_computes_next_to_nothing_sums_for_the_others_instead() -> None:
    members = [*(member(f"p{i}", 20.0) for i in range(4)), member("weak", 20.0, per_s=0.001)]
    choice = ContributorChoice(members, StepCost(200, 50e6))
    assert choice.choose() == {"weak"}
    four = [f"p{i}" for i in range(4)]
    assert choice.step_s(four) < ContributorChoice(members[:4], StepCost(200, 50e6)).step_s(four), "it does not help"


def test_a_member_that_costs_nothing_contributes() -> None:
    members = [*(member(f"p{i}", 100.0) for i in range(4)), member("weak", 100.0, per_s=0.01)]
    assert ContributorChoice(members, StepCost(64, 1e5)).choose() == frozenset()


def test_nobody_rests_for_a_gain_of_a_few_hundredths_and_nobody_comes_and_goes() -> None:
    cost = StepCost(64, 1e6)

    def choice(mbit: float) -> ContributorChoice:
        return ContributorChoice([*(member(f"p{i}", 100.0) for i in range(3)), member("slow", mbit)], cost)

    without = {"p0", "p1", "p2"}
    border = next(
        mbit / 100 for mbit in range(1, 10_000) if choice(mbit / 100).choose() == frozenset()
    )  # the narrowest line that is not put to rest
    assert choice(border * 0.9).choose() == {"slow"}
    between = choice(border * 1.001)
    assert between.choose(frozenset({"slow"})) == {"slow"}, "it would come back, and rest again"
    needed = between.needed_bytes_per_s(without, "slow")
    assert needed is not None
    assert needed > border * MBIT
    assert choice(needed / MBIT * 1.01).choose(frozenset({"slow"})) == frozenset()


def test_no_line_is_enough_for_a_member_that_sums_nothing_and_computes_next_to_nothing() -> None:
    members = [*(member(f"p{i}", 20.0) for i in range(5)), member("weak", 20.0, 0.0001, Mode.CLIENT)]
    choice = ContributorChoice(members, StepCost(30, 50e6))
    assert choice.needed_bytes_per_s({f"p{i}" for i in range(5)}, "weak") is None


def test_an_unknown_line_and_an_unknown_pace_are_usual_ones() -> None:
    members = [*(member(f"p{i}", 100.0) for i in range(3)), member("new", None, per_s=0.0)]
    assert ContributorChoice(members, StepCost(16, 72e6)).choose() == frozenset()
    nobody_knows = [member(f"p{i}", 100.0, per_s=0.0) for i in range(3)] + [member("slow", 1.0, per_s=0.0)]
    assert ContributorChoice(nobody_knows, StepCost(16, 72e6)).choose() == frozenset()


def test_where_no_line_is_known_nobody_rests() -> None:
    members = [member(f"p{i}", None, per_s=10.0**-i) for i in range(5)]
    choice = ContributorChoice(members, StepCost(16, 1e9, other_computing_s=100.0))
    assert choice.choose() == frozenset()
    assert choice.choose(frozenset({"p3", "p4"})) == frozenset()


def test_where_another_stage_sets_the_pace_nobody_rests_for_nothing() -> None:
    members = [*(member(f"p{i}", 100.0) for i in range(3)), member("slow", 5.0)]
    cost = StepCost(16, 50e6, other_averaging_s=200.0)
    assert ContributorChoice(members, cost).choose() == frozenset()
    assert ContributorChoice(members, StepCost(16, 50e6)).choose() == {"slow"}


def test_hundreds_of_members_are_weighed_with_some_hundred_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, tries = random.Random(5), 0
    choice = ContributorChoice(random_members(rng, 200), StepCost(512, 72e6))
    real = choice._step_s

    def counted(found: set[str], rates: dict[str, float]) -> float:
        nonlocal tries
        tries += 1
        return real(found, rates)

    monkeypatch.setattr(choice, "_step_s", counted)
    choice.choose()
    print(f"{tries} tries")
    assert tries < 1000
