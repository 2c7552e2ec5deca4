"""Role `backbone`: a permanent, dialable peer that is an entry to the DHT and, with a run file, keeps the run's
records.

The DHT and the host provide the entry. With a run file it also welcomes newcomers, writes the run's learning curve, and
keeps checkpoints of all stages, which it announces and sends to stage peers that have lost theirs. In a run with
experts it keeps their checkpoints for the hosts that will adopt them, which needs no torch. It joins no stage, so any
one of several backbones may fail. Without a run file, or with one that only names the run, and without earlier
checkpoints, it does not load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

import trio

from peerd.core.errors import ConfigError, RemoteError, missing_package
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import VaultDisk
from peerd.messages.progress import pause_s
from peerd.messages.run_link import RunFileAnswer, best_link, shared_file
from peerd.messages.swarm import Position
from peerd.role.role import RoleContext
from peerd.role.run_offer import SIGNATURE_FILE, RunOffer, own_signature
from peerd.role.run_services import RunServices
from peerd.run.runfile import RunFile
from peerd.state.checkpoints.kept_list import KeptList
from peerd.status.learning_curve import LearningCurves
from peerd.status.run_monitor import RunMonitor, RunObservation

if TYPE_CHECKING:
    from peerd.state.checkpoints.keeper import CheckpointKeeper

T = TypeVar("T")
_LOOK_RARELY_S = 10.0  # between two looks while the step's end is far
_TABLE_PERIOD_S = 300.0  # interval of the Parquet tables
_ANNOUNCE_S = 20.0  # interval of announcing kept checkpoints
_HINDERED_S = 30.0  # pause before keeping is retried after an error


class _FileThreads:
    """A worker for files and hashes. The daemon's own worker would load torch in its thread."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        return await trio.to_thread.run_sync(job)


