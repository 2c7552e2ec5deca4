"""PowerSGD: each gradient matrix is sent as two thin factors, whose product approximates the sum over all members.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
A round is one power iteration that starts from the previous result: the members sum P = M Q, make its columns
orthonormal, sum Q = M' P, and step with P Q'. Both products are linear in M, so their sums over the members are those
of the summed matrix. M is the gradient plus the residual. A member's next residual is M - P (M' P)' with its own M,
independent of the others' M (the paper's error feedback; all members' residuals add up to the error of the sum).
Tensors of one dimension, and those whose factors would not be smaller, are sent uncompressed in the first sum.

Q is part of the stage's state: newcomers download it and checkpoints keep it, because it carries the progress of all
previous rounds and P has the same meaning only among members with the same Q. The initial Q is a function of (seed,
name, shape). Values that must be bitwise equal on all members (orthonormal columns, P Q') are computed element by
element from the common sums, without a BLAS, whose order of summation varies; products with the local gradient may
differ. A round changes no state before `settle`: its results are in a `FactoredSum`, so a failed or repeated round has
no effect. Synchronous, for one thread at a time. Malicious sums: averaging passes only finite values. With any finite
values the columns have length one or zero, and the total is finite.
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

from peerd.codec.flat import FlatLayout
from peerd.run.runfile import AveragingSection

Vector = np.ndarray[Any, np.dtype[Any]]

_TAG: Final = "powersgd/"
_DEPENDENT: Final = 1e-12  # relative length of the rest below which a column depends on the others, in double precision
_BLOCK_ELEMENTS: Final = 1 << 17  # of one block of a product: with the term that is added, it fits into a core's cache


class Matrix(NamedTuple):
    """A tensor that is sent as factors: `rows` x `columns` values from `begin` of the flat gradient."""

    name: str
    begin: int
    rows: int
    columns: int
    rank: int
    left: int  # offset of P, rows x rank, in the first vector
    right: int  # offset of Q, columns x rank, in the second vector


class UncompressedPiece(NamedTuple):
    """A piece of the flat gradient that is sent uncompressed, at offset `at` of the first vector."""

    begin: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class FactoredSum:
    """Result of a round: the sum that all members have, and the state to keep once the step with it is made."""

    total: Vector
    rights: Sequence[Vector] | None  # the next Q of each matrix, or None if unchanged
    missed: Sequence[Tensor]  # the next residual of each matrix


class PowerSgd:
    """One member's PowerSGD state for flat gradients of `layout`. Sends `rank` columns per matrix, fewer if it is
    small.

    Uses memory for two copies of a gradient's matrices, besides the total.
    """

    def __init__(self, layout: FlatLayout, rank: int, dtype: torch.dtype, seed: int) -> None:
        self._dtype = dtype
        self._count = layout.count
        self._matrices, self._wholes, self.elements = sort_out(layout, rank)  # elements of both sums
        self._starts = [_start(matrix, seed, dtype) for matrix in self._matrices]
        self._rights = [torch.from_numpy(start.copy()) for start in self._starts]
        self._residuals: Sequence[Tensor] | None = None  # None: all zeros
        self._spare: Sequence[Tensor] | None = None
        self._sent: Sequence[Tensor] = ()  # of the round in progress: M, later its residual
        self._lefts: list[Vector] = []
        self._first: Vector = np.empty(0)

    def state(self) -> dict[str, Tensor]:
        """Q of each matrix by name: the live tensors themselves, columns x rank."""
        return {_TAG + matrix.name: right for matrix, right in zip(self._matrices, self._rights, strict=True)}

    def outline(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of each tensor in `state`."""
        return [(name, right.dtype, right.shape) for name, right in self.state().items()]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy Q from a state that was checked, and drop the residual."""
        for name, right in self.state().items():
            right.copy_(state[name])
        self.forget()

    def residual(self) -> Vector:
        """The residual that is yet to be sent, as a flat gradient."""
        found: Vector = np.zeros(self._count, _numpy(self._dtype))
        for matrix, residual in zip(self._matrices, self._residuals or (), strict=False):
            found[matrix.begin : matrix.begin + residual.numel()] = residual.numpy().reshape(-1)
        return found

    def begin(self, gradient: Vector) -> Vector:
        """Begin a round: returns this member's part of the first sum. The flat `gradient` may be reused afterwards."""
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
        """Continue with the first vector, summed over all members: returns this member's part of the second sum."""
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
        """End a round with the second vector, summed over all members."""
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
        self._first, self._lefts = self._first[:0].copy(), []  # the caller reuses the memory of the sums
        return FactoredSum(total, rights, self._sent)

    def alone(self, gradient: Vector) -> FactoredSum:
        """A round without other members: nothing is sent, so the next residual is zero."""
        flat = torch.from_numpy(gradient)
        total = flat.clone()
        missed = self._with_residuals(flat)
        self._spare = None
        for matrix, sent in zip(self._matrices, missed, strict=True):
            total[matrix.begin : matrix.begin + sent.numel()] = sent.view(-1)
            sent.zero_()
        return FactoredSum(total.numpy(), None, missed)

    def settle(self, ready: FactoredSum) -> None:
        """Accept a round after the step with its total: keep its Q and its residual."""
        for right, new in zip(self._rights, ready.rights or (), strict=False):
            right.copy_(torch.from_numpy(new))
        self._spare, self._residuals = self._residuals, ready.missed

    def forget(self) -> None:
        """Drop the residual, because the parameters that it belongs to were replaced."""
        self._spare, self._residuals = self._residuals, None

    def _with_residuals(self, flat: Tensor) -> Sequence[Tensor]:
        """M of each matrix, in buffers of its own, so that the order of summation does not depend on `flat`'s
        alignment.
        """
        found = self._spare or [torch.empty(m.rows, m.columns, dtype=self._dtype) for m in self._matrices]
        residuals = self._residuals or itertools.repeat(None)
        for matrix, sent, residual in zip(self._matrices, found, residuals, strict=False):
            sent.copy_(flat[matrix.begin : matrix.begin + sent.numel()].view_as(sent))
            if residual is not None:
                sent.add_(residual)
        return found


