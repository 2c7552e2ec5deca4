"""PowerSGD: of each matrix of a gradient travel two thin factors, whose product comes near the sum of all members'.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
One power iteration a round, begun where the last one ended: all sum P = M Q, make its columns orthonormal, sum
Q = M' P, and step with P Q'. Both are linear in M, so the sums over members are those of the summed matrix. M is the
gradient and what was missed before: a member keeps M - P (M' P)' of its own, whatever the others brought (the paper's
error feedback; all members' residuals add up to what the sum misses). Tensors of one dimension, and those whose
factors would not be smaller, travel whole in the first sum.

Q belongs to the state of the stage: newcomers download it and checkpoints keep it, since it is what all rounds so far
have left, and only with the same Q do all mean the same by P. At the start it is a function of (seed, name, shape).
What must come out the same everywhere (orthonormal columns, P Q') is made element by element of sums that everyone
has, without a BLAS, whose order of adding is its own; products with our own gradient may differ. A round changes
nothing before `settle`: what it would leave lies in its `FactoredSum`, so one that fails, or is repeated, never was.
Synchronous; one thread at a time. Hostile sums: averaging lets only finite ones pass. Whatever they are, the columns
are of length one or zero, and the total is finite.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peerd.compute.flat import FlatLayout
from peerd.core.run.runfile import AveragingSection

Vector = np.ndarray[Any, np.dtype[Any]]

_TAG: Final = "powersgd/"
_DEPENDENT: Final = 1e-12  # of a column's length: less is left of one that the others make up, in double precision
_BLOCK_ELEMENTS: Final = 1 << 17  # of a product under way: with the factor that is added, it fits into a core's cache


class Matrix(NamedTuple):
    """One tensor that travels as factors: `rows` x `columns` values from `begin` of the flat gradient."""

    name: str
    begin: int
    rows: int
    columns: int
    rank: int
    left: int  # where P, rows x rank, lies in the first vector
    right: int  # where Q, columns x rank, lies in the second


class Whole(NamedTuple):
    """A piece of the flat gradient that travels as it is, at `at` of the first vector."""

    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class FactoredSum:
    """Result of a round: the sum as all have it, and what stays behind once the step with it is made."""

    total: Vector
    rights: Sequence[Vector] | None  # the next Q of each matrix; None: as it was
    missed: Sequence[Tensor]  # the next residual of each matrix


class PowerSgd:
    """One member's coding of flat gradients of `layout`. `rank` columns of each matrix travel, or fewer if it is small.

    Memory: two copies of the matrices of a gradient, besides the total.
    """

    def __init__(self, layout: FlatLayout, rank: int, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._count = layout.count
        self._matrices, self._wholes, self.elements = sort_out(layout, rank)  # elements of the first and second sum
        self._starts = [_start(matrix, seed, dtype) for matrix in self._matrices]
        self._rights = [torch.from_numpy(start.copy()) for start in self._starts]
        self._residuals: Sequence[Tensor] | None = None  # None: all zeros
        self._spare: Sequence[Tensor] | None = None
        self._sent: Sequence[Tensor] = ()  # of the round under way: M, then what is missed of it
        self._lefts: list[Vector] = []
        self._first: Vector = np.empty(0)

    def state(self) -> dict[str, Tensor]:
        """Q by name: the live tensors themselves, columns x rank."""
        return {_TAG + matrix.name: right for matrix, right in zip(self._matrices, self._rights, strict=True)}

    def outline(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of what `state` gives."""
        return [(name, right.dtype, right.shape) for name, right in self.state().items()]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over Q of a state that was checked, and forget the residual."""
        for name, right in self.state().items():
            right.copy_(state[name])
        self.forget()

    def residual(self) -> Vector:
        """The residual so far, yet to be sent, as a flat gradient."""
        found: Vector = np.zeros(self._count, _numpy(self._dtype))
        for matrix, residual in zip(self._matrices, self._residuals or (), strict=False):
            found[matrix.begin : matrix.begin + residual.numel()] = residual.numpy().reshape(-1)
        return found

    def begin(self, gradient: Vector) -> Vector:
        """A round begins: our part of the first sum. `gradient` is flat, and not needed any more."""
        flat = torch.from_numpy(gradient)
        first = torch.empty(self.elements[0], dtype=self._dtype)
        self._sent, self._spare = self._with_residuals(flat), None
        for matrix, sent, right in zip(self._matrices, self._sent, self._rights, strict=True):
            first[matrix.left : matrix.left + matrix.rows * matrix.rank] = torch.mm(sent, right).view(-1)
        for whole in self._wholes:
            first[whole.at : whole.at + whole.end - whole.begin] = flat[whole.begin : whole.end]
        vector: Vector = first.numpy()
        return vector

    def project(self, first: Vector) -> Vector:
        """All have summed the first vector: our part of the second."""
        self._first, self._lefts = first, []
        second = torch.empty(self.elements[1], dtype=self._dtype)
        for matrix, sent in zip(self._matrices, self._sent, strict=True):
            end = matrix.left + matrix.rows * matrix.rank
            left = orthonormal(first[matrix.left : end].reshape(matrix.rows, matrix.rank))
            self._lefts.append(left)
            basis = torch.from_numpy(left)
            right = torch.mm(sent.T, basis)
            second[matrix.right : matrix.right + right.numel()] = right.view(-1)
            sent.addmm_(basis, right.T, alpha=-1)
        vector: Vector = second.numpy()
        return vector

    def finish(self, second: Vector) -> FactoredSum:
        """All have summed the second vector, too."""
        total: Vector = np.empty(self._count, self._first.dtype)
        for whole in self._wholes:
            total[whole.begin : whole.end] = self._first[whole.at : whole.at + whole.end - whole.begin]
        rights = []
        for matrix, left, start in zip(self._matrices, self._lefts, self._starts, strict=True):
            size = matrix.columns * matrix.rank
            right = _bounded(second[matrix.right : matrix.right + size].reshape(matrix.columns, matrix.rank))
            target = total[matrix.begin : matrix.begin + matrix.rows * matrix.columns]
            multiply(left, right, target.reshape(matrix.rows, matrix.columns))
            rights.append(orthonormal(right, start))
        self._first, self._lefts = self._first[:0].copy(), []  # the memory of sums is used again
        return FactoredSum(total, rights, self._sent)

    def alone(self, gradient: Vector) -> FactoredSum:
        """A round without others: nothing has to travel, so nothing is missed."""
        flat = torch.from_numpy(gradient)
        total = flat.clone()
        missed = self._with_residuals(flat)
        self._spare = None
        for matrix, sent in zip(self._matrices, missed, strict=True):
            total[matrix.begin : matrix.begin + sent.numel()] = sent.view(-1)
            sent.zero_()
        return FactoredSum(total.numpy(), None, missed)

    def settle(self, ready: FactoredSum) -> None:
        """The step with this round's total was made."""
        for right, new in zip(self._rights, ready.rights or (), strict=False):
            right.copy_(torch.from_numpy(new))
        self._spare, self._residuals = self._residuals, ready.missed

    def forget(self) -> None:
        """The parameters are no longer those that the residual was meant for."""
        self._spare, self._residuals = self._residuals, None

    def _with_residuals(self, flat: Tensor) -> Sequence[Tensor]:
        """M of each matrix, in buffers of their own: what is added in which order does not depend on `flat`'s place."""
        found = self._spare or [torch.empty(m.rows, m.columns, dtype=self._dtype) for m in self._matrices]
        residuals = self._residuals or itertools.repeat(None)
        for matrix, sent, residual in zip(self._matrices, found, residuals, strict=False):
            sent.copy_(flat[matrix.begin : matrix.begin + sent.numel()].view_as(sent))
            if residual is not None:
                sent.add_(residual)
        return found


