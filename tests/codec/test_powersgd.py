"""Low-rank coding of gradients: the paper's sums, nothing lost for good, the same bits for all who have the same Q."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.codec.flat import FlatLayout
from peerd.codec.powersgd import FactoredSum, PowerSgd, Vector, multiply, orthonormal, sort_out
from tests.kit.amount import examples
from tests.kit.papers import PaperPowerSgd

SHAPES = {"embed": (40, 12), "gain": (12,), "wide": (12, 30), "kernel": (9, 3, 3), "small": (3, 4), "scalar": ()}
LAYOUT = FlatLayout(tuple(SHAPES), tuple(torch.Size(shape) for shape in SHAPES.values()))
NEAR = {"float32": 1e-5, "float64": 1e-10}


def coding(rank: int = 2, dtype: str = "float32", layout: FlatLayout = LAYOUT) -> PowerSgd:
    return PowerSgd(layout, rank, getattr(torch, dtype), 7)


def gradients(seed: int, count: int, dtype: str = "float32") -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(LAYOUT.count) * 3**i).astype(dtype) for i in range(count)]


def summed(vectors: Sequence[Vector]) -> Vector:
    """In order, as averaging does."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def one_round(members: Sequence[PowerSgd], given: Sequence[Vector], settle: bool = True) -> list[FactoredSum]:
    firsts = [m.begin(g.copy()) for m, g in zip(members, given, strict=True)]
    seconds = [m.project(summed(firsts)) for m in members]
    found = [m.finish(summed(seconds)) for m in members]
    for member, ready in zip(members, found, strict=True):
        if settle:
            member.settle(ready)
    return found


def of(name: str, flat: Vector) -> Vector:
    """One tensor of a flat gradient, as a matrix."""
    place = list(SHAPES).index(name)
    begin = sum(shape.numel() for shape in LAYOUT.shapes[:place])
    shape = LAYOUT.shapes[place]
    part: Vector = flat[begin : begin + shape.numel()].reshape(shape[0] if shape else 1, -1)
    return part


def apart(a: Vector, b: Vector) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(float(np.linalg.norm(b)), 1e-30))


def same_bits(members: Sequence[PowerSgd]) -> bool:
    states = [{name: q.numpy().tobytes() for name, q in member.state().items()} for member in members]
    return all(state == states[0] for state in states)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_sums_are_those_of_the_paper_round_after_round(workers: int, dtype: str) -> None:
    members = [coding(2, dtype) for _ in range(workers)]
    factored = {"embed": (40, 12), "wide": (12, 30), "kernel": (9, 9)}
    papers = {
        name: PaperPowerSgd(members[0].state()[f"powersgd/{name}"].numpy(), workers, shape)
        for name, shape in factored.items()
    }
    for step in range(8):
        given = gradients(step, workers, dtype)
        found = one_round(members, given)
        assert len({ready.total.tobytes() for ready in found}) == 1
        assert same_bits(members)
        for name in SHAPES:
            matrices = [of(name, gradient) for gradient in given]
            expected = papers[name].sum(matrices) if name in papers else summed(matrices)
            assert apart(of(name, found[0].total), expected) < NEAR[dtype], (name, step)


def test_only_what_gets_smaller_travels_as_factors() -> None:
    matrices, wholes, (first, second) = sort_out(LAYOUT, 2)
    assert [(m.name, m.rows, m.columns, m.rank) for m in matrices] == [
        ("embed", 40, 12, 2),
        ("wide", 12, 30, 2),
        ("kernel", 9, 9, 2),
    ]
    assert second == 2 * (12 + 30 + 9)
    assert first == 2 * (40 + 12 + 9) + 12 + 3 * 4 + 1
    assert [whole.end - whole.begin for whole in wholes] == [12, 12, 1]
    assert sort_out(LAYOUT, 100)[2] == (LAYOUT.count, 0)


