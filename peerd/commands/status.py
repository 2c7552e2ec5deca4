"""Status of one daemon and its swarm now, as plain data.

The daemon's part is read from its services at the moment of asking. The swarm's part comes from the DHT, so it is
fetched in the background while someone asks, and shown with its age; a snapshot never waits long for the network.
Records in the DHT are strangers' words: decoded strictly, counted when unreadable.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import trio

from peerd.core.clock import Clock
from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import DIRECTORY_READ_BYTES
from peerd.core.messages.contributions import contributions_key, decode_contributed
from peerd.core.messages.progress import (
    decode_stage,
    decode_trainer,
    foretold_in_s,
    pause_s,
    progress_key,
    stage_key,
    sum_told,
)
from peerd.core.record import Record
from peerd.core.runfile import BYTES_PER_MBIT, LimitsSection, RunFile
from peerd.core.version import VERSION
from peerd.log import EventLog, plain
from peerd.net.host.host import Host
from peerd.net.host.host_status import budgets_told, faults_told
from peerd.service.dht.dht import Dht
from peerd.service.rpc.rpc import Rpc
from peerd.service.rpc.types import Gate

SWARM_PERIOD_S: Final = 2.0  # one look into the DHT per period at most, and only while someone asks
SWARM_RARELY_S: Final = 10.0  # while the end of a long step is far
SWARM_TIMEOUT_S: Final = 5.0
FIRST_LOOK_S: Final = 1.0  # how long the first caller waits for the swarm's part
RATE_WINDOW_S: Final = 5.0
STAGES_SHOWN: Final = 64  # of a swarm view: bounds its look-ups


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role as the supervisor and the role itself tell it."""

    name: str
    state: str
    restarts: int
    failure: str
    told: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        fixed = {"role": self.name, "state": self.state, "restarts": self.restarts, "failure": self.failure or None}
        return {"waits_for": None, **self.told, **fixed}


class StatusBoard:
    """Answers `snapshot`. Its `run` measures rates and looks into the DHT when asked to."""

    def __init__(self, net: tuple[Host, Rpc, Dht], clock: Clock, log: EventLog, run: RunFile | None) -> None:
        self._host, self._rpc, self._dht = net
        self._clock = clock
        self._log = log
        self._run = run
        self._began = clock.now()
        self._samples: deque[tuple[float, int, int]] = deque()
        self._asked = trio.Event()
        self._seen = trio.Event()
        self._swarm: dict[str, Any] = {}
        self.reachability: Callable[[], dict[str, Any]] = dict  # tells whether and how others reach us

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure)
            if self._run is not None:
                nursery.start_soon(self._look, self._run)
            task_status.started()

    async def snapshot(self, roles: Callable[[], Awaitable[list[RoleState]]]) -> dict[str, Any]:
        """Everything a watcher may want to know, as plain data."""
        self._asked.set()
        if self._run is not None:
            with trio.move_on_after(FIRST_LOOK_S):
                await self._seen.wait()
        states = await roles()
        shown: dict[str, Any] = {
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
            "swarm": self._swarm_now(),
            "events": self._log.recent(),
        }
        return {key: plain(value) for key, value in shown.items()}

    def _swarm_now(self) -> dict[str, Any]:
        """The last look; its forecast is counted down."""
        due_at = self._swarm.get("next_step_at")
        if due_at is None:
            return self._swarm
        return self._swarm | {"next_step_in_s": max(0.0, due_at - self._clock.wall())}

    def _network(self) -> dict[str, Any]:
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

    def _line(self) -> dict[str, Any]:
        """Per direction, in Mb/s: the limit, the most that was seen to pass, and what passes now."""
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

    async def _measure(self) -> None:
        """Keep the totals of the last few seconds, for the rates."""
        while True:
            traffic, now = self._host.traffic(), self._clock.now()
            self._samples.append((now, traffic.bytes_in, traffic.bytes_out))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()
            await trio.sleep(RATE_WINDOW_S / 10)

    async def _look(self, run: RunFile) -> None:
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            found = await swarm_view(self._dht, run, self._rpc.gate)
            wall = self._clock.wall()
            due_in_s = foretold_by(found, wall)
            self._swarm = found | {"seen": wall, "next_step_at": None if due_in_s is None else wall + due_in_s}
            self._seen.set()
            await trio.sleep(pause_s(due_in_s, SWARM_PERIOD_S, SWARM_RARELY_S))


