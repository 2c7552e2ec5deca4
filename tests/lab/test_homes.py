"""`make run`'s swarm with every peer at home behind a router of its own: it trains, whatever happens to the routers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.lab import Kind, Unexpected, WideLab
from scripts.process_swarm import ProcessSwarm

ROOT = Path(__file__).parents[2]
HOMES: dict[str, tuple[Kind, Unexpected]] = {
    "stage-0": ("port-restricted", "drop"),
    "stage-1": ("port-restricted", "reset"),
    "stage-2": ("symmetric", "drop"),
    "stage-3": ("full-cone", "drop"),
    "trainer": ("port-restricted", "drop"),
}
CONES = [name for name, (kind, _) in HOMES.items() if kind == "port-restricted"]
LOGGED = ("--log-level", "debug")
PATIENCE_S = 300.0  # for what takes some seconds on a machine with nothing else to do

pytestmark = [pytest.mark.lab, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(1200)]


class Village(ProcessSwarm):
    """Two public backbones, which relay, and the homes."""

    def start_homes(self, steps: int) -> None:
        self.run = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text("utf-8"))
        self.run["optimizer"]["total_steps"] = steps
        self.run["bootstrap"] = []
        for number in range(2):
            self._backbone(f"backbone-{number}")
        for number, name in enumerate(HOMES):
            limits = {} if name == "trainer" else {"stage": number % 2}
            self.join(name, name.partition("-")[0], **limits)

    def _backbone(self, name: str) -> None:
        entry = [word for addr in self.run["bootstrap"] for word in ("--bootstrap", addr)]
        peer = self.start(name, "backbone", "--listen", "/ip4/0.0.0.0/tcp/4001", *entry)
        self.until(lambda: "peer" in peer.status(), f"{name} does not start", PATIENCE_S)
        self.run["bootstrap"].append(f"/ip4/{self.hosts[name].ip}/tcp/4001/p2p/{peer.status()['peer']['id']}")

    def wait_for_all(self, step: int) -> None:
        """Until every stage peer has done it: then each stage's state is held twice."""
        stages = [peer for peer in self.peers if peer.name.startswith("stage")]

        def there() -> bool:
            return all(role.get("step", 0) >= step for peer in stages for role in peer.status().get("roles", [{}]))

        self.until(there, f"step {step} was not done by all", PATIENCE_S)

    def ways(self, name: str) -> dict[str, str]:
        """Name of another peer -> the way in which this peer reaches it now."""
        told = {peer.name: peer.status() for peer in self.peers}
        names = {status["peer"]["id"]: name for name, status in told.items() if status}
        return {names[row["peer"]]: row["way"] for row in told[name]["network"]["peers"] if row["peer"] in names}

    def finish(self) -> dict[str, Any]:
        """The trainer's last event, once it has ended."""
        self.until(lambda: self.trainer.popen.poll() == 0, "the trainer never ended", PATIENCE_S)
        return next(event for event in self.trainer.events() if event["name"] == "trainer.finished")


@pytest.fixture
def village(wide: WideLab, tmp_path: Path) -> Village:
    return Village(tmp_path, place=lambda name: wide.host(name, *HOMES.get(name, ("none", "drop"))), options=LOGGED)


def test_a_swarm_of_homes_trains_over_the_best_ways_and_survives_its_relay(village: Village) -> None:
    village.start_homes(steps=120)  # the others do not wait for the one that looks for another relay
    village.wait_for_step(10, PATIENCE_S)
    # Stage peers of one stage talk when they average, trainers with all; the two may not have met otherwise.
    to_homes = village.ways("trainer")
    assert {to_homes[name] for name in CONES if name != "trainer"} == {"punched"}, to_homes
    assert (to_homes["stage-2"], to_homes["stage-3"]) == ("relayed", "direct")
    (relay,) = _relays(village)
    village.peers.remove(backbone := village.peer(f"backbone-{relay}"))
    village.end(backbone, signal.SIGKILL)

    def found_the_other() -> bool:
        return _relays(village) == [1 - relay] and village.ways("trainer").get("stage-2") == "relayed"

    village.until(found_the_other, "the other relay is not used", PATIENCE_S)
    told = village.finish()
    assert (told["step"], told["counted"], told["lost"]) == (120, 960, 0)


def test_a_swarm_of_homes_goes_on_when_routers_forget_and_when_a_line_is_dead_for_a_while(
    wide: WideLab, village: Village
) -> None:
    village.start_homes(steps=40)
    village.wait_for_step(5, PATIENCE_S)
    for router in wide.routers.values():
        router.forget()
    village.wait_for_all(12)
    wide.routers["stage-1"].line.cut(20)
    told = village.finish()
    assert (told["step"], told["counted"], told["lost"]) == (40, 320, 0)


def _relays(village: Village) -> list[int]:
    """Which backbones carry the trainer's connections to those behind symmetric routers."""
    rows = village.trainer.status()["network"]["peers"]
    relays = [row["remote"].split("/")[2] for row in rows if row["way"] == "relayed"]
    hosts = [addr.split("/")[2] for addr in village.run["bootstrap"]]
    return [hosts.index(relay) for relay in relays]
