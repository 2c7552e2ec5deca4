"""Part of benchmarks and lab tests: the swarm of `_swarm` in a lab with delays, where pairs of hosts can be cut off."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from lab import Space, Traffic, WideHost, WideLab

from benchmarks._peers import Peer
from benchmarks._swarm import Swarm


@dataclass(slots=True)
class FarSwarm(Swarm):
    """The processes of one run, in a lab that sets the lines."""

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
        """End the trainer with SIGINT and start another one, which measures the current lines."""
        trainer = self.peers.pop()
        trainer.popen.send_signal(signal.SIGINT)
        trainer.popen.wait(timeout=60)
        self._join_trainer()

    def peer(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between two hosts, until `mend`."""
        rules = [
            "add table ip cut",
            "add chain ip cut in { type filter hook input priority 0; }",
            "add chain ip cut out { type filter hook output priority 0; }",
            f"add rule ip cut in ip saddr {self._host(other).ip} drop",
            f"add rule ip cut out ip daddr {self._host(other).ip} drop",
        ]
        self._host(one).run(["nft", "-f", "-"], input="\n".join(rules), text=True)

    def mend(self, one: str) -> None:
        """Stop dropping packets from and to this host."""
        self._host(one).run(["nft", "delete", "table", "ip", "cut"])

    def rate(self, since: float, until: float) -> float:
        """Steps per second between two times in Unix seconds."""
        return sum(since <= at < until for at in self.steps()) / (until - since)

    def _join_trainer(self) -> None:
        self._join("trainer", "trainer", self.entry, self.run, "--log-level", "debug")

    def _host(self, name: str) -> WideHost:
        return self.lab.hosts[name]

    def _place(self, name: str) -> Space:
        return self.lab.hosts.get(name) or self.lab.host(name)

    def _traffic(self) -> dict[str, Traffic]:
        return {name: host.line.traffic() for name, host in self.lab.hosts.items()}
