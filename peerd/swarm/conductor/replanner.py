"""Placement by the measured network: the conductor replans from time to time who serves which stage.

For runs with `pipeline.placement: network`. It plans if members have come or gone, if more pairs are measured than at
the last plan, or if a step with the current placement would take 15 % more or less time; at most once in two minutes.
Posts that rest or do no work are left out. A worker searches the plan, starting from the current placement and with the
cost of moves (`placement/replan`); the machine orders its moves as far as they harm nobody. With more than 128
peers only their loads decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import trio

from peerd.core.clock import Clock
from peerd.core.work import Worker
from peerd.placement.network.landmarks import filled
from peerd.placement.network.network_map import PairView
from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StageWork
from peerd.placement.replan import ReplanOptions, replanned, steady_s
from peerd.swarm.conductor.machine_driver import MachineDriver
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.posts import post_name
from peerd.swarm.rebalance.loads import PeerLoad, Transfer

PLANNED: Final = 128  # most peers of one plan
_LOOK_S: Final = 10.0
_PAUSE_S: Final = 120.0  # between two plans
_CHANGED: Final = 0.15  # relative change of a step's time


Views = dict[tuple[str, str], PairView]
Lines = dict[str, tuple[float, float]]  # peer -> bytes/s of its line, up and down


class Replanner:
    """Replans placements. `stages`: requirements of each; `microbatches`: of a step; `worker`: runs the search."""

    def __init__(
        self, driver: MachineDriver, clock: Clock, stages: Sequence[StageWork], microbatches: int, worker: Worker
    ) -> None:
        self._driver, self._stages, self._microbatches, self._worker = driver, tuple(stages), microbatches, worker
        self._rng = clock.rng("replanning")
        self._planned_at = -math.inf
        self._planned_of: tuple[tuple[str, int], ...] = ()
        self._planned_s, self._planned_by = 0.0, 0  # seconds of a step and number of known figures at the last plan
        self.plans = 0  # number of plans made

    async def run(self) -> None:
        """Plan whenever it is due, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            tenure = self._driver.tenure
            if tenure is None:
                continue
            loads = _of_work(tenure.machine.rebalancing.loads)
            if loads and len(loads) <= PLANNED and trio.current_time() - self._planned_at >= _PAUSE_S:
                await self._plan_if_changed(tenure, loads)

    async def _plan_if_changed(self, tenure: Tenure, loads: Sequence[PeerLoad]) -> None:
        view, lines = await self._measured(tenure, loads)
        stage_of = tuple(load.stage for load in loads)
        if not set(range(len(self._stages))) <= set(stage_of):
            return
        of = tuple((load.peer, load.stage) for load in loads)
        look = partial(self._looked_at, loads, view, lines, stage_of)
        problem, step_s, known = await self._worker.run(look, name="look at the placement")
        is_same = abs(step_s - self._planned_s) <= _CHANGED * self._planned_s and known <= self._planned_by
        if (of == self._planned_of and is_same) or not math.isfinite(step_s):
            return
        stays = {device for device, load in enumerate(loads) if load.stays}
        options = ReplanOptions(moving_s=tenure.machine.rebalancing.price_s, step_s=step_s)
        search = partial(replanned, problem, stage_of, stays, options, self._rng)
        moves = await self._worker.run(search, name="plan the placement")
        self._planned_at, self._planned_of = trio.current_time(), of
        self._planned_s, self._planned_by = step_s, known
        self.plans += 1
        if moves and self._driver.tenure is tenure:
            told = [Transfer(loads[device].peer, loads[device].stage, stage) for device, stage in moves.items()]
            tenure.machine.rebalancing.wish(told, "a step then takes less time, by the measured network")

    async def _measured(
        self, tenure: Tenure, loads: Sequence[PeerLoad]
    ) -> tuple[Views, dict[str, tuple[float, float]]]:
        """The conductor's network map of these peers, and the line rates that the peers report.

        Lets other tasks run while it collects them.
        """
        now, lines = trio.current_time(), tenure.machine.roster.lines
        peers = [load.peer for load in loads]
        views: Views = {}
        for one in peers:
            views |= {(one, other): tenure.network.view(now, one, other) for other in peers if one != other}
            await trio.lowlevel.checkpoint()
        return views, {load.peer: lines.rates(post_name(load.peer, load.stage)) for load in loads}

    def _looked_at(
        self,
        loads: Sequence[PeerLoad],
        views: Views,
        lines: Lines,
        stage_of: tuple[int, ...],
    ) -> tuple[PlacementProblem, float, int]:
        """The placement problem, seconds of a step with the current placement, and the number of known figures."""
        known = sum(figure is not None for pair in views.values() for figure in (pair.rtt_s, pair.there, pair.back))
        network = filled([load.peer for load in loads], lambda one, other: views[one, other], lines)
        speeds = [load.rate * self._stages[load.stage].flops for load in loads]
        problem = PlacementProblem(
            tuple(PlanDevice(load.peer, speed or np.inf) for load, speed in zip(loads, speeds, strict=True)),
            Network(np.array(network.rtt_s) / 2, np.array(network.rate)),
            self._stages,
            self._microbatches,
        )
        return problem, steady_s(problem, stage_of), known


def _of_work(loads: Sequence[PeerLoad]) -> Sequence[PeerLoad]:
    """The loads of posts with a known rate; all loads if no rate is known, so that only the network counts."""
    return [load for load in loads if load.rate] or loads
