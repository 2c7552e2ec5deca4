"""Routes of microbatches in virtual time: step time and wasted device time of SWARM's wiring, GWTF's flow, and peerd's.

Real roles in virtual time: one trainer, and 60 stage peers of speeds 1, 2 and 4 in five stages, at random in ten
places. Delays and rates between places are those of DT-FM's world-wide case, with a link for each pair of peers; two of
its eight cities have a second place, as distant as two cities on the same coast. Ten percent of the peers leave per
hour, half of them killed and half with a goodbye, and as many join; in shorter runs, one leaves while each policy is
measured. Sizes and rates are divided by the same factor: the activation of a microbatch has 134 MB (8 x 2,048 tokens
with 4,096 numbers of 16 bits), and the slowest device takes 4 s for its part of a microbatch. Times are not scaled, so
that the roles' pauses and timeouts have their real weight. All policies run one after another with the same roles in
one swarm, and each is the first for one seed of three. They do not see each other's answers, but the wiring keeps its
measured speeds. GWTF's routes use exact costs from the simulation, peerd's use the answers of calls. Wasted time is
spent on microbatches that did not count.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import trio

from peerd.dht.dht import DhtConfig
from peerd.dht.node.node_state import KademliaConfig
from peerd.messages.handover import Hop
from peerd.pipeline import direct
from peerd.pipeline.routes.cheapest_route import CheapestRoute
from peerd.pipeline.routes.route_policy import Cut, Options, RoutePolicy, Sent
from roles.trainer import TrainerRole
from scripts.benchmarks._placement_cases import CITIES, cases
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._routing_flow import FlowRoutes
from scripts.benchmarks._virtual_pipeline import LayerDevice, booted, in_virtual_time, small_run, start_stage
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import NetConfig, SimPath
from tests.worlds.simulation.world import Node, World, WorldConfig

POLICIES: Final = ("swarm", "flow", "ours")
SECOND: Final = ("Ohio", "Frankfurt")  # cities with a second place
SECOND_MS, SECOND_GBIT_S = 11.0, 1.12  # between both places of a city, as between Virginia and Ohio
SPEEDS: Final = (1.0, 2.0, 4.0)
SLOWEST_S: Final = 4.0  # of a microbatch on a device of speed 1
SAMPLES: Final = 2  # of a microbatch
CONTEXT: Final = 256
WIDTH: Final = 32
ACTIVATION_BYTES: Final = 4 * SAMPLES * CONTEXT * WIDTH
REAL_BYTES: Final = 8 * 2048 * 4096 * 2
WINDOW_BYTES: Final = 256 << 10
LEAVE_EVERY_S: Final = 3600.0 / 6  # a tenth of 60 in an hour
FIRST_LEAVES_S: Final = 60.0  # after the beginning of the measured steps
PATIENCE_S: Final = 20_000.0
LOOK_S: Final = 0.1
QUIET: Final = DhtConfig(
    node=KademliaConfig(k=8, wide=(), copies=2, enough=1, spare=0)
)  # a small DHT, which is not measured


@dataclass(frozen=True, slots=True)
class Scene:
    """Size of a run. The seed determines the peers' places and which peers leave."""

    seed: int
    stages: int = 5
    peers: int = 60
    microbatches: int = 48  # of a step
    warm: int = 3  # warm-up steps of each policy
    steps: int = 4


@dataclass(frozen=True, slots=True)
class Seat:
    """One peer's stage, place and speed."""

    stage: int
    place: int
    speed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a policy: seconds of each measured step, share of wasted device time, and peers that left."""

    steps_s: list[float]
    wasted: float
    left: int


def network() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Delays in seconds and rates in bytes per second between places. Rates are scaled like the tensors."""
    case = next(case for case in cases() if case.name == "5-world-wide")
    at = [*range(len(CITIES)), *(CITIES.index(city) for city in SECOND)]
    delay_ms, gbit_s = (table[np.ix_(at, at)].copy() for table in (case.delay_ms, case.gbit_s))
    for new, city in enumerate(SECOND, len(CITIES)):
        for table, value in ((delay_ms, SECOND_MS), (gbit_s, SECOND_GBIT_S)):
            table[new, CITIES.index(city)] = table[CITIES.index(city), new] = value
    return delay_ms / 1e3, gbit_s * 1e9 / 8 * ACTIVATION_BYTES / REAL_BYTES


