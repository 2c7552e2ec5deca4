"""The conductor's service on a peer of stage 0: conducts the run while this peer has the duty.

Inactive until a peer reports to it and `Duty` decides that the duty is its own. Then a tenure begins: `Reports` passes
all reports to the tenure's machine, and `MachineDriver` drives it. A peer that closes its connection, or is silent for
too long, is removed at once. Every call that is awaited has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from peerd.core.clock import Clock
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.rpc.rpc import Rpc
from peerd.swarm.batch.counted_record import CountedRecord
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.conductor.duty import Duty
from peerd.swarm.conductor.machine_driver import MachineDriver
from peerd.swarm.conductor.network_map_server import NetworkMapServer
from peerd.swarm.conductor.orders import ConductingConfig, Orders
from peerd.swarm.conductor.reports import Reports
from peerd.swarm.conductor.rivals import Rivals
from peerd.swarm.steps.conductor import Conductor
from peerd.wire.host.host import Host, PeerDown

if TYPE_CHECKING:
    from peerd.placement.problem import StageWork
    from peerd.swarm.conductor.replanner import Replanner

log = logging.getLogger("peerd.swarm.conductor.conductor_server")

_SENDING_S = 4.0  # a peer sends if bytes arrived in this time; idle links exchange pings


class ConductorServer:
    """Serves `swarm/6` and `network/1`, and conducts the run while `run` runs and this peer has the duty."""

    def __init__(
        self,
        config: ConductingConfig,
        rpc: Rpc,
        host: Host,
        clock: Clock,
        following: ConductorClient,
        proofs: CommitProofs | None = None,
    ) -> None:
        proofs = proofs or CommitProofs(config.fingerprint, rpc, host, following, ())
        self._host = host
        self.notes: Callable[[str], None] = log.info
        self.warnings: Callable[[str], None] = log.warning
        self.orders = Orders(config, rpc)
        self.orders.notes = self._note
        self.orders.moved = proofs.evidence.collect
        rivals = Rivals(config.fingerprint, rpc, host, following)
        self._driver = MachineDriver(self.orders, rivals.answers, self._note, self._sends, self._ask)
        self._driver.warnings = lambda text: self.warnings(text)
        self._duty = Duty(config, host, clock, rivals, self._driver, proofs)
        self._reports = Reports(config.fingerprint, rpc, following, self._duty, self._driver)
        self._clock, self._microbatches = clock, config.conductor.microbatches
        self._replanning: Replanner | None = None
        self._network = NetworkMapServer(config.fingerprint, rpc, self._driver)

    def _sends(self, peer: str) -> bool:
        """True while any bytes arrive from the peer."""
        link = self._host.links.best(PeerId.parse(peer))
        return link is not None and trio.current_time() - link.mux.heard_at < _SENDING_S

    def _ask(self, peer: str) -> None:
        """Ping the peer; its link ends if it does not answer soon."""
        link = self._host.links.best(PeerId.parse(peer))
        if link is not None:
            link.doubt()

    def _note(self, text: str) -> None:
        self.notes(text)

    @property
    def solver(self) -> Worker | None:
        """Worker that divides averaging rounds if there are rate limits between pairs of peers."""
        return self.orders.solver

    @solver.setter
    def solver(self, solver: Worker | None) -> None:
        self.orders.solver = solver

    def publish_counts(self, record: CountedRecord) -> None:
        """Publish each tenure's count of peers' work. Call it before `run`."""
        self._duty.counts = record

    def know_stages(self, stages: Sequence[StageWork], planner: Worker | None) -> None:
        """Set the work of a microbatch in each stage. Call it before `run`.

        `planner`: the worker for placement by the measured network, or None if the run does not use it.
        """
        self._duty.work = tuple(stage.flops for stage in stages)
        self._replanning = None
        if planner is not None:
            from peerd.swarm.conductor.replanner import Replanner  # brings numpy, which a backbone does not need

            self._replanning = Replanner(self._driver, self._clock, stages, self._microbatches, planner)

    def know_state(self, state_bytes: int) -> None:
        """Set the size of this peer's state, which determines how long members may take to fetch a checkpoint."""
        self._duty.state_bytes = state_bytes

    @property
    def term(self) -> int:
        """The latest credible term; this peer's own term while it conducts."""
        return self._duty.term

    @term.setter
    def term(self, heard: int) -> None:
        self._duty.hear_of_term(heard)

    @property
    def acting(self) -> bool:
        """True while this peer is the conductor."""
        return self._driver.tenure is not None

    @property
    def machine(self) -> Conductor | None:
        """The conductor's state machine, or None while this peer does not conduct."""
        return self._driver.machine

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        driver = self._driver
        self._reports.serve()
        self._network.serve()
        try:
            with self._host.watch() as events:
                async with trio.open_nursery() as nursery:
                    driver.nursery = nursery
                    nursery.start_soon(driver.keep_time)
                    nursery.start_soon(self._duty.look_around)
                    nursery.start_soon(driver.watch_silence)
                    if self._replanning is not None:
                        nursery.start_soon(self._replanning.run)
                    task_status.started()
                    async for event in events:
                        if isinstance(event, PeerDown):
                            driver.peer_gone(event.peer)
        finally:
            self._reports.unserve()
            self._network.unserve()
            driver.tenure, driver.nursery = None, None
