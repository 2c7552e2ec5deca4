"""A trainer that loses the way to some of its stage peers goes on with the others: real processes on cut lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.lab import why_not_wide
from scripts.waiting import eventually

SCRIPTS = Path(__file__).parents[2] / "scripts"
FOUND_OUT_S = 10.0
WATCHED_S = 8.0
CUT_S = 20.0
BREAK_S = 3.0  # a longer time between two steps is no pace

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


def run_file() -> dict[str, Any]:
    from benchmarks._swarm import BASE

    return BASE | {
        "run": "cut-off",
        "model": {"d_model": 32, "heads": 1, "layers": 2, "context": 32},
        "pipeline": {"stages": 2, "microbatch": 4},
        "optimizer": {"name": "adamw", "lr": 1.0e-3, "total_steps": 100_000},
        "batch": {"target_samples": 128},
    }


def passed(seconds: float) -> tuple[float, float]:
    """Let so many seconds pass; returns their begin and end."""
    began = time.time()
    eventually(lambda: time.time() - began >= seconds, seconds + 5)
    return began, began + seconds


@contextmanager
def far_swarm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two peers of each of two stages, and a trainer, that have made some steps."""
    if (reason := why_not_wide()) is not None:
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import lab
    from benchmarks._far_swarm import FarSwarm

    with lab.WideLab(delay_ms=5) as wide:
        swarm = FarSwarm(folder, wide, run_file(), None)
        swarm.start_pairs()
        swarm.wait_for_step(3, 120)
        yield swarm


def goes_on(swarm: Any, since: float) -> float:
    """Waits until steps follow each other again; returns when the first of them was made."""

    def at_a_pace() -> list[float]:
        steps = [at for at in swarm.steps() if at >= since]
        return [at for before, at in pairwise(steps) if at - before < BREAK_S]

    eventually(lambda: len(at_a_pace()) >= 3, 90)
    return at_a_pace()[0]


def test_a_trainer_goes_on_without_the_peers_that_it_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with far_swarm(tmp_path, monkeypatch) as swarm:
        usual = swarm.rate(*passed(WATCHED_S))
        follower = next(n for n in ("stage-0-a", "stage-0-b") if not swarm.peer(n).role()["conducts"])
        swarm.cut("trainer", follower)  # whoever conducts is needed by everybody
        passed(FOUND_OUT_S)
        without_one = swarm.rate(*passed(WATCHED_S))
        for name in ("stage-1-a", "stage-1-b"):
            swarm.cut("trainer", name)
        passed(CUT_S)
        swarm.mend("trainer")
        passed(FOUND_OUT_S)
        mended = swarm.rate(*passed(WATCHED_S))
        counts = swarm.peer("trainer").role()["microbatches"]
        said = swarm.peer("trainer").said
    print(f"steps a second: {usual:.2f}, {without_one:.2f} without one, {mended:.2f} after a stage was gone; {counts}")
    silent = [line for line in said.splitlines() if "has fallen silent" in line]
    told = [line for line in said.splitlines() if "cannot be reached: it is left out" in line]
    assert counts["lost"] == 0
    assert without_one > 0.5 * usual
    assert mended > 0.5 * usual
    assert 1 <= len(silent) <= 4, silent
    assert len(told) <= 4, told


def test_a_trainer_that_reaches_no_stage_peer_directly_goes_on_over_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backbone relays; the conductor is among those that are cut off.

    What the relay allows is what a trainer reaches that finds no other way from its start.
    """
    with far_swarm(tmp_path, monkeypatch) as swarm:
        usual = swarm.rate(*passed(WATCHED_S))
        for stage in range(2):
            for which in "ab":
                swarm.cut("trainer", f"stage-{stage}-{which}")
        cut = time.time()
        on_s = goes_on(swarm, since=cut) - cut
        over_a_relay = swarm.rate(*passed(WATCHED_S))
        counts = swarm.peer("trainer").role()["microbatches"]
        swarm.restart_trainer()
        goes_on(swarm, since=time.time())
        allowed = swarm.rate(*passed(WATCHED_S))
    print(f"steps a second: {usual:.2f}, {over_a_relay:.2f} over a relay, on {on_s:.1f} s after the cut; {allowed:.2f}")
    print(counts)
    assert counts["lost"] == 0
    assert over_a_relay > 0.5 * allowed