def low_rank_of(averaging: AveragingSection, layout: FlatLayout, dtype: torch.dtype, seed: int) -> PowerSgd | None:
    """The coding that a run wants for gradients of this layout; None: another one."""
    return PowerSgd(layout, averaging.rank, dtype, seed) if averaging.code == "powersgd" else None


def sort_out(layout: FlatLayout, rank: int) -> tuple[list[Matrix], list[Whole], tuple[int, int]]:
    """Division of tensors into those that travel as factors and those that travel whole, and the elements of the first
    and the second vector.

    A tensor of more than two dimensions is a matrix of its first one and all others.
    """
    matrices: list[Matrix] = []
    spans: list[tuple[int, int]] = []
    begin = left = right = 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        end = begin + shape.numel()
        rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        narrow = min(rank, rows, columns)
        if len(shape) > 1 and narrow * (rows + columns) < rows * columns:
            matrices.append(Matrix(name, begin, rows, columns, narrow, left, right))
            left, right = left + rows * narrow, right + columns * narrow
        elif end > begin:
            spans.append((begin, end))
        begin = end
    wholes = []
    for begin, end in spans:
        wholes.append(Whole(begin, end, left))
        left += end - begin
    return matrices, wholes, (left, right)


def orthonormal(columns: Vector, instead: Vector | None = None) -> Vector:
    """An orthonormal basis of the columns' span, [n, r], in their dtype; the same bits wherever numbers are IEEE's.

    Gram and Schmidt, twice, in double precision. A column that the ones before it make up becomes the one of
    `instead`, without them, or zeros.
    """
    found = columns.T.astype(np.float64, order="C")
    for k in range(len(found)):
        if not _made_unit(found, k) and instead is not None:
            found[k] = instead[:, k]
            _made_unit(found, k)
    basis: Vector = np.ascontiguousarray(found.T).astype(columns.dtype)
    return basis