def seats_of(scene: Scene, rng: random.Random) -> list[Seat]:
    """The peers' seats in random order: equally many of each speed per stage as far as possible, at random places."""
    places, each = len(network()[0]), scene.peers // scene.stages
    seats = [
        Seat(stage, rng.randrange(places), SPEEDS[(number + stage) % len(SPEEDS)])
        for stage in range(scene.stages)
        for number in range(each)
    ]
    rng.shuffle(seats)
    return seats


class Block:
    """Route policy that delegates to the current one of several policies. Each receives only its own answers."""

    def __init__(self, policies: Mapping[str, RoutePolicy]) -> None:
        self._policies, self.current = policies, POLICIES[0]
        self._sent: dict[int, tuple[str, Sent]] = {}

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        return self._policies[self.current].choose(now, options, cut)

    def sent(self, route: Sequence[str]) -> Sent:
        sent = self._policies[self.current].sent(route)
        self._sent[id(sent)] = self.current, sent
        return sent

    def ended(self, sent: Sent) -> None:
        policy, _ = self._sent.pop(id(sent))
        self._policies[policy].ended(sent)

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None:
        policy, _ = self._sent[id(sent)]
        self._policies[policy].answered(now, sent, hops, took_s)

    def update(self, rates: Mapping[str, float]) -> None:
        for policy in self._policies.values():
            policy.update(rates)


class Swarm:
    """The peers of one run, with their places and devices."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self._folder = scene, folder
        self._rng = random.Random(f"routing {scene.seed}")
        self._delay_s, self._rate = network()
        self._seats: dict[str, Seat] = {}  # by node
        self._peers: dict[str, Seat] = {}  # by peer id
        self._devices: list[tuple[LayerDevice, float]] = []  # with their speeds
        self._present: list[Node] = []
        self._roles: list[tuple[str, Roles]] = []
        self.left = 0
        self.run = small_run(folder, "routing", scene.stages, scene.microbatches, WIDTH, CONTEXT, SAMPLES)
        self.policy = Block({policy: self._policy(policy) for policy in POLICIES})

    def _policy(self, policy: str) -> RoutePolicy:
        if policy == "flow":
            return FlowRoutes(self.scene.microbatches, self._cost, lambda p: self._peers[p].speed, self.scene.seed)
        return InTurn() if policy == "swarm" else CheapestRoute(random.Random(self.scene.seed))

    def _cost(self, one: str, other: str) -> float:
        """GWTF's d_ij in seconds. Links have the same delay and rate in both directions."""
        a, b = self._peers[one], self._peers[other]
        computing_s = SLOWEST_S * (1 / a.speed + 1 / b.speed) / 2
        return computing_s + float(self._delay_s[a.place, b.place] + ACTIVATION_BYTES / self._rate[a.place, b.place])

    async def start(self, world: World) -> None:
        self._add("trainer", Seat(-1, 0, 0.0), world)
        for seat in seats_of(self.scene, self._rng):
            await self._join(world, seat)
        program = Roles(self.run, self._folder).program(TrainerRole, swarm(dht_config=QUIET))
        await world.start("trainer", program=program)

    def _add(self, name: str, seat: Seat, world: World) -> None:
        for other, there in self._seats.items():
            delay_s, rate = self._delay_s[seat.place, there.place], self._rate[seat.place, there.place]
            world.net.set_path(name, other, SimPath(latency_s=float(delay_s), mbit_s=float(rate) * 8e-6))
        self._seats[name] = seat

    async def _join(self, world: World, seat: Seat) -> None:
        name = f"peer{len(self._devices)}"
        self._add(name, seat, world)
        device = LayerDevice(SLOWEST_S / seat.speed)
        self._devices.append((device, seat.speed))
        network = swarm(dht_config=QUIET)
        roles, node = await start_stage(world, self.run, self._folder, seat.stage, device, name=name, network=network)
        self._peers[node.id.text] = seat
        self._present.append(node)
        self._roles.append((name, roles))

    async def churn(self, world: World) -> None:
        """Let one peer after another leave; each is replaced by a new one with the same stage, place and speed.

        They are killed and stopped with a goodbye in turn.
        """
        rng = random.Random(f"churn {self.scene.seed}")
        await trio.sleep(FIRST_LEAVES_S)
        for number in itertools.count():
            node = self._present.pop(rng.randrange(len(self._present)))
            await (world.stop(node) if number % 2 else world.kill(node))
            self.left += 1
            await self._join(world, self._seats[node.name])
            await trio.sleep(LEAVE_EVERY_S)

    def step(self) -> int:
        """The newest step of any stage peer."""
        live = [roles.live[name] for name, roles in self._roles if name in roles.live]
        return max((role.position.step for role in live), default=0)

    def work(self) -> float:
        """Work of all devices so far, in microbatches of one stage."""
        return sum(device.busy_s * speed / SLOWEST_S for device, speed in self._devices)


