"""Current status of a daemon and its swarm, as plain data.

The daemon's part is read from its services on request. The swarm's part comes from the DHT. It is fetched on request if
the last copy is older than a few seconds, and contains its age; a snapshot never waits long for the network. In a peer
that takes part, the conductor's messages correct the records: which peers are gone, and why the run stands still.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from msgspec import structs, to_builtins

from peerd.core.clock import Clock
from peerd.core.decoders import convert
from peerd.core.version import VERSION
from peerd.dht.dht import Dht
from peerd.log import EventLog, plain
from peerd.messages.progress import pause_s
from peerd.role.run_services import RunServices
from peerd.rpc.rpc import Rpc
from peerd.run.runfile import BYTES_PER_MBIT, LimitsSection, RunFile
from peerd.screen.units import known
from peerd.status.network_view import network_view
from peerd.status.run_pulse import ContributionShares, ListedPosts, LossHistory, StandstillDetector
from peerd.status.swarm_status import (
    ContributionStatus,
    CurveStatus,
    NetworkStatus,
    PeerStatus,
    StagePeerStatus,
    StandstillStatus,
    SwarmStatus,
)
from peerd.status.swarm_view import FRESH_S, foretold_by, summed, swarm_view
from peerd.wire.host.host import Host
from peerd.wire.host.host_status import budgets_told, faults_told

SWARM_PERIOD_S: Final = 2.0  # at most one DHT read per period, and only on request
NETWORK_PERIOD_S: Final = 10.0  # at most one read of the conductor's network map per period
SWARM_RARELY_S: Final = 4.0  # replaces SWARM_PERIOD_S while the end of a long step is far
LOOK_WAIT_S: Final = 1.0  # how long a caller waits for a DHT read if there is no copy or an old one
RATE_WINDOW_S: Final = 5.0
JOINING_S: Final = 15.0  # a peer that joined less than this ago may not be on the conductor's list yet
_WORK: Final = ("step", "held_samples", "samples", "microbatches", "aggregated_bytes")  # keys of a role that works

StatusData = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoleState:
    """State of a role: what the supervisor knows of it, and in `told` the role's own figures."""

    name: str
    state: str
    restarts: int
    failure: str
    told: StatusData

    def as_dict(self) -> StatusData:
        fixed = {"role": self.name, "state": self.state, "restarts": self.restarts, "failure": self.failure or None}
        return {"waits_for": None, **self.told, **fixed}

    def posts(self) -> list[StatusData]:
        """The figures of each post of the role, and of a trainer's replica."""
        nested = [self.told[name] for name in ("replica", "member") if isinstance(self.told.get(name), dict)]
        return [post for told in (self.told, *nested) for post in told.get("posts") or [told]]


