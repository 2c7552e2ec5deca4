"""Part of benchmarks and lab tests: the swarm of `_swarm` in a lab whose lines have delays, and can be cut in pairs."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from lab import Space, Traffic, WideHost, WideLab

from benchmarks._peers import Peer
from benchmarks._swarm import Swarm


@dataclass(slots=True)
class FarSwarm(Swarm):
    """The processes of one run; lines are as the lab says."""

    lab: WideLab  # type: ignore[assignment]
    entry: str = ""

    def start_pairs(self) -> None:
        """Start a backbone, two peers for each stage, `stage-0-a` and so on, and a trainer."""
        self.entry = self._enter()
        for stage in range(self.run["pipeline"]["stages"]):
            for which in "ab":
                self._join(f"stage-{stage}-{which}", "stage", self.entry, self._run_at(stage))
        self._join_trainer()

    def restart_trainer(self) -> None:
        """End the trainer as Ctrl+C does, and start another in its place, which finds its ways as they are now."""
        trainer = self.peers.pop()
        trainer.popen.send_signal(signal.SIGINT)
        trainer.popen.wait(timeout=60)
        self._join_trainer()

    def peer(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def cut(self, one: str, other: str) -> None:
        """Lose every packet between two hosts, silently and at once, until `mend`."""
        rules = [
            "add table ip cut",
            "add chain ip cut in { type filter hook input priority 0; }",
            "add chain ip cut out { type filter hook output priority 0; }",
            f"add rule ip cut in ip saddr {self._host(other).ip} drop",
            f"add rule ip cut out ip daddr {self._host(other).ip} drop",
        ]
        self._host(one).run(["nft", "-f", "-"], input="\n".join(rules), text=True)

    def mend(self, one: str) -> None:
        """Lose nothing on its way from or to this host any more."""
        self._host(one).run(["nft", "delete", "table", "ip", "cut"])

    def rate(self, since: float, until: float) -> float:
        """Steps a second between two times, Unix seconds."""
        return sum(since <= at < until for at in self.steps()) / (until - since)

    def _join_trainer(self) -> None:
        self._join("trainer", "trainer", self.entry, self.run, "--log-level", "debug")

    def _host(self, name: str) -> WideHost:
        return self.lab.hosts[name]

    def _place(self, name: str) -> Space:
        return self.lab.hosts.get(name) or self.lab.host(name)

    def _traffic(self) -> dict[str, Traffic]:
        return {name: host.line.traffic() for name, host in self.lab.hosts.items()}
