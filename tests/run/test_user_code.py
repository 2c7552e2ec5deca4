"""A user's own functions: what they draw from torch's generator is what their seed says, in whichever thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from peerd.run.user_code import torchs_random_numbers

DRAWS = 20


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def drawn(seed: int) -> list[float]:
    with torchs_random_numbers(seed):
        return [torch.rand(()).item() for _ in range(DRAWS)]


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_threads_that_draw_at_once_each_get_what_their_seed_says() -> None:
    alone = [drawn(seed) for seed in range(2)]
    found: list[list[list[float]]] = [[], []]

    def draw(seed: int) -> None:
        found[seed] += [drawn(seed) for _ in range(50)]

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[alone[0]] * 50, [alone[1]] * 50]


def test_the_generator_is_afterwards_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    drawn(1)
    assert torch.rand(2).tolist() == expected