def low_rank_of(averaging: AveragingSection, layout: FlatLayout, dtype: torch.dtype, seed: int) -> PowerSgd | None:
    """The PowerSGD coding of gradients with this layout, or None if the run uses another code."""
    return PowerSgd(layout, averaging.rank, dtype, seed) if averaging.code == "powersgd" else None


def rights_outline(layout: FlatLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of each Q that a `PowerSgd` of this layout keeps."""
    matrices, _, _ = sort_out(layout, rank)
    return {_TAG + matrix.name: (matrix.columns, matrix.rank) for matrix in matrices}


def sort_out(layout: FlatLayout, rank: int) -> tuple[list[Matrix], list[UncompressedPiece], tuple[int, int]]:
    """Divide the tensors into those sent as factors and those sent uncompressed. Also returns both vectors' lengths.

    A tensor of more than two dimensions is a matrix of its first dimension by all others.
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
        wholes.append(UncompressedPiece(begin, end, left))
        left += end - begin
    return matrices, wholes, (left, right)


def orthonormal(columns: Vector, instead: Vector | None = None) -> Vector:
    """An orthonormal basis of the columns' span, [n, r], in their dtype; bitwise equal on all IEEE 754 machines.

    Uses Gram-Schmidt, twice, in double precision. A column that depends linearly on the previous ones is replaced by
    the same column of `instead`, made orthonormal too, or by zeros.
    """
    found = columns.T.astype(np.float64, order="C")
    for k in range(len(found)):
        if not _made_unit(found, k) and instead is not None:
            found[k] = instead[:, k]
            _made_unit(found, k)
    basis: Vector = np.ascontiguousarray(found.T).astype(columns.dtype)
    return basis


def _made_unit(rows: Vector, k: int) -> bool:
    """Orthonormalize row `k` against the previous ones. If it depends on them linearly, zero it and return False."""
    row, before = rows[k], rows[:k]
    largest = np.abs(row).max(initial=0.0)
    if largest > 0:
        row /= largest  # so that no square overflows or underflows
        whole = _length(row)
        for _ in range(2):  # the second pass removes what rounding left in a short remainder
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
    """Multiply left [n, r] by right' [r, m] into `product` [n, m]: terms in a fixed order, each rounded separately."""
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
    """Clip a sum of Q so that no product with it overflows: only a malicious peer sends larger values."""
    most = np.finfo(right.dtype).max / (2 * right.shape[1])
    return np.clip(right, -most, most)


def _start(matrix: Matrix, seed: int, dtype: torch.dtype) -> Vector:
    """The initial Q: random orthonormal columns, drawn without logarithms, whose results differ between machines."""
    digest = hashlib.sha256(f"peerd powersgd {seed} {matrix.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    drawn: Vector = (torch.rand((matrix.columns, matrix.rank), generator=generator) - 0.5).to(dtype).numpy()
    return orthonormal(drawn)


def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
