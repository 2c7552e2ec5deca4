"""The limit of a guest's memory: a peak that passes is none of its business, a process that stays too large ends."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from peerd.daemon.control import memory_limit
from peerd.daemon.control.memory_limit import keep


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to give memory back, noted."""
    done: list[str] = []

    async def run_sync(job: object) -> None:
        await trio.lowlevel.checkpoint()
        done.append(getattr(job, "__name__", ""))

    monkeypatch.setattr(memory_limit.trio.to_thread, "run_sync", run_sync)
    return done


async def told(held_gb: list[float | None], most_gb: float = 2.0) -> tuple[list[str], float]:
    """What is said, and after how many seconds; the last figure stays."""
    said: list[str] = []

    def held() -> int | None:
        now = held_gb.pop(0) if len(held_gb) > 1 else held_gb[0]
        return None if now is None else int(now * 1e9)

    began = trio.current_time()
    with trio.move_on_after(60):
        await keep(most_gb, said.append, held)
    return said, trio.current_time() - began


async def test_a_process_that_stays_over_its_limit_is_told_to_end_and_why(
    autojump_clock: MockClock, at_once: list[str]
) -> None:
    said, after_s = await told([0.5, 1.5, 2.2])
    (sentence,) = said
    assert sentence.startswith("this process holds 2.20 GB of memory, and limits.memory_gb (--memory-gb) allows 2; ")
    assert 2.0 < after_s < 5.0
    assert at_once[:2] == ["_return_freed", "_give_back"]


@pytest.mark.parametrize(
    "held_gb", [[2.5, 2.5, 1.8], [2.05], [0.5], [None]], ids=["a peak", "within 5 %", "far below", "nobody knows"]
)
async def test_what_is_within_the_limit_or_passes_goes_on(
    autojump_clock: MockClock, held_gb: list[float | None]
) -> None:
    assert (await told(held_gb))[0] == []


async def test_far_below_its_limit_nothing_is_done_that_takes_time(
    autojump_clock: MockClock, at_once: list[str]
) -> None:
    await told([0.9])
    assert at_once == []
