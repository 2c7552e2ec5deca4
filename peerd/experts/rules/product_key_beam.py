"""Beam search over the grid of experts, for all samples of a batch at once, sans-IO (Learning@home, section 3.2).

The score of an expert is the sum of its coordinates' scores. For each prefix length the search goes through a sample's
candidates by rank, looks up those that it does not know yet, skips the dead ones (below which no expert is alive), and
continues with the best `width` live ones; below the last prefix it selects the best `k` experts. A sample that ends
with fewer is searched again with a wider beam, until everything is known or the beam has widened `_WIDENINGS` times. A
host that announces prefixes without live experts costs look-ups, but hides no experts of others.

Several milliseconds of arithmetic for thousands of samples: run it in a worker thread. Invariants (`check`): what is
looked up was unknown, is inside the grid, and is looked up once; every expert in the result had its bit set. The caller
provides the bitmaps and has checked their sizes. numpy is imported when a search begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from peerd.core.errors import LocalError
from peerd.core.limits import EXPERT_LOOKUPS
from peerd.run.grid import Grid, Uid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = NDArray[np.int64]  # [R, C]: prefixes of one length, numbered row by row, of R samples
    Scores = NDArray[np.float32]  # [R, C]; -inf: no candidate

_WIDENINGS: Final = 5  # a beam of 32 k prefixes has seen more than any gate ranks high
_CHUNK_ELEMENTS: Final = 1 << 21  # scores that are extended at once: about 16 MB
_UNKNOWN, _LIVE, _DEAD = 0, 1, 2


class BeamSearch:
    """One beam search. Pass looked-up bitmaps to `step` until it requests no more of them; then read `result`."""

    def __init__(
        self, grid: Grid, layer: int, scores: Sequence[np.ndarray[Any, Any]], k: int, live_share: float = 1.0
    ) -> None:
        """`scores`: [samples, side] for each dimension.

        `live_share`: fraction of live first prefixes in an earlier search; the smaller it is, the more prefixes `step`
        requests at once.
        """
        import numpy as np

        self._scores: list[Scores] = [np.ascontiguousarray(part, dtype=np.float32) for part in scores]
        sizes = [part.shape for part in self._scores]
        samples = sizes[0][0] if sizes else 0
        if sizes != [(samples, side) for side in grid.sides] or not 0 <= layer < grid.layers or k < 1:
            raise LocalError(f"a search in layer {layer} for {k} with scores of shapes {sizes}; the grid is {grid}")
        if not all(np.isfinite(part).all() for part in self._scores):
            raise LocalError("the scores of experts hold NaN or infinity")
        self._grid, self._layer, self.k = grid, layer, k
        self._prior = min(max(live_share, 0.0), 1.0)
        self._first = min(1, len(grid.sides) - 1)  # length of the shortest prefix that is announced
        self._tables: dict[int, NDArray[np.int8]] = {}  # by length of prefix
        self._below: dict[tuple[int, int], NDArray[np.bool_]] = {}  # (length, code) of a live prefix -> bits
        self._asked: set[Uid] = set()
        self._found: Codes = np.full((samples, k), -1, dtype=np.int64)
        self._rows = np.arange(samples)
        self._width, self._widest = k, min(k << _WIDENINGS, math.prod(grid.sides[:-1]))
        self.lookups = 0
        self._begin()

    def step(self, found: Mapping[Uid, bytes]) -> list[Uid]:
        """Process bitmaps of prefixes (empty for dead ones). Returns the prefixes to look up next; empty at the end."""
        for length in sorted({len(prefix.at) for prefix in found}):
            self._note(length, {self._code(prefix): bits for prefix, bits in found.items() if len(prefix.at) == length})
        while self._rows.size:
            asked = self._settle()
            if asked:
                return asked
            self._descend()
        return []

    def result(self) -> list[list[Uid]]:
        """The best live experts of each sample, best first."""
        import numpy as np

        uids = {code: self._uid(code, len(self._grid.sides)) for code in np.unique(self._found).tolist() if code >= 0}
        return [[uids[code] for code in row if code >= 0] for row in self._found.tolist()]

    @property
    def live_share(self) -> float:
        """Fraction of first prefixes with live experts, as seen by this search and its predecessor."""
        return self._share(self._first)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert all(self._grid.holds(prefix) and len(prefix.at) < len(self._grid.sides) for prefix in self._asked)
        last = len(self._grid.sides) - 1
        for code in self._found[self._found >= 0].tolist():
            prefix, coordinate = divmod(code, self._grid.sides[-1])
            assert self._below[last, prefix][coordinate]

    # --- what is known -----------------------------------------------------------------------------------------

    def _note(self, length: int, found: Mapping[int, bytes]) -> None:
        import numpy as np

        side = self._grid.sides[length]
        size = -(-side // 8)
        packed = np.frombuffer(b"".join(bits[:size].ljust(size, b"\0") for bits in found.values()), dtype=np.uint8)
        unpacked = np.unpackbits(packed.reshape(-1, size), axis=1, bitorder="little")[:, :side]
        masks: NDArray[np.bool_] = unpacked.astype(np.bool_)
        lives: NDArray[np.bool_] = np.any(masks, axis=1)
        self._table(length)[list(found)] = np.where(lives, _LIVE, _DEAD)
        for at, code in enumerate(found):
            if lives[at]:
                self._below[length, code] = masks[at]

    def _table(self, length: int) -> NDArray[np.int8]:
        import numpy as np

        if length not in self._tables:
            self._tables[length] = np.zeros(math.prod(self._grid.sides[:length]), dtype=np.int8)
        return self._tables[length]

    def _share(self, length: int) -> float:
        """Estimated fraction of live prefixes of this length; the earlier estimate weighs like four observed ones."""
        table = self._table(length)
        live, dead = int((table == _LIVE).sum()), int((table == _DEAD).sum())
        prior = self._prior if length == self._first else 1.0
        return max((live + 4 * prior) / (live + dead + 4), 1 / 64)

    # --- the walk ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start with all candidates of the first length."""
        import numpy as np

        rows = self._rows.size
        self._length = self._first
        if self._first == 0:
            self._codes, self._ranks = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.float32)
        else:
            side = self._grid.sides[0]
            codes = np.broadcast_to(np.arange(side, dtype=np.int64), (rows, side))
            self._codes, self._ranks = _best(codes, self._scores[0][self._rows], side)

    def _settle(self) -> list[Uid]:
        """Prefixes to look up next; empty once each sample has `width` live candidates, or no unknown prefix left."""
        import numpy as np

        status = np.where(np.isneginf(self._ranks), _DEAD, self._table(self._length)[self._codes])
        expected = (status == _LIVE) + np.float32(self._share(self._length)) * (status == _UNKNOWN)
        before = np.cumsum(expected, axis=1) - expected
        codes = np.unique(self._codes[(status == _UNKNOWN) & (before < self._width)])[:EXPERT_LOOKUPS]
        asked = [self._uid(code, self._length) for code in codes.tolist()]
        if asked:
            self.lookups += len(asked)
            self._asked.update(asked)
            return asked
        order = np.argsort(status != _LIVE, axis=1, kind="stable")[:, : self._width]
        self._codes = np.take_along_axis(self._codes, order, axis=1)
        lives = np.take_along_axis(status, order, axis=1) == _LIVE
        self._ranks = np.where(lives, np.take_along_axis(self._ranks, order, axis=1), np.float32(-np.inf))
        return []

    def _descend(self) -> None:
        """Extend candidates by a dimension. At the last one, store the experts; search on for samples with too few."""
        last = self._length == len(self._grid.sides) - 1
        keep = self.k if last else max(64, 8 * self._width)
        self._codes, self._ranks = self._extended(keep)
        self._length += 1
        if not last:
            return
        import numpy as np

        lives = ~np.isneginf(self._ranks)
        self._found[self._rows, : lives.shape[1]] = np.where(lives, self._codes, -1)
        short = lives.sum(axis=1) < self.k
        self._rows = self._rows[:0] if self._width >= self._widest else self._rows[short]
        self._width *= 2
        self._begin()

    def _extended(self, keep: int) -> tuple[Codes, Scores]:
        """The best `keep` of all live children of the samples' prefixes: their codes and scores."""
        import numpy as np

        side, width = self._grid.sides[self._length], self._codes.shape[1]
        unique, at = np.unique(self._codes, return_inverse=True)
        at = at.reshape(self._codes.shape)
        nothing = np.zeros(side, dtype=np.bool_)
        masks = np.stack([self._below.get((self._length, code), nothing) for code in unique.tolist()])
        parts: list[tuple[Codes, Scores]] = []
        rows_at_once = max(1, _CHUNK_ELEMENTS // (width * side))
        for start in range(0, self._rows.size, rows_at_once):
            part = slice(start, start + rows_at_once)
            further = self._scores[self._length][self._rows[part]][:, None, :]
            ranks = np.where(masks[at[part]], self._ranks[part][:, :, None] + further, np.float32(-np.inf))
            codes = self._codes[part][:, :, None] * side + np.arange(side)
            rows = ranks.shape[0]
            parts.append(_best(codes.reshape(rows, -1), ranks.reshape(rows, -1), keep))
        return np.concatenate([c for c, _ in parts]), np.concatenate([r for _, r in parts])

    # --- names -------------------------------------------------------------------------------------------------

    def _uid(self, code: int, length: int) -> Uid:
        at = list[int]()
        for side in reversed(self._grid.sides[:length]):
            code, coordinate = divmod(code, side)
            at.append(coordinate)
        return Uid(self._layer, tuple(reversed(at)))

    def _code(self, prefix: Uid) -> int:
        if prefix.layer != self._layer or len(prefix.at) >= len(self._grid.sides) or not self._grid.holds(prefix):
            raise LocalError(f"{prefix} is not a prefix of layer {self._layer}")
        code = 0
        for side, coordinate in zip(self._grid.sides, prefix.at, strict=False):
            code = code * side + coordinate
        return code


def _best(codes: Codes, ranks: Scores, keep: int) -> tuple[Codes, Scores]:
    """The `keep` candidates of each row with the highest ranks, best first; equal ones by their codes."""
    import numpy as np

    if keep < ranks.shape[1]:
        top = np.sort(np.argpartition(-ranks, keep - 1, axis=1)[:, :keep], axis=1)
        codes, ranks = np.take_along_axis(codes, top, axis=1), np.take_along_axis(ranks, top, axis=1)
    order = np.argsort(-ranks, axis=1, kind="stable")
    return np.take_along_axis(codes, order, axis=1), np.take_along_axis(ranks, order, axis=1)