def _made_unit(rows: Vector, k: int) -> bool:
    """Row `k` without its parts along the ones before, at length one; False, and zeros, when nothing of it is left."""
    row, before = rows[k], rows[:k]
    largest = np.abs(row).max(initial=0.0)
    if largest > 0:
        row /= largest  # so that no square leaves the range of numbers
        whole = _length(row)
        for _ in range(2):  # what rounding leaves of the others in a short remainder, the second time takes out
            along = np.add.reduce(before * row, axis=1)
            row -= np.add.reduce(before * along[:, None], axis=0)
        left = _length(row)
        if left > _DEPENDENT * whole:
            row /= left
            return True
    row.fill(0)
    return False


def _length(row: Vector) -> float:
    return float(np.sqrt(np.add.reduce(row * row)))


def multiply(left: Vector, right: Vector, product: Vector) -> None:
    """left [n, r] times right' [r, m] into `product` [n, m]: each element's terms in order, each rounded by itself."""
    factors = np.ascontiguousarray(right.T)
    rows = max(1, _BLOCK_ELEMENTS // max(1, product.shape[1]))
    term = np.empty((rows, product.shape[1]), product.dtype)
    for begin in range(0, len(product), rows):
        block, weights = product[begin : begin + rows], left[begin : begin + rows]
        np.multiply(weights[:, :1], factors[0], out=block)
        for k in range(1, len(factors)):
            np.multiply(weights[:, k : k + 1], factors[k], out=term[: len(block)])
            np.add(block, term[: len(block)], out=block)


def _bounded(right: Vector) -> Vector:
    """A sum of Q so that no product with it overflows: larger values than this are a liar's."""
    most = np.finfo(right.dtype).max / (2 * right.shape[1])
    return np.clip(right, -most, most)


def _start(matrix: Matrix, seed: int, dtype: torch.dtype) -> Vector:
    """The first Q: random columns, drawn without logarithms, so that machines agree."""
    digest = hashlib.sha256(f"peerd powersgd {seed} {matrix.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    drawn: Vector = (torch.rand((matrix.columns, matrix.rank), generator=generator) - 0.5).to(dtype).numpy()
    return orthonormal(drawn)


def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