@settings(max_examples=examples(25), deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6),
    rank=st.integers(1, 9),
)
def test_every_value_travels_once_as_it_is_or_in_one_matrix(shapes: list[tuple[int, ...]], rank: int) -> None:
    layout = FlatLayout(tuple(f"t{i}" for i in range(len(shapes))), tuple(torch.Size(shape) for shape in shapes))
    matrices, wholes, (first, second) = sort_out(layout, rank)
    spans = sorted([(m.begin, m.begin + m.rows * m.columns) for m in matrices] + [(w.begin, w.end) for w in wholes])
    assert sum(end - begin for begin, end in spans) == layout.count
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert first + second <= layout.count
    assert first == sum(m.rows * m.rank for m in matrices) + sum(w.end - w.begin for w in wholes)
    members = [PowerSgd(layout, rank, torch.float32, 1) for _ in range(2)]
    given = [np.full(layout.count, 1.5, "float32"), np.full(layout.count, 0.5, "float32")]
    found = one_round(members, given)  # all matrices are of rank one
    assert np.abs(found[0].total - 2).max(initial=0) < 1e-5
    assert found[0].total.tobytes() == found[1].total.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_of_no_more_than_the_rank_arrives_exactly_though_no_member_has_such_a_matrix(dtype: str) -> None:
    rng = np.random.default_rng(3)
    noise, sums = rng.standard_normal((2, LAYOUT.count))
    for name in ("embed", "wide", "kernel"):
        rows, columns = of(name, sums).shape
        of(name, sums)[:] = rng.standard_normal((rows, 2)) @ rng.standard_normal((2, columns))
    given = [(sums / 2 + noise).astype(dtype), (sums / 2 - noise).astype(dtype)]
    found = one_round([coding(2, dtype), coding(2, dtype)], given)
    assert apart(found[0].total, summed(given)) < NEAR[dtype]


