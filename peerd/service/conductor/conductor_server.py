"""The conductor's service on a stage-0 peer: conducts the run whenever the duty is this peer's.

Inactive until a peer reports to it and the duty is its own (`Duty`); then a tenure begins, whose machine takes all
reports (`Reports`) and is driven by `MachineDriver`. A peer that closes its connection, or is silent for too long, is
gone at once. Every call that is awaited has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from peerd.core.clock import Clock
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.machine.conductor.conductor import Conductor
from peerd.net.host.host import Host, PeerDown
from peerd.service.conductor.commit_proofs import CommitProofs
from peerd.service.conductor.conductor_client import ConductorClient
from peerd.service.conductor.duty import Duty
from peerd.service.conductor.machine_driver import MachineDriver
from peerd.service.conductor.network_desk import NetworkDesk
from peerd.service.conductor.orders import ConductingConfig, Orders
from peerd.service.conductor.reports import Reports
from peerd.service.conductor.rivals import Rivals
from peerd.service.rpc.rpc import Rpc
from peerd.service.swarm.counted_record import CountedRecord

if TYPE_CHECKING:
    from peerd.machine.placement.problem import StageWork
    from peerd.service.conductor.replanning import Replanner

log = logging.getLogger("peerd.service.conductor.conductor_server")

_SENDING_S = 4.0  # since its last bytes; an idle link has a ping now and then


class ConductorServer:
    """Serves `swarm/6/...` and `network/1/...`; `run` carries the duty."""

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
        self._host, self._following = host, following
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
        self._network = NetworkDesk(config.fingerprint, rpc, self._driver)

    def _sends(self, peer: str) -> bool:
        """True while bytes of the peer come in, whatever they are."""
        link = self._host.links.best(PeerId.parse(peer))
        return link is not None and trio.current_time() - link.mux.heard_at < _SENDING_S

    def _ask(self, peer: str) -> None:
        """Have the peer answer a ping soon, or its link ends."""
        link = self._host.links.best(PeerId.parse(peer))
        if link is not None:
            link.doubt()

    def _note(self, text: str) -> None:
        self.notes(text)

    @property
    def solver(self) -> Worker | None:
        """Divides rounds where there are limits between pairs of peers."""
        return self.orders.solver

    @solver.setter
    def solver(self, solver: Worker | None) -> None:
        self.orders.solver = solver

    def publish_counts(self, record: CountedRecord) -> None:
        """Have each tenure publish what it counts of peers' work; before `run`."""
        self._duty.counts = record

    def know_stages(self, stages: Sequence[StageWork], planner: Worker | None) -> None:
        """Take over the work of a microbatch in each stage; before `run`. `planner`: for placement by the measured
        network, which not every run wants.
        """
        self._duty.work = tuple(stage.flops for stage in stages)
        self._replanning = None
        if planner is not None:
            from peerd.service.conductor.replanning import Replanner  # brings numpy, which a backbone does not need

            self._replanning = Replanner(self._driver, self._clock, stages, self._microbatches, planner)

    @property
    def term(self) -> int:
        """The latest term that is believed; this peer's own while it conducts."""
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
        """The machine that decides; None while this peer does not conduct."""
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