async def swarm_view(dht: Dht, run: RunFile, gate: Gate | None = None) -> dict[str, Any]:
    """The swarm of a run as the DHT shows it: its step, each stage's peers, and each peer's contribution."""
    stages = min(run.pipeline.stages, STAGES_SHOWN)
    keys = [stage_key(run.run, number) for number in range(stages)]
    try:
        wanted = [*keys, progress_key(run.run), contributions_key(run.run)]
        found = await dht.get_many(wanted, timeout_s=SWARM_TIMEOUT_S, most_bytes=DIRECTORY_READ_BYTES)
    except RemoteError as error:
        return {"run": run.run, "why": f"the directory gave no answer: {error}"}
    unreadable: list[Record] = []
    rows = [
        {"stage": number, "peers": _members(_read(found.get(key, []), decode_stage, unreadable), gate, role="stage")}
        for number, key in enumerate(keys)
    ]
    trainers = _read(found.get(progress_key(run.run), []), decode_trainer, unreadable)
    given = _members(_read(found.get(contributions_key(run.run), []), decode_contributed, unreadable), gate)
    return {
        "run": run.run,
        **_summary(rows, trainers),
        "stages": rows,
        "trainers": trainers,
        "contributions": leader_board(given),
    } | ({"unreadable_records": len(unreadable)} if unreadable else {})


def foretold_by(swarm: dict[str, Any], wall: float) -> float | None:
    """Seconds until the step under way should end, as the stage peers of `swarm_view` have it; None: nobody knows."""
    rows = [row for stage in swarm.get("stages", []) for row in stage["peers"]]
    return foretold_in_s([(row["peer"].text, row["conductor"], row["step_at"]) for row in rows], wall)


def _read(records: list[Record], decode: Callable[[bytes], Any], unreadable: list[Record]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for record in records:
        try:
            value = decode(record.value)
        except ProtocolViolation:
            unreadable.append(record)
            continue
        told = {name: getattr(value, name) for name in value.__struct_fields__}
        rows.append({"peer": record.publisher, **told})
    return rows


def _members(rows: list[dict[str, Any]], gate: Gate | None, role: str = "") -> list[dict[str, Any]]:
    """In a run with tokens: only members' rows, under the names that the organizer signed."""
    found = []
    for row in rows:
        peer, token = row["peer"], row.pop("token")
        name = gate.named(peer, token, role) if gate is not None else ""
        if name is not None:
            found.append(row | {"name": name})
    return found


def leader_board(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contributions by the peers' own word, one row for each peer over all its roles, the largest first."""
    rows: dict[PeerId, dict[str, Any]] = {}
    for told in given:
        fresh = {"peer": told["peer"], "name": told["name"], "samples": 0, "bytes_aggregated": 0, "hours": 0.0}
        row = rows.setdefault(told["peer"], fresh)
        row["samples"] += told["samples"]
        row["bytes_aggregated"] += told["bytes_aggregated"]
        row["hours"] = max(row["hours"], told["seconds"] / 3600)
        row["since"] = min(row.get("since", told["since"]), told["since"])
    return sorted(rows.values(), key=lambda row: (-row["samples"], -row["bytes_aggregated"], row["peer"]))


def _summary(stages: list[dict[str, Any]], trainers: list[dict[str, Any]]) -> dict[str, Any]:
    """The run's step, loss and speed from what its trainers say; the step from its stages when none is there."""
    steps = [row["step"] for row in trainers] or [peer["step"] for stage in stages for peer in stage["peers"]]
    losses = [row["loss"] for row in trainers if math.isfinite(row["loss"])]
    judged = [row for row in trainers if math.isfinite(row["valid_loss"])]
    valid = max(judged, key=lambda row: int(row["valid_step"]), default=None)
    return {
        "step": max(steps, default=None),
        "loss": sum_told(loss / len(losses) for loss in losses) if losses else None,
        "valid_loss": valid["valid_loss"] if valid else None,
        "valid_step": valid["valid_step"] if valid else None,
        "samples_per_s": sum_told(row["samples_per_s"] for row in trainers),
        "tokens_per_s": sum_told(row["tokens_per_s"] for row in trainers),
        "microbatches": sum(row["microbatches"] for row in trainers),
        "redone": sum(row["redone"] for row in trainers),
        "lost": sum(row["lost"] for row in trainers),
    }