class BackboneRole:
    """The permanent peer of a run, through which others join."""

    name: ClassVar[str] = "backbone"
    needs_run: ClassVar[bool] = False
    files: ClassVar[Worker] = _FileThreads()
    look_s: ClassVar[float] = 2.0  # interval of reading the directory, while a step is short or near its end

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx = ctx
        self._curves: LearningCurves | None = None
        self._keeping: CheckpointKeeper | None = None
        self._vault: Vault | None = None
        self._no_vault: str | None = None  # why it keeps no experts' checkpoints
        self._sight: RunObservation | None = None
        self._looked = Signal()
        self._listed: list[Position] = []  # positions from `kept.json`, until the files are opened
        self._not_kept: str | None = None
        self._line = ""  # the command with which others join
        self._file = self._signature = b""
        self._no_table = False
        self._at_table = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        run, services = self._ctx.run, self._ctx.services
        if run is None or services is None:
            task_status.started()
            await trio.sleep_forever()
        self._curves = curves = LearningCurves(self._ctx.data_dir / "curves", run.run)
        await trio.to_thread.run_sync(curves.open)  # not on the worker, whose thread would load torch
        offer = RunOffer(self._ctx.rpc, run.run, self._told)
        self._file = shared_file(run)
        self._signature = await trio.to_thread.run_sync(self._sign, run)
        offer.open()
        self._invite(run)
        self._listed = await trio.to_thread.run_sync(KeptList(self._ctx.data_dir, run.run).read)
        try:
            await self._announce(services)  # before torch loads: otherwise a new swarm might start from step 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._show_proofs, services)
                nursery.start_soon(self._watch, RunMonitor(self._ctx, services), curves)
                nursery.start_soon(self._renew_table)
                nursery.start_soon(self._keep, services)
                nursery.start_soon(self._announce_now_and_then, services)
                if run.experts is not None and "expert" not in self._ctx.beside:  # its vault serves both roles
                    nursery.start_soon(self._hold_experts, run)
                task_status.started()
        finally:
            offer.close()
            self._ctx.rpc.unserve("kept/1")

    async def leave(self) -> None:
        """Write the learning curve's table for the last time."""
        await self._write_table()

    def status(self) -> dict[str, object]:
        peers = len(self._ctx.host.connected())
        found: dict[str, object] = {"connected": peers}
        if self._curves is not None:
            found |= {"curve": str(self._curves.lines), "curve_step": self._curves.step}
            found["kept_steps"] = [p.step for p in self._keeping.kept] if self._keeping else []
            found["not_kept"] = self._not_kept
        if self._vault is not None or self._no_vault is not None:
            found["kept_experts"] = len(self._vault.held) if self._vault is not None else 0
            found["no_experts_kept"] = self._no_vault or (self._vault.problem if self._vault is not None else None)
        return found | {"waits_for": None if peers else "peers: nobody has connected yet"}

    # --- welcomes and the curve -------------------------------------------------------------------------------

    def _invite(self, run: RunFile) -> None:
        """Log the command with which others join, once at the start and after each change."""
        link = best_link(self._ctx.host.addrs(), self._ctx.host.id, run.run)
        line = f"peerd join {link.text}" if link is not None else ""
        if run.access.allow == "tokens":
            line += " --token FILE"
        if link is not None and line != self._line:
            self._line = line
            self._ctx.log.event("run.joinable", run=run.run, line=line)

    def _told(self) -> RunFileAnswer:
        return RunFileAnswer(self._file, self._signature)

    def _sign(self, run: RunFile) -> bytes:
        """The organizer's signature of the run file; empty, with a warning in the log, if it cannot be made."""
        try:
            return own_signature(run, self._file, self._ctx.host, self._ctx.data_dir.parent / SIGNATURE_FILE)
        except ConfigError as error:
            self._ctx.log.event("run.not_signed", level="warning", reason=str(error))
            return b""

    async def _watch(self, watching: RunMonitor, curves: LearningCurves) -> None:
        while True:
            sight = self._sight = await watching.look()
            for new in sight.newcomers:
                part = {"part": "trainer"} if new.stage is None else {"part": "stage", "stage": new.stage}
                self._ctx.log.event("peer.welcomed", peer=new.peer, **part)
            point = sight.point
            if point is not None and point.step > curves.step:
                try:
                    await trio.to_thread.run_sync(curves.append, point)
                except OSError as error:
                    self._ctx.log.event("curve.not_written", level="warning", reason=str(error))
            self._looked.notify()
            await trio.sleep(pause_s(sight.due_in_s, self.look_s, max(self.look_s, _LOOK_RARELY_S)))

    async def _renew_table(self) -> None:
        while True:
            await trio.sleep(_TABLE_PERIOD_S)
            await self._write_table()

    async def _write_table(self) -> None:
        if self._curves is None or self._no_table:
            return
        try:
            async with self._at_table:
                await trio.to_thread.run_sync(self._curves.write_table)
        except (ConfigError, OSError) as error:
            self._no_table = isinstance(error, ConfigError)  # a missing package is logged once
            reason = f"the Parquet table of the learning curves was not written: {error}"
            self._ctx.log.event("curve.table_skipped", level="warning", reason=reason)

    async def _show_proofs(self, services: RunServices) -> None:
        """Serve the commit proofs of the kept checkpoints."""
        with services.proofs.serving():
            await trio.sleep_forever()

    # --- checkpoints ------------------------------------------------------------------------------------------

    async def _keep(self, services: RunServices) -> None:
        """Keep sets of checkpoints that are due. Errors never stop the role, because others join through this peer."""
        if self._listed:
            await self._open_what_is_there(services)
        while True:
            await self._looked.wait()
            sight = self._sight
            if sight is None or sight.point is None or not all(sight.stages):
                continue
            try:
                if self._keeping is None and await self._agrees(services):
                    self._keeping = await self._begin(services)
                if self._keeping is None or not self._keeping.due(sight.point.step, sight.final_step):
                    continue
                position = await self._keeping.keep(sight.point.step, sight.stages)
            except ConfigError as error:
                self._log_not_kept(str(error))
                await trio.sleep(_HINDERED_S)
                continue
            if position is not None:
                self._not_kept = None
                self._ctx.log.event("checkpoint.kept", step=position.step, stages=len(sight.stages))
                await self._announce(services)

    async def _open_what_is_there(self, services: RunServices) -> None:
        """Serve the checkpoints kept earlier, even if no stage peer is online yet to compare settings with."""
        try:
            self._keeping = await self._begin(services)
        except ConfigError as error:
            self._listed = []
            self._log_not_kept(str(error))

    async def _announce_now_and_then(self, services: RunServices) -> None:
        while True:
            with trio.move_on_after(_ANNOUNCE_S):
                await self._ctx.host.whereabouts.readdressed()
                await trio.sleep(1.0)  # several addresses often change at once
            self._invite(services.run)
            await self._announce(services)
            if self._keeping is not None:
                self._keeping.tidy()

    async def _announce(self, services: RunServices) -> None:
        positions = self._keeping.kept if self._keeping is not None else self._listed
        try:
            await services.directory.announce_kept(positions)
        except RemoteError as error:
            self._ctx.log.event("dht.announce_failed", level="warning", reason=str(error))

    async def _hold_experts(self, run: RunFile) -> None:
        """Keep checkpoints of experts. If the folder cannot be used, logs it once and retries."""
        while True:
            vault = Vault(run, self._ctx, VaultDisk(self._ctx.data_dir / "experts" / run.run), self.files)
            try:
                await vault.open()
            except OSError as error:
                if self._no_vault is None:
                    self._ctx.log.event("expert.none_kept", level="warning", reason=str(error))
                self._no_vault = str(error)
                await trio.sleep(_HINDERED_S)
                continue
            self._vault, self._no_vault = vault, None
            await vault.run()

    async def _agrees(self, services: RunServices) -> bool:
        """True if the run's published settings equal ours, False if none are published. ConfigError if they differ."""
        try:
            return await services.settings.agrees()
        except RemoteError:
            return False

    async def _begin(self, services: RunServices) -> CheckpointKeeper:
        """Open the keeper. It loads torch, in a thread since that takes seconds."""
        try:
            module = await trio.to_thread.run_sync(importlib.import_module, "peerd.state.checkpoints.keeper")
        except ModuleNotFoundError as error:
            raise ConfigError(f"to keep checkpoints a backbone needs {missing_package(error)}") from error
        keeping: CheckpointKeeper = module.CheckpointKeeper(self._ctx, services)
        await keeping.open()
        return keeping

    def _log_not_kept(self, reason: str) -> None:
        if reason != self._not_kept:
            self._not_kept = reason
            self._ctx.log.event("checkpoint.none_kept", level="warning", reason=reason)