class StatusBoard:
    """Builds status snapshots. `run` must be running: it measures rates, and reads the DHT on request."""

    def __init__(
        self,
        net: tuple[Host, Rpc, Dht],
        clock: Clock,
        log: EventLog,
        run: RunFile | None,
        services: RunServices | None = None,
    ) -> None:
        self._host, self._rpc, self._dht = net
        self._clock = clock
        self._log = log
        self._run, self._services = run, services
        self._began = clock.now()
        self._samples: deque[tuple[float, int, int]] = deque()
        self._asked, self._seen = trio.Event(), trio.Event()
        self._swarm = SwarmStatus()
        self._looked_at = float("-inf")
        self._between: NetworkStatus | None = None  # the network between the peers
        self._between_at = float("-inf")
        self._pulse, self._presence = StandstillDetector(), ListedPosts()
        self._train, self._valid = LossHistory(), LossHistory()
        self._shares = {key: ContributionShares() for key in ("samples", "brought", "bytes_aggregated")}
        self._by_count = False  # True once the shares of samples use a conductor's counts
        # From this process's roles: whether they work in the run, whether it is complete, and what they wait for.
        self._works, self._complete, self._waits_for = False, False, ""
        self._step: int | None = None  # the newest step that they work at
        self.reachability: Callable[[], StatusData] = dict  # returns whether and how others reach this peer

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure)
            if self._run is not None:
                nursery.start_soon(self._look, self._run)
            task_status.started()

    async def snapshot(self, roles: Callable[[], Awaitable[list[RoleState]]]) -> StatusData:
        """The complete status, as plain data that can be encoded as JSON."""
        await self._refresh()
        states = await roles()
        self.note_roles(states)
        shown: StatusData = {
            "version": VERSION,
            "pid": os.getpid(),
            "time": self._clock.wall(),
            "uptime_s": self._clock.now() - self._began,
            "run": self._run.run if self._run is not None else None,
            "peer": {"id": self._host.id, "addrs": [str(addr) for addr in self._host.addrs()]},
            "roles": [state.as_dict() for state in states],
            "network": self._network(),
            "reachability": self.reachability(),
            "dht": self._dht.status(),
            "rpc": self._rpc.status(),
            "budgets": budgets_told(self._host.book),
            "faults": faults_told(self._host.faults),
            "swarm": to_builtins(self._swarm_now()) if self._swarm.run is not None else {},
            "events": self._log.recent(),
        }
        return {key: plain(value) for key, value in shown.items()}

    async def swarm(self) -> SwarmStatus:
        """Only the swarm's part of a snapshot, with text that is safe for a terminal."""
        await self._refresh()
        return convert(plain(to_builtins(self._swarm_now())), SwarmStatus)

    async def _refresh(self) -> None:
        """Request a DHT read if the last one is old. If it is older than SWARM_RARELY_S, wait up to LOOK_WAIT_S."""
        if self._run is None:
            return
        age_s, due_at = self._clock.now() - self._looked_at, self._swarm.next_step_at
        due_in_s = None if due_at is None else due_at - self._clock.wall()
        if age_s < pause_s(due_in_s, SWARM_PERIOD_S, SWARM_RARELY_S):
            return
        seen = self._seen
        self._asked.set()
        if age_s >= SWARM_RARELY_S:
            with trio.move_on_after(LOOK_WAIT_S):
                await seen.wait()

    # --- what is seen ---------------------------------------------------------------------------------------------

    def note_roles(self, states: Iterable[RoleState]) -> None:
        """Record the roles' work and losses, and the conductor's list. Called about once a second."""
        states = list(states)
        self._waits_for = next((str(s.told["waits_for"]) for s in states if s.told.get("waits_for")), "")
        posts = [post for state in states for post in state.posts()]
        working = [post for post in posts if any(key in post for key in _WORK)]
        self._works = bool(working)
        self._step = max((step for post in working if isinstance(step := post.get("step"), int)), default=None)
        for post in posts:
            self._train.note(post.get("step"), post.get("loss"))
            for evaluation in (post.get("evaluations") or [])[-1:]:
                self._valid.note(evaluation.get("step"), evaluation.get("loss"))
        if self._services is None or not working:
            return
        self._complete = any(post.get("complete") is True for post in posts)
        now, following = self._clock.now(), self._services.following
        due = not following.step_in_s  # unknown or overdue; a step predicted for later explains the wait by itself
        why = following.waits_for or (following.run_waits_for if due else "")
        work = [[post.get(key) for key in _WORK] for post in working]
        self._pulse.note(now, work, "" if self._complete else why or "")
        if following.members:
            self._presence.note(now, ((member.peer, member.stage) for member in following.members))

    def _note_swarm(self, found: SwarmStatus, wall: float) -> None:
        """Record the result of a DHT read. A failed read keeps the earlier figures, which grow old."""
        if found.unread and self._swarm.stages:
            self._swarm = structs.replace(self._swarm, why=found.why, network=found.network)
            return
        due_in_s = foretold_by(found, wall)
        next_step_at = None if due_in_s is None else wall + due_in_s
        self._swarm = structs.replace(found, seen=wall, next_step_at=next_step_at)
        self._looked_at = self._clock.now()
        self._train.note(found.step, found.loss)
        self._valid.note(found.valid_step, found.valid_loss)
        self._note_shares(found.contributions, counted=found.counted is not None)
        if not self._works:
            self._pulse.note(self._clock.now(), (found.step, found.microbatches), _told_reason(found, wall))

    def _note_shares(self, rows: Sequence[ContributionStatus], *, counted: bool) -> None:
        """Record the leaderboard's figures: a conductor's counts, or the peers' own figures until there are any."""
        if counted and not self._by_count:
            self._by_count = True
            self._shares |= {key: ContributionShares() for key in ("samples", "brought")}
        for key, shares in self._shares.items():
            by_count = self._by_count and key != "bytes_aggregated"
            if counted or not by_count:  # else wait for the counts of a new conductor
                shares.note({row.peer: getattr(row.counted if by_count else row, key, 0) or 0 for row in rows})

    # --- what is shown --------------------------------------------------------------------------------------------

    def _swarm_now(self) -> SwarmStatus:
        """Result of the last DHT read, with its current age, the time to the next step, and departed peers marked."""
        swarm, wall, now = self._swarm, self._clock.wall(), self._clock.now()
        if self._run is None or swarm.run is None:
            return swarm
        if swarm.stages:
            swarm = summed(swarm, wall)
            steps = [step for step in (swarm.step, self._step) if step is not None]
            stages = [structs.replace(s, peers=[self._row(row, wall, now) for row in s.peers]) for s in swarm.stages]
            swarm = structs.replace(
                swarm,
                step=max(steps, default=None),
                stages=stages,
                trainers=[
                    structs.replace(row, age_s=_age_s(row, wall), own=row.peer == self._host.id.text)
                    for row in swarm.trainers
                ],
            )
        still = self._pulse.standstill(now)
        if still is not None:  # records may still have the rates from before
            swarm = structs.replace(swarm, samples_per_s=0.0, tokens_per_s=0.0)
        own = self._host.id.text
        return structs.replace(
            swarm,
            age_s=max(0.0, now - self._looked_at),
            standstill=still,
            complete=self._complete,
            own_wait=self._waits_for or None,
            next_step_in_s=max(0.0, swarm.next_step_at - wall) if swarm.next_step_at is not None else None,
            total_steps=self._run.optimizer.total_steps or None,
            left_s=self._left_s(swarm, still),
            shares={key: shares.of(own) for key, shares in self._shares.items()},
            curve=CurveStatus(train=self._train.points(), valid=self._valid.points()),
        )

    def _row(self, row: StagePeerStatus, wall: float, now: float) -> StagePeerStatus:
        """Row of a stage peer. `gone` is True if the conductor no longer lists it."""
        post, age_s = (row.peer, row.stage), _age_s(row, wall)
        gone = self._works and self._presence.is_gone(now, post)
        if self._works and self._presence.follows() and not self._presence.is_listed(post):
            gone |= age_s > FRESH_S and wall - row.since > JOINING_S
        return structs.replace(row, age_s=age_s, gone=gone, own=row.peer == self._host.id.text)

    def _left_s(self, swarm: SwarmStatus, still: StandstillStatus | None) -> float | None:
        """Time that the rest of the run takes at the current rate, or None if it is unknown."""
        assert self._run is not None
        total, rate = self._run.optimizer.total_steps, known(swarm.samples_per_s)
        if not total or swarm.step is None or still is not None or not rate:
            return None
        return max(0, total - swarm.step) * self._run.batch.target_samples / rate

    def _network(self) -> StatusData:
        traffic = self._host.traffic()
        since, bytes_in, bytes_out = self._samples[0] if self._samples else (0.0, 0, 0)
        passed_s = max(self._clock.now() - since, 0.1)
        return {
            "links": traffic.links,
            "streams": traffic.streams,
            "bytes_in": traffic.bytes_in,
            "bytes_out": traffic.bytes_out,
            "in_per_s": (traffic.bytes_in - bytes_in) / passed_s,
            "out_per_s": (traffic.bytes_out - bytes_out) / passed_s,
            "line": self._line(),
            "peers": list(traffic.peers.values()),
        }

    def _line(self) -> StatusData:
        """Per direction, in Mb/s: the limit, the highest measured rate, and the current rate."""
        limits, line = self._run.limits if self._run is not None else LimitsSection(), self._host.line
        return {
            name: {
                "limit_mbit": limit or None,
                "measured_mbit": direction.most_bytes_per_s / BYTES_PER_MBIT or None,
                "now_mbit": direction.now_bytes_per_s / BYTES_PER_MBIT,
            }
            for name, limit, direction in (
                ("up", limits.upload_mbit, line.up),
                ("down", limits.download_mbit, line.down),
            )
        }

    # --- tasks ----------------------------------------------------------------------------------------------------

    async def _measure(self) -> None:
        """Sample the traffic totals of the last RATE_WINDOW_S, to compute rates from."""
        while True:
            traffic, now = self._host.traffic(), self._clock.now()
            self._samples.append((now, traffic.bytes_in, traffic.bytes_out))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()
            await trio.sleep(RATE_WINDOW_S / 10)

    async def _look(self, run: RunFile) -> None:
        """Read the DHT, and the network map, whenever that was requested."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            found = await swarm_view(self._dht, run, self._rpc.gate, self._clock.wall())
            if self._services is not None and self._clock.now() - self._between_at >= NETWORK_PERIOD_S:
                self._between = await network_view(self._services, found)
                self._between_at = self._clock.now()
            self._note_swarm(structs.replace(found, network=self._between), self._clock.wall())
            self._seen.set()
            self._seen = trio.Event()
            await trio.sleep(SWARM_PERIOD_S)


def _age_s(row: PeerStatus, wall: float) -> float:
    return max(0.0, wall - row.told_at)


def _told_reason(swarm: SwarmStatus, wall: float) -> str:
    """Why a run waits, by its records, for a peer that takes no part in it. Returns "" if it does not wait."""
    if swarm.why:
        return ""
    empty = [str(s.stage) for s in swarm.stages if not any(_age_s(row, wall) <= FRESH_S for row in s.peers)]
    if empty:
        return f"stage {', '.join(empty)} has no peers"
    told = [row for row in swarm.stage_peers() if row.peer == row.conductor and _age_s(row, wall) <= FRESH_S]
    return next((row.waits_for for row in told if row.waits_for and not row.step_at), "")