@settings(max_examples=examples(25), deadline=None)
@given(
    rounds=st.lists(st.sampled_from(["made", "failed early", "failed late"]), min_size=1, max_size=10),
    workers=st.integers(1, 3),
    rank=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_what_was_stepped_with_and_the_residuals_add_up_to_all_gradients(
    rounds: list[str], workers: int, rank: int, seed: int
) -> None:
    members = [coding(rank, "float64") for _ in range(workers)]
    true, stepped = np.zeros(LAYOUT.count), np.zeros(LAYOUT.count)
    for step, outcome in enumerate(rounds):
        given = gradients(seed + step, workers, "float64")
        if outcome == "failed early":
            members[0].begin(given[0].copy())
            continue
        found = one_round(members, given, settle=outcome == "made")
        if outcome == "made":
            true += summed(given)
            stepped += found[0].total
    missed = summed([member.residual() for member in members])
    assert np.abs(true - stepped - missed).max() < 1e-9


def test_a_steady_gradient_is_learnt_and_nothing_is_missed_for_good() -> None:
    """With one column for matrices of full rank: what has been stepped with is all but the last few rounds' worth."""
    member, (gradient,) = coding(1, "float64"), gradients(5, 1, "float64")
    stepped, away = np.zeros(LAYOUT.count), []
    for step in range(1, 201):
        stepped += one_round([member], [gradient])[0].total
        away.append(apart(stepped / step, gradient))
    assert away[0] > 0.5
    assert away[199] < 0.1
    assert away[199] < away[99] < away[24]


def descend(feedback: bool) -> float:
    """SGD to a matrix of full rank, in one column that a larger, useless direction takes; returns how far it ends."""
    layout = FlatLayout(("x",), (torch.Size((16, 16)),))
    member, rng = coding(1, "float32", layout), np.random.default_rng(1)
    target, x = rng.standard_normal(256).astype("float32"), np.zeros(256, "float32")
    shake = 5 * np.outer(rng.standard_normal(16), rng.standard_normal(16)).astype("float32").reshape(-1)
    for step in range(400):
        (ready,) = one_round([member], [x - target + (-1) ** step * shake])
        if not feedback:
            member.forget()
        x -= np.float32(0.02) * ready.total
    return apart(x, target)


def test_descent_in_one_column_converges_with_feedback_and_stalls_without() -> None:
    assert descend(feedback=False) > 0.9
    assert descend(feedback=True) < 0.15


@pytest.mark.parametrize("where", ["first sum", "second sum", "before the step"])
def test_a_round_that_failed_leaves_the_same_bits_to_be_sent_again(where: str) -> None:
    straight, stumbling = [coding() for _ in range(3)], [coding() for _ in range(3)]
    for step in range(4):
        given = gradients(step, 3)
        expected = one_round(straight, given)
        firsts = [m.begin(g.copy()) for m, g in zip(stumbling[:2], given, strict=False)]
        if where != "first sum":
            for member in stumbling[:2]:
                member.finish(member.project(summed(firsts)))  # without the third: other sums than those that count
        if where == "before the step":
            one_round(stumbling, [2 * g for g in given], settle=False)
        found = one_round(stumbling, given)
        assert {r.total.tobytes() for r in found} == {r.total.tobytes() for r in expected}
        assert same_bits([*straight, *stumbling])
        for a, b in zip(straight, stumbling, strict=True):
            assert a.residual().tobytes() == b.residual().tobytes()


def test_a_step_is_made_with_the_round_that_it_belongs_to_though_another_has_begun() -> None:
    members, plain = [coding(), coding()], [coding(), coding()]
    given = gradients(1, 2)
    ready = one_round(members, given, settle=False)
    one_round(plain, given)
    members[0].begin(gradients(9, 1)[0])
    one_round(members[:1], gradients(9, 1), settle=False)
    for member, one in zip(members, ready, strict=True):
        member.settle(one)
    assert same_bits([*members, *plain])
    assert members[0].residual().tobytes() == plain[0].residual().tobytes()
    again, expected = one_round(members, gradients(2, 2)), one_round(plain, gradients(2, 2))
    assert again[0].total.tobytes() == expected[0].total.tobytes()


def test_a_newcomer_with_the_state_takes_part_as_if_it_had_always_been_there() -> None:
    old = [coding(), coding()]
    for step in range(3):
        one_round(old, gradients(step, 2))
    new = coding()
    assert not same_bits([*old, new])
    new.load({name: q.clone() for name, q in old[0].state().items()})
    assert same_bits([*old, new])
    found = one_round([*old, new], gradients(7, 3))
    assert len({ready.total.tobytes() for ready in found}) == 1
    assert same_bits([*old, new])


def test_a_lone_member_misses_nothing_and_uses_its_residual_up() -> None:
    member, other = coding(), coding()
    one_round([member, other], gradients(1, 2))
    residual, (gradient,) = member.residual(), gradients(2, 1)
    assert residual.any()
    ready = member.alone(gradient.copy())
    assert np.array_equal(ready.total, gradient + residual)
    assert np.array_equal(member.residual(), residual)
    member.settle(ready)
    assert not member.residual().any()
    assert same_bits([member, other])


def test_parameters_of_another_past_forget_the_residual() -> None:
    member = coding()
    one_round([member], gradients(1, 1))
    assert member.residual().any()
    member.forget()
    assert not member.residual().any()


def test_columns_that_a_gradient_cannot_fill_are_drawn_anew() -> None:
    """Matrices of rank one, then none at all, then of full rank: no column of Q is dead by then."""
    member, (gradient,) = coding(3), gradients(4, 1)
    one_round([member], [np.ones(LAYOUT.count, "float32")])
    one_round([member], [np.zeros(LAYOUT.count, "float32")])
    member.forget()
    for q in member.state().values():
        assert np.abs((q.T @ q).numpy() - np.eye(q.shape[1])).max() < 1e-6
    one_round([member], [gradient])
    residual = of("embed", member.residual())
    assert np.linalg.matrix_rank(of("embed", gradient) - residual, tol=1e-3) == 3


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_the_largest_numbers_of_a_liar_make_a_finite_total(value: float) -> None:
    member, (gradient,) = coding(3), gradients(6, 1)
    first = member.begin(gradient)
    first[:] = value
    second = member.project(first)
    second[:] = value
    second[::2] *= -1
    ready = member.finish(second)
    assert np.isfinite(ready.total).all()
    assert ready.rights is not None
    assert all(np.isfinite(right).all() for right in ready.rights)


singles = st.floats(allow_nan=False, allow_infinity=False, width=32)
numbers = st.one_of(st.just(0.0), st.sampled_from([1.0, -1.0, 2.0]), singles)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 5).flatmap(lambda r: st.lists(st.lists(numbers, min_size=r, max_size=r), min_size=r, max_size=9)))
def test_whatever_the_columns_a_basis_is_of_unit_vectors_or_zeros(columns: list[list[float]]) -> None:
    basis = orthonormal(np.array(columns, "float32")).astype(np.float64)
    products = basis.T @ basis
    lengths = np.diag(products)
    assert (np.minimum(np.abs(lengths - 1), np.abs(lengths)) < 1e-5).all()
    assert np.abs(products - np.diag(lengths)).max() < 1e-5


def test_shared_arithmetic_does_not_depend_on_where_numbers_lie_in_memory() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((n, 5)).astype("float32") for n in (70, 3001))
    product = np.empty((70, 3001), "float32")
    multiply(left, right, product)
    assert apart(product, left.astype(np.float64) @ right.T.astype(np.float64)) < 1e-6
    for shift in range(1, 4):
        buffer = np.empty(right.size + product.size + 64, "float32")
        moved = buffer[shift : shift + right.size].reshape(right.shape)
        moved[:] = right
        again = buffer[right.size + 2 * shift :][: product.size].reshape(product.shape)
        multiply(left, moved, again)
        assert again.tobytes() == product.tobytes()
        assert orthonormal(moved).tobytes() == orthonormal(right).tobytes()


def test_the_first_q_depends_on_seed_and_name_alone_and_is_random() -> None:
    q = coding().state()
    assert same_bits([coding(), coding()])
    other = PowerSgd(LAYOUT, 2, torch.float32, 8).state()
    assert all(not torch.equal(q[name], other[name]) for name in q)
    assert sorted(q) == ["powersgd/embed", "powersgd/kernel", "powersgd/wide"]
