"""Moshpit averaging while peers vanish: in time, the same bits in a group, and the variance that theory foretells."""

from __future__ import annotations

import math

import numpy as np
import pytest

from peerd.machine.groups import group_size
from peerd.sim.averaging import AveragingPlan, AveragingSim, RoundReport
from peerd.sim.averaging_conductor import RoundTimes
from peerd.sim.averaging_grid import grid_spread, random_spread

EARLY_S = 0.05  # whoever vanishes so soon is in nobody's sum: then the formulas are exact


def check(sim: AveragingSim) -> RoundReport:
    """One round, and what must hold after each."""
    before, values = sim.total - sim.added, dict(zip(sim.peers, sim.values, strict=True))
    report = sim.step()
    assert 0 < report.seconds <= sim.plan.times.deadline_s + 1e-9
    now = dict(zip(sim.peers, sim.values, strict=True))
    for group in sim.groups:
        assert len({group.own(name).tobytes() for name in group.committed}) <= 1
    if not sim.plan.noise:
        for name in {*report.lost, *report.kept} - {name for group in report.groups for name in group}:
            assert np.array_equal(now[name], values[name])
    # The sum over all peers moves by what lost peers left behind in their groups' means, and by nothing else.
    np.testing.assert_allclose(sim.total - sim.added, before + report.explained, rtol=0, atol=1e-9)
    return report


def assert_mean_is(samples: list[float], theory: float, within: float) -> None:
    """The mean of independent samples equals theory to 4 standard errors, and these are small enough to tell."""
    error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    print(f"measured {np.mean(samples):.5f} +- {error:.5f}, theory {theory:.5f}")
    assert error < within * theory
    assert abs(float(np.mean(samples)) - theory) < 4 * error


# --- nobody fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peers", "axes"), [(16, 1), (16, 2), (16, 4), (17, 3), (5, 2), (7, 3), (1, 1), (2, 1)])
def test_without_failures_all_have_the_same_bits_of_the_exact_mean_after_as_many_rounds_as_axes(
    peers: int, axes: int
) -> None:
    rng = np.random.default_rng(peers)
    values, weights = rng.standard_normal((peers, 32)), rng.integers(1, 100, peers).astype(float)
    sim = AveragingSim(1, AveragingPlan(peers=peers, axes=axes, fail=0, rounds=2 * axes), values, weights)
    mean = (values * weights[:, None]).sum(axis=0) / weights.sum()
    for number in range(sim.plan.rounds):
        report = check(sim)
        assert not report.lost
        assert not report.kept or peers == 1
        if number >= axes - 1:
            assert report.spread_after < 1e-30
            np.testing.assert_allclose(sim.values, np.tile(mean, (peers, 1)), rtol=0, atol=1e-13)
        if number % axes == axes - 1:  # in between, who stood in for a hole has twice as much of the same
            assert len({row.tobytes() for row in sim.values}) == 1


# --- churn ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_16_peers_of_which_a_tenth_fails_each_round_average_200_rounds_in_time() -> None:
    plan = AveragingPlan(noise=1.0)
    assert (plan.peers, plan.fail, plan.rounds) == (16, 0.1, 200)
    assert group_size(16, 0.1).rounds == plan.axes
    sim = AveragingSim(1, plan)
    reports = [check(sim) for _ in range(plan.rounds)]
    lost = sum(len(report.lost) for report in reports)
    assert abs(lost - 0.1 * 16 * 200) < 4 * math.sqrt(0.1 * 0.9 * 16 * 200)
    assert max(report.attempts for report in reports) > 1
    # Unbiased: what lost peers left behind in others' means is as often too much as too little.
    drifts = [float(x) for report in reports for x in report.explained[:-1] if x]
    assert len(drifts) > 1000
    by_round = [float(report.explained[:-1].mean()) for report in reports if report.explained.any()]
    assert abs(np.mean(by_round)) < 4 * np.std(by_round) / math.sqrt(len(by_round))
    # A few vanish when they have decided, or after others could use what they sent: at most as bad as theory.
    spread = float(np.mean([report.spread_after for report in reports[20:]]))
    assert steady(0.0) < spread < steady(0.1)
    assert sim.trace_hash() == repeated(plan)


def repeated(plan: AveragingPlan) -> str:
    again = AveragingSim(1, plan)
    again.run()
    return again.trace_hash()


def steady(fail: float) -> float:
    """Variance across 16 peers on a 4 x 4 grid that each add unit noise before every round."""
    return 15 / 16 * sum(grid_spread((4, 4), fail, rounds) for rounds in range(1, 60))


@pytest.mark.slow
@pytest.mark.parametrize("fail", [0.0, 0.1, 0.3])
def test_random_groups_mix_as_theory_says(fail: float) -> None:
    ratios: list[float] = []
    for seed in range(3):
        sim = AveragingSim(seed, AveragingPlan(fail=fail, fail_within_s=EARLY_S, noise=1.0, anew=True))
        reports = sim.run()
        assert not any(report.explained.any() for report in reports)
        ratios += [report.spread_after / report.spread_before for report in reports]
    assert_mean_is(ratios, random_spread([4] * 4, fail), within=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape"), [(2, (4, 4)), (4, (2, 2, 2, 2))])
def test_a_grid_mixes_as_theory_says(axes: int, shape: tuple[int, ...]) -> None:
    fail, rounds = 0.2, 4
    plan = AveragingPlan(axes=axes, fail=fail, fail_within_s=EARLY_S, rounds=rounds)
    ratios: list[list[float]] = [[] for _ in range(rounds)]
    for seed in range(120):
        reports = AveragingSim(seed, plan).run()
        first = 15 / 16  # expected variance of 16 standard normal values
        for t, report in enumerate(reports):
            ratios[t].append(report.spread_after / first)
    for t, samples in enumerate(ratios):
        assert_mean_is(samples, grid_spread(shape, fail, t + 1), within=0.1)


@pytest.mark.slow
def test_with_new_noise_in_each_round_the_variance_stays_where_theory_puts_it() -> None:
    batches: list[float] = []
    for seed in range(4):
        sim = AveragingSim(seed, AveragingPlan(fail_within_s=EARLY_S, noise=1.0))
        spreads = [report.spread_after for report in sim.run()]
        batches += [float(np.mean(spreads[at : at + 20])) for at in range(20, 200, 20)]
    assert_mean_is(batches, steady(0.1), within=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("fail", "deadline_s"), [(0.4, 1.2), (0.2, 0.7), (0.8, 3.0)])
def test_no_round_outlives_a_deadline_that_is_too_short_for_what_happens(fail: float, deadline_s: float) -> None:
    times = RoundTimes(deadline_s=deadline_s, patience_s=0.25, answer_s=0.2)
    sim = AveragingSim(1, AveragingPlan(fail=fail, times=times, noise=1.0, rounds=100))
    reports = [check(sim) for _ in range(sim.plan.rounds)]
    assert any(report.kept for report in reports)
    assert any(report.groups for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "axes"), [(16, 2), (13, 2), (11, 3)])
def test_peers_that_stay_away_change_the_grid_and_their_values_wait_for_them(peers: int, axes: int) -> None:
    sim = AveragingSim(2, AveragingPlan(peers=peers, axes=axes, fail=0.2, back=0.3, rounds=60))
    for _ in range(sim.plan.rounds):
        check(sim)
    calm = AveragingSim(2, AveragingPlan(peers=peers, axes=axes, fail=0.0, rounds=2 * axes))
    calm.peers = sim.peers
    calm.run()
    assert calm.spread() < 1e-25