async def _measured(scene: Scene, folder: Path) -> dict[str, Measured]:
    """Measure all policies, one after another with the same peers. Policies do not share what they learn."""
    one, found, first = Swarm(scene, folder), dict[str, Measured](), 0
    config = WorldConfig(net=NetConfig(window_bytes=WINDOW_BYTES))
    policy_of_trainer = patch.object(direct, "CheapestRoute", lambda rng: one.policy)
    async with booted(scene.seed, config=config, program=swarm(dht_config=QUIET)) as world:
        with policy_of_trainer:
            await one.start(world)
        first_one = scene.seed % len(POLICIES)
        for policy in POLICIES[first_one:] + POLICIES[:first_one]:
            one.policy.current = policy
            found[policy] = await _block(world, one, first + scene.warm)
            first += scene.warm + scene.steps
    return found


async def _block(world: World, one: Swarm, first: int) -> Measured:
    """Measure one policy from step `first` on, while peers leave."""
    times, done, left = list[float](), list[float](), one.left
    async with trio.open_nursery() as nursery:
        for step in range(first, first + one.scene.steps + 1):
            assert await world.until(lambda step=step: one.step() >= step, within_s=PATIENCE_S, step_s=LOOK_S)
            times.append(trio.current_time())
            done.append(one.work())
            if step == first:
                nursery.start_soon(one.churn, world)
        nursery.cancel_scope.cancel()
    steps_s = [b - a for a, b in itertools.pairwise(times)]
    counted = one.scene.steps * one.scene.microbatches * one.scene.stages
    return Measured(steps_s, 1.0 - counted / (done[-1] - done[0]), one.left - left)


def measured(scene: Scene) -> dict[str, Measured]:
    found: dict[str, Measured] = in_virtual_time(_measured, scene, seed=scene.seed)
    return found


def least_s(scene: Scene) -> float:
    """Seconds of a step in which all devices compute all the time, which is the lower bound for any routes."""
    each = scene.peers // scene.stages
    speeds = [sum(SPEEDS[(n + stage) % len(SPEEDS)] for n in range(each)) for stage in range(scene.stages)]
    return scene.microbatches * SLOWEST_S / min(speeds)


def measure(full: bool) -> Report:
    torch.set_num_threads(1)
    scenes = [Scene(seed, warm=4, steps=16) for seed in (1, 2, 3)] if full else [Scene(1)]
    runs = [measured(scene) for scene in scenes]
    found = {policy: [run[policy] for run in runs] for policy in POLICIES}
    seconds = {policy: statistics.mean(s for one in of for s in one.steps_s) for policy, of in found.items()}
    wasted = {policy: statistics.mean(one.wasted for one in of) for policy, of in found.items()}
    extra = {"seconds_per_step": seconds, "wasted": wasted}
    scene = scenes[0]
    left = sum(one.left for one in found["ours"])
    note = (
        f"{scene.peers} peers, {scene.stages} stages, {scene.microbatches} microbatches a step, {len(scenes)} seeds of "
        f"{scene.steps} steps, {left} peers left in ours; computing alone takes {least_s(scene):.1f} s; "
        "takes 20 minutes; --full: three seeds, an hour"
    )
    return Report("routes of microbatches", [_steps(seconds), _waste(wasted)], note, extra)


def _steps(seconds: dict[str, float]) -> Sequence[Figure]:
    ours = seconds["ours"]
    return [
        Figure("swarm_s", "seconds a step: SWARM's wiring alone", seconds["swarm"], "s", 1),
        Figure("flow_s", "  GWTF's flow", seconds["flow"], "s", 1),
        Figure("ours_s", "  ours", ours, "s", 1),
        Figure("ours_over_flow", "  ours over GWTF's", ours / seconds["flow"], "", 2, at_most=1.0),
        Figure("less_than_swarm", "  less than SWARM's, ours", 100 * (1 - ours / seconds["swarm"]), "%", 1, 30.0),
    ]


def _waste(wasted: dict[str, float]) -> Sequence[Figure]:
    told = {"swarm": "device time wasted: SWARM's wiring alone", "flow": "  GWTF's flow", "ours": "  ours"}
    return [Figure(f"wasted_{policy}", told[policy], 100 * wasted[policy], "%", 2) for policy in POLICIES]
