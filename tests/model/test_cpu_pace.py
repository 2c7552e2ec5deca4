"""Pace of computing, with a clock and a count of processor time that the test moves."""

from __future__ import annotations

import pytest

from peerd.model.worker import BURST_S, CpuPace


class Machine:
    """A wall clock and the processor time of a process."""

    def __init__(self) -> None:
        self.now = self.used = 100.0

    def pace(self, threads: int) -> CpuPace:
        return CpuPace(threads, lambda: self.now, lambda: self.used)

    def work(self, seconds: float, processors: float) -> None:
        self.now += seconds
        self.used += seconds * processors


@pytest.mark.parametrize("processors", [1.1, 1.7, 4.0])
def test_a_process_that_would_use_more_is_held_to_one_processor(processors: float) -> None:
    machine = Machine()
    pace = machine.pace(1)
    for _ in range(200):
        machine.work(0.05, processors)
        machine.work(pace.delay_s(), 0.1)  # the loop goes on meanwhile
    assert (machine.used - 100) / (machine.now - 100) == pytest.approx(1.0, rel=0.03)


def test_one_that_uses_less_never_rests() -> None:
    machine = Machine()
    pace = machine.pace(2)
    for _ in range(100):
        machine.work(0.05, 1.9)
        assert pace.delay_s() == 0


def test_idle_time_is_not_saved_up() -> None:
    machine = Machine()
    pace = machine.pace(1)
    machine.work(3600, 0.0)
    assert pace.delay_s() == 0
    machine.work(1.0, 2.0)
    assert pace.delay_s() == pytest.approx(1.0 - BURST_S)
