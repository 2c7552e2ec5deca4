"""The books of microbatches in a sum: a computation that fails leaves nothing that counts as the whole sum."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import NoMemory
from peerd.messages.swarm import Mb
from peerd.model.stage.microbatch_books import KeptMicrobatch, MicrobatchBooks

FRAMES = (TensorFrame("uint8", (1,), b"x"),)


class Books(MicrobatchBooks):
    """Sums the numbers of microbatches. Memory fails when it is told to."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.sum, self.fails_at = 0, -1
        for number in range(count):
            self._held[Mb("a", number)] = KeptMicrobatch(0, FRAMES)
            self.sum += number

    def _steps(self) -> tuple[int, int]:
        return 0, 0

    def _empty_sum(self) -> None:
        self.sum = 0

    def _sum_is_finite(self) -> bool:
        return True

    def _add_again(self, at: int, group: Iterable[tuple[Mb, KeptMicrobatch]]) -> list[Mb]:
        for mb, _ in group:
            if mb.seq == self.fails_at:
                raise NoMemory("no memory")
            self.sum += mb.seq
        return []


def test_a_sum_whose_recomputation_failed_is_recomputed_by_the_next_order() -> None:
    books = Books(5)
    wanted = [Mb("a", number) for number in (0, 2, 3, 4)]
    books.fails_at = 3
    with pytest.raises(NoMemory):
        books.keep_only(0, wanted)
    assert books.sum != 9, "a part of the sum only"
    books.fails_at = -1
    assert books.keep_only(0, wanted) == []
    assert books.sum == 9
