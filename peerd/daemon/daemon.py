"""The composition root: builds all parts of one peer, starts them in order, supervises roles, and stops in order.

Start: lock and identity, host, RPC, DHT, control socket, roles. Stop: roles leave (refuse new work, send finished
results), records are withdrawn, links are closed with a goodbye; all within `DRAIN_S`, or longer while a role saves a
state that no other peer has. The first signal stops the daemon in this way, a second one at once; a volunteer's peer
also stops in this way when its hours end. A role that fails is restarted after a pause, up to five times; then the
daemon stops with an error. A failed service is always restarted (`wire/host/upkeep`). The role supervisor is one of the
places where any exception is caught, because a plug-in's bug must not stop the other roles.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import traceback
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import trio

from peerd.access.access_guard import Access
from peerd.access.token_files import CredentialFiles
from peerd.core.addr import parse_addr, parse_announced, peers_named, with_peer
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, LocalError, PeerdError
from peerd.core.keys import Keypair
from peerd.daemon.control import memory_limit, socket
from peerd.daemon.control.company import Company, CompanyConfig
from peerd.daemon.control.connectivity import Connectivity, ConnectivityConfig, relaying
from peerd.daemon.control.guest import limits_told
from peerd.daemon.control.leave_deadlines import DRAIN_S, LEAVE_S, STOP_S, LeaveDeadlines
from peerd.daemon.control.leave_deadlines import end_process_after as _end_process_after
from peerd.daemon.control.open_hours import OpenHours
from peerd.daemon.devices import Devices
from peerd.log import EventLog, plain
from peerd.messages.run_link import best_link
from peerd.role.peer_stack import PeerStack
from peerd.role.role import Role, RoleContext
from peerd.role.run_services import RunServices
from peerd.run.contents import digest_at, named_files
from peerd.run.home import make_private_dir, socket_path
from peerd.run.runfile import LimitsSection, RunFile
from peerd.status.status_board import RoleState, StatusBoard
from peerd.status.view.progress_line import tell_progress
from peerd.status.view.waits import WaitLogger
from peerd.wire.host.addresses import CONFIGURED
from peerd.wire.host.host_status import faults_told
from peerd.wire.host.line_meter import LineMeter
from peerd.wire.host.upkeep import Upkeep
from peerd.wire.tcp.rate_limit import LimitedLine

WITHDRAW_S: Final = 1.0  # for withdrawing our records from other peers
RESTART_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each restart of a failed role
HEALTHY_S: Final = 60.0  # after running this long, a role's pauses begin again with the first
WAITS_PERIOD_S: Final = 1.0  # between two checks of what roles wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPlan:
    """What a daemon starts, and its settings. `data_dir` may not exist yet."""

    roles: tuple[type[Role], ...]
    run: RunFile | None
    bootstrap: tuple[str, ...]
    listen: tuple[str, ...]
    data_dir: Path
    announced: tuple[str, ...] = ()  # addresses of this peer for others, as the user configured them
    run_file: str = "run.yaml"  # path as typed by the user, for the command that others join with
    device: str = "cpu"
    seed: int | None = None
    log_level: str = "info"
    announce: Callable[[str], None] | None = None  # receives the best address, instead of a greeting on the terminal
    company: CompanyConfig = field(default_factory=CompanyConfig)
    warn: Callable[[str], None] = lambda text: None  # receives the reason why start or end waits, as does the log
    limits: LimitsSection = field(default_factory=LimitsSection)  # of a peer without a run file

    @property
    def own_limits(self) -> LimitsSection:
        """Limits of this peer: the run file's, else those of the command line."""
        return self.run.limits if self.run is not None else self.limits

    @property
    def tells_progress(self) -> bool:
        """True if the terminal gets progress lines: for a peer that works in a run, at log level info or debug."""
        works = self.run is not None and any(cls.name != "backbone" for cls in self.roles)
        return works and self.announce is None and self.log_level in ("debug", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResources:
    """Local resources of a peer, which need no network: directory, identity, clock, log, credentials and limits."""

    home: Path
    keypair: Keypair
    clock: Clock
    log: EventLog
    papers: CredentialFiles | None = None  # in a run with tokens
    ways: ConnectivityConfig = field(default_factory=ConnectivityConfig)  # for the machine's network
    line: LimitedLine = field(default_factory=LimitedLine)  # enforces the user's rate limits
    hours: OpenHours | None = None  # None: always open


@dataclass(slots=True, eq=False)
class _Held:
    """One role of the daemon, and the supervisor's state of it."""

    cls: type[Role]
    role: Role | None = None
    state: str = "starting"  # starting, running, paused, finished, failed, left
    restarts: int = 0
    failure: str = ""
    done: trio.Event = field(default_factory=trio.Event)


def _relays(plan: DaemonPlan) -> bool:
    """True if this peer relays others' circuits: as set in limits.relay, else if it is a backbone."""
    told = plan.own_limits.relay
    return told if told is not None else "backbone" in {cls.name for cls in plan.roles}


class Daemon:
    """One peer with its roles. Call `run` once; `stop`, from any task, starts an orderly stop."""

    def __init__(self, plan: DaemonPlan, ground: LocalResources, stack: PeerStack) -> None:
        self._plan = plan
        self._home = ground.home
        self._log = ground.log
        self._clock, self._line, self._hours = ground.clock, ground.line, ground.hours
        self.host, self.rpc, self.dht = stack.host, stack.rpc, stack.dht
        self.access: Access | None = None
        if plan.run is not None and ground.papers is not None:
            self.access = Access(plan.run, self.host, self.rpc, ground.clock, ground.papers)
            self.rpc.guard(self.access)
        ways = replace(ground.ways, relay=_relays(plan), relaying=relaying(plan.own_limits))
        self.connectivity = Connectivity(self.host, (self.rpc, self.dht), ground.clock, ground.keypair, ways)
        self._held = [_Held(cls) for cls in plan.roles]
        self._services: RunServices | None = None
        if plan.run is not None:
            self._services = RunServices(plan.run, self.host, self.rpc, self.dht, ground.clock)
            self._services.proofs.trust(peers_named(plan.bootstrap))
        self.company = Company((self.host, self.dht), self._services, plan.company, self._tell_of_company)
        self._failure: Exception | None = None
        self._stopping = trio.Event()
        self._stop_reason = ""
        self.rests = False  # True if it stops because its hours are over
        self._up = False
        self._drained = False
        self._leaving = LeaveDeadlines(self._tell_unsaved)

    def stop(self, reason: str) -> None:
        """Start an orderly stop. Later calls have no effect."""
        if not self._stopping.is_set():
            self._stop_reason = reason
            self._stopping.set()

    def leaves_until(self) -> float:
        """Time, by time.monotonic, before which the process must not be ended. May be called from any thread."""
        return self._leaving.until()

    async def run(self, signals: AsyncIterable[int]) -> None:
        """Run until all roles have finished or a signal stops it. Raises PeerdError if a role failed for good."""
        async with Devices(self._plan.own_limits) as devices, trio.open_nursery() as services:
            services.start_soon(self._obey_signals, signals, services.cancel_scope)
            net = self.host, self.rpc, self.dht
            self._board = StatusBoard(net, self._clock, self._log, self._plan.run, self._services)
            self._board.reachability = self.connectivity.status
            await self._start_services(services, self._board)
            self._greet()
            self._up = True
            if self._hours is not None:
                services.start_soon(self._keep_hours, self._hours)
            if most_gb := self._plan.own_limits.memory_gb:
                services.start_soon(memory_limit.keep, most_gb, self._too_large)
            await self._run_roles(devices)
            with trio.move_on_after(WITHDRAW_S):
                await self.dht.withdraw_all()
            self._drained = True
            services.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        self._log.event("daemon.stopped", why=self._stop_reason)

    async def _start_services(self, services: trio.Nursery, board: StatusBoard) -> None:
        """Start the services in the order of their dependencies. A failed service is restarted."""
        keep, listen = Upkeep(self.host.faults), [parse_addr(text) for text in self._plan.listen]
        bootstrap = [parse_addr(text) for text in self._plan.bootstrap]
        self.host.whereabouts.announce(CONFIGURED, list(map(parse_announced, self._plan.announced)))
        await services.start(keep.run, "host", functools.partial(self.host.run, listen))
        await services.start(keep.run, "calls", self.rpc.run)
        await services.start(keep.run, "connectivity", self.connectivity.run)
        services.start_soon(keep.run_plain, "line meter", LineMeter(self.host).run)
        if self.access is not None:
            await services.start(keep.run, "access", self.access.run)
            services.start_soon(keep.run_plain, "access refresh", functools.partial(self.access.refresh, self.dht))
        await services.start(keep.run, "directory", functools.partial(self.dht.run, bootstrap))
        if any(held.cls.needs_run for held in self._held):
            await services.start(keep.run, "company", self.company.run)
        if self._services is not None:
            services.start_soon(keep.run_plain, "link watch", self._services.link_watch.run)
        await services.start(keep.run, "status", board.run)
        if socket.SUPPORTED:
            serve = functools.partial(socket.serve, socket_path(self._home), functools.partial(self._snapshot, board))
            await services.start(keep.run, "control socket", serve)
        services.start_soon(keep.run_plain, "waits", self._tell_waits)
        if self._plan.tells_progress:
            services.start_soon(keep.run_plain, "progress", functools.partial(tell_progress, board, say))

    async def _keep_hours(self, hours: OpenHours) -> None:
        await hours.closed()
        if not self._stopping.is_set():
            self.rests = True
            self.stop(f"its hours are over (limits.hours {hours.text})")

    def _too_large(self, why: str) -> None:
        self._failure = self._failure or ConfigError(why)
        self.stop("it uses more memory than limits.memory_gb allows")

    # --- roles ---------------------------------------------------------------------------------------------------

    async def _run_roles(self, devices: Devices) -> None:
        async with trio.open_nursery() as nursery:
            for held in self._held:
                nursery.start_soon(self._supervise, held, self._context(held.cls, devices))
            nursery.start_soon(self._finish_with_roles)
            await self._stopping.wait()
            await self._leave()
            nursery.cancel_scope.cancel()

    async def _finish_with_roles(self) -> None:
        for held in self._held:
            await held.done.wait()
        self.stop("all roles have finished")

    def _context(self, cls: type[Role], devices: Devices) -> RoleContext:
        plan = self._plan
        return RoleContext(
            run=plan.run,
            services=self._services,
            beside=frozenset(other.name for other in plan.roles if other is not cls),
            host=self.host,
            rpc=self.rpc,
            dht=self.dht,
            clock=self._clock,
            data_dir=make_private_dir(self._home / cls.name),
            device=plan.device,
            log=self._log.bind(role=cls.name),
            worker=devices.worker,
            read_in_turn=self._line.reads(),
        )

    async def _supervise(self, held: _Held, ctx: RoleContext) -> None:
        pauses = list(RESTART_PAUSES_S)
        if held.cls.needs_run and (failure := await _failure_of(self.company.wait)) is not None:
            self._failure = self._failure or failure
            held.state = "failed"
            held.done.set()
            return self.stop("no other peer can be reached")
        while True:
            began = trio.current_time()
            failure = await _failure_of(functools.partial(self._run_role, held, ctx))
            if failure is None:
                held.state = "finished"
                held.done.set()
                return None
            if trio.current_time() - began > HEALTHY_S:
                pauses = list(RESTART_PAUSES_S)
            held.failure = _sentence(failure)
            self._keep_traceback(failure)
            if not _is_expected(failure):
                self.host.faults.note(f"role {held.cls.name}", failure)
            if isinstance(failure, ConfigError) or not pauses:
                return self._give_up(held, failure)
            held.state, held.role, pause_s = "paused", None, pauses.pop(0)
            held.restarts += 1
            self._log.event("role.failed", level="warning", role=held.cls.name, why=held.failure, again_in_s=pause_s)
            await trio.sleep(pause_s)

    async def _run_role(self, held: _Held, ctx: RoleContext) -> None:
        held.state = "starting"
        held.role = held.cls(ctx)
        async with trio.open_nursery() as nursery:
            await nursery.start(held.role.run)
            held.state = "running"
            self._log.event("role.started", role=held.cls.name)

    def _give_up(self, held: _Held, failure: Exception) -> None:
        held.state = "failed"
        if isinstance(failure, ConfigError):
            self._failure = self._failure or failure
        else:
            times = f" {held.restarts + 1} times" if held.restarts else ""
            details = self._home / "failure.txt"
            self._failure = self._failure or PeerdError(
                f"role {held.cls.name} failed{times}, last: {held.failure}; details are in {details}"
            )
        held.done.set()
        self.stop(f"role {held.cls.name} failed")

    async def _leave(self) -> None:
        """Call `leave` of all running roles concurrently, within LEAVE_S (see `LeaveDeadlines`)."""

        async def leave(held: _Held, role: Role) -> None:
            failure = await _failure_of(role.leave)
            if failure is not None:
                self._log.event("role.leave_failed", level="warning", role=held.cls.name, why=_sentence(failure))
            held.state = "left"

        self._log.event("daemon.stopping", why=self._stop_reason)
        async with trio.open_nursery() as watch:
            with trio.CancelScope() as limit:
                watch.start_soon(self._leaving.limit, limit, self._unsaved)
                async with trio.open_nursery() as nursery:
                    for held in self._held:
                        if held.role is not None and held.state == "running":
                            nursery.start_soon(leave, held, held.role)
            watch.cancel_scope.cancel()
        if limit.cancelled_caught:
            late = [held.cls.name for held in self._held if held.state == "running"]
            self._log.event("role.left_late", level="warning", roles=late, after_s=LEAVE_S)
            for what in self._not_saved():
                self._log.event("role.not_saved", level="warning", what=what)

    def _unsaved(self) -> list[str]:
        """Messages on states that leaving roles still have to save. Empty if a failure ends the process."""
        return [] if self._failure is not None else self._not_saved()

    def _not_saved(self) -> list[str]:
        roles = [held.role for held in self._held if held.role is not None and held.state == "running"]
        return [found for role in roles if isinstance(found := getattr(role, "unsaved", None), str)]

    def _tell_unsaved(self, what: str) -> None:
        if self._plan.announce is None:
            say(f"{what}; press Ctrl+C again to stop without it")
        else:  # this peer is part of a user's program, which alone writes to stdout
            self._plan.warn(f"{what}; Ctrl+C to stop without it")
        self._log.event("role.unsaved", what=what)

    def _keep_traceback(self, failure: Exception) -> None:
        if isinstance(failure, ConfigError):
            return  # the user must fix it, and its message is enough for that
        with contextlib.suppress(OSError), (self._home / "failure.txt").open("w", encoding="utf-8") as file:
            traceback.print_exception(failure, file=file)

    # --- for people ----------------------------------------------------------------------------------------------

    async def _role_states(self) -> list[RoleState]:
        states = []
        for held in self._held:
            waits = held.cls.needs_run and held.role is None and not held.restarts
            told: dict[str, Any] = {"waits_for": self.company.waits_for()} if waits else {}

            async def read(role: Role | None = held.role, told: dict[str, Any] = told) -> None:
                told.update(role.status() if role is not None else {})

            failure = await _failure_of(read)
            if failure is not None:
                told["waits_for"] = f"its status can't be read: {_sentence(failure)}"
            states.append(RoleState(held.cls.name, held.state, held.restarts, held.failure, told))
        return states

    async def _snapshot(self, board: StatusBoard) -> dict[str, Any]:
        own: dict[str, Any] = {"data_dir": str(self._home), "stopping": self._stop_reason or None}
        own["alone"] = self.company.alone()
        own["no_part_yet"] = self.company.waits_for() if self._waits_for_company else None
        own["limits"] = limits_told(self._plan.own_limits)
        own["access"] = plain(self.access.status()) if self.access is not None else None

        async def look() -> None:
            own.update(await board.snapshot(self._role_states))

        if not await self.host.faults.contain(look, lambda: "a status snapshot"):
            own |= {"faults": plain(faults_told(self.host.faults)), "events": self._log.recent()}
        return own

    async def _tell_waits(self) -> None:
        """Log what the network and each role wait for, once a wait lasts from one check to the next."""
        teller = WaitLogger(self._log)
        while not self._stopping.is_set():
            teller.look(await self._reasons())
            await trio.sleep(WAITS_PERIOD_S)

    async def _reasons(self) -> dict[str, str | None]:
        told = self.dht.status()
        states = await self._role_states()
        self._board.note_roles(states)
        roles = {state.name: state.told.get("waits_for") or None for state in states}
        access = self.access.waits_for() if self.access is not None else None
        if self._waits_for_company:  # Company logs by itself what it has tried
            return {"clock": told["clock_warning"], "access": access}
        ways = {"network": told["waits_for"], "reachability": self.connectivity.waits_for()}
        return {**ways, "clock": told["clock_warning"], "access": access, **roles}

    @property
    def _waits_for_company(self) -> bool:
        return self.company.waits_for() is not None and any(held.cls.needs_run for held in self._held)

    def _tell_of_company(self, event: str, reason: str) -> None:
        self._log.event(event, level="info" if event == "company.found" else "warning", reason=reason)
        if event == "company.missing":
            self._plan.warn(reason)

    def _greet(self) -> None:
        plan, addrs = self._plan, [str(addr) for addr in self.host.addrs()]
        if plan.announce is not None:
            if addrs:
                plan.announce(best_addr(addrs))
            return
        names = ", ".join(cls.name for cls in plan.roles)
        run = f" of run {plan.run.run}" if plan.run is not None else ""
        say(f"peerd {names}{run}; data in {self._home}")
        say(f"peer id {self.host.id}")
        for addr in self.host.listen_addrs():  # addresses of relays and routers change: see `peerd status`
            say(f"listening on {with_peer(addr, self.host.id)}")
        for addr in self.host.whereabouts.announced(CONFIGURED):
            say(f"announced as {with_peer(addr, self.host.id)}")
        if plan.run is not None:
            for key, file in named_files(plan.run).items():
                say(f"{key}: {digest_at(plan.run, key) or 'unknown'}  # of {file}")
        if addrs and (plan.company.alone or not plan.bootstrap):
            say(f"others join with: {self._join_line(addrs)}")

    def _join_line(self, addrs: Sequence[str]) -> str:
        """The command for others to join: with a join link if this peer publishes the run file, else with --model."""
        run = self._plan.run
        link = best_link(self.host.addrs(), self.host.id, run.run) if run is not None else None
        if run is not None and link is not None and "backbone" in {cls.name for cls in self._plan.roles}:
            return f"peerd join {link.text}" + (" --token FILE" if run.access.allow == "tokens" else "")
        role = "trainer" if run is not None and run.pipeline.stages == 1 else "stage"
        return f"peerd join --role {role} --model {self._plan.run_file} --bootstrap {best_addr(addrs)}"

    # --- ending --------------------------------------------------------------------------------------------------

    async def _obey_signals(self, signals: AsyncIterable[int], everything: trio.CancelScope) -> None:
        """Stop in order at the first signal, and at once at a second one or at one during the start."""
        async for number in signals:
            name = signal.Signals(number).name
            if self._up and (self.rests or not self._stopping.is_set()):
                self.rests = False
                say("stopping; press Ctrl+C again to stop at once")
                _end_process_after(DRAIN_S, lambda: 0 if self._drained else 1, self._leaving.until)
                self.stop(name)
                continue
            if self._up:
                self._failure = self._failure or PeerdError(f"stopped at once by a second {name}")
            _end_process_after(STOP_S, lambda: 1)
            self.stop(name)
            everything.cancel()


async def _failure_of(action: Callable[[], Awaitable[None]]) -> Exception | None:
    """Run a role's code. Returns the exception that it raised, taken out of exception groups, or None."""
    try:
        await action()
    except Exception as error:
        return leaf(error)
    return None


def leaf(error: Exception) -> Exception:
    """The exception to report from nested groups: the first ConfigError, else the first of all."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [leaf(inner) for inner in error.exceptions]
    return next((found for found in leaves if isinstance(found, ConfigError)), leaves[0])


def _sentence(error: Exception) -> str:
    text = str(error) or "no message"
    return text if _is_expected(error) else f"{type(error).__name__}: {text}"


def _is_expected(error: Exception) -> bool:
    """True for errors caused by other peers or by the user's settings, and not by a bug in peerd or a plug-in."""
    return isinstance(error, PeerdError) and not isinstance(error, LocalError)


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def best_addr(addrs: Sequence[str]) -> str:
    """The first address that is not loopback, else the first."""
    loopback = ("/ip4/127.", "/ip6/::1/")
    return next((addr for addr in addrs if not addr.startswith(loopback)), addrs[0])
