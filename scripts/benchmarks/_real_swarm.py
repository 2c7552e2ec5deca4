"""Part of the benchmark of real size: a swarm in a network lab, whose steps and sums are read from its event logs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from scripts.lab import WideLab
from scripts.process_swarm import ProcessSwarm, SwarmFailed

_RESTS, _CONTRIBUTES = "stage.rests", "stage.contributes"  # events


@dataclass(slots=True)
class RealSwarm(ProcessSwarm):
    """The processes of one run, each on a host with its own line."""

    lab: WideLab = field(kw_only=True)

    @classmethod
    def started(cls, folder: str, run: dict[str, Any], lab: WideLab) -> Self:
        """A swarm whose backbone runs, on a fast line."""
        swarm = cls(Path(folder), run, lambda name: lab.hosts.get(name) or lab.host(name), ("--threads", "1"), lab=lab)
        swarm.start_backbone()
        return swarm

    def join_with_line(self, name: str, role: str, up_mbit: float, down_mbit: float, **limits: Any) -> None:
        """Start a peer with a line of these rates, which its limits state."""
        self.lab.host(name, up_mbit=up_mbit, down_mbit=down_mbit)
        logged = () if role == "trainer" else ("--log-level", "debug")  # logs each step
        self.join(name, role, *logged, upload_mbit=up_mbit, download_mbit=down_mbit, **limits)

    def interrupt(self, name: str) -> float:
        """End a peer with SIGINT. Returns the seconds that this took."""
        peer, began = self.peer(name), time.monotonic()
        if self.end(peer, patience_s=600) != 0:
            raise SwarmFailed(f"{name} ended with code {peer.popen.returncode}\n{peer.said[-2000:]}")
        return time.monotonic() - began

    def made(self, names: Iterable[str]) -> dict[int, float]:
        """For each step, the time in Unix seconds at which the last of these peers had made it."""
        found: dict[int, float] = {}
        for name in names:
            for event in self._stepped(name):
                found[event["step"]] = max(event["time"], found.get(event["step"], 0.0))
        return found

    def wait_for_step_of(self, names: Iterable[str], step: int, patience_s: float) -> float:
        """Wait until all these peers have made `step`. Returns the time at which the last of them had."""
        names = list(names)

        def done() -> bool:
            if idle := [name for name in names if self.rests(name)]:
                raise SwarmFailed(f"{idle} rest, though they should contribute")
            return all(any(event["step"] >= step for event in self._stepped(name)) for name in names)

        self.until(done, f"step {step} was never made by all of {names}", patience_s)
        return self.made(names)[step]

    def step_s(self, first: int, steps: int, patience_s: float) -> float:
        """Mean seconds of the `steps` steps after `first`, made by any peers."""
        for step in (first, first + steps):
            self.until(lambda step=step: self.newest() >= step, f"step {step} was never made", patience_s)
        made = self.made([peer.name for peer in self.peers])
        return (made[first + steps] - made[first]) / steps

    def rests(self, name: str) -> bool:
        """True if the conductor has ordered this peer to rest."""
        told = [event["name"] for event in self.peer(name).events() if event["name"] in (_RESTS, _CONTRIBUTES)]
        return bool(told) and told[-1] == _RESTS

    def newest(self) -> int:
        """The newest step that any peer has made."""
        return max((e["step"] for peer in self.peers for e in self._stepped(peer.name)), default=0)

    def unequal_sums(self) -> list[str]:
        """Steps at which peers of a stage had different sums."""
        sums: dict[tuple[int, int], set[str]] = {}
        for peer in self.peers:
            for event in self._stepped(peer.name):
                sums.setdefault((event["stage"], event["step"]), set()).add(event["digest"])
        return [f"stage {stage}, step {step}" for (stage, step), found in sorted(sums.items()) if len(found) > 1]

    def _stepped(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.peer(name).events() if event["name"] == "stage.stepped"]
