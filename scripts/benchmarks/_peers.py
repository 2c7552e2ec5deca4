"""Starts and watches `peerd` processes on hosts of a lab, and reports their output if one ends unexpectedly.

Their status is read from control sockets and event files, since network namespaces share the file system.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab import Space
from peerd_process import PeerdProcess
from waiting import eventually

from peerd.core.keys import Keypair
from peerd.home import IDENTITY_FILE, write_atomically

ROOT = Path(__file__).resolve().parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KEY_FORM = bytes([0x08, 0x01, 0x12, 0x40])  # prefix of a private key in libp2p's format: Ed25519, 64 bytes


class SwarmFailed(Exception):
    """A process ended, or nothing happened for too long. The message has the processes' last output."""


class Peer(PeerdProcess):
    """One peerd process on a host of the lab."""

    def cpu_s(self) -> float:
        """Processor time of the process, in user and kernel mode."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@dataclass(slots=True)
class Peers:
    """The processes of one run. `folder` has their data directories and logs."""

    folder: Path
    peers: list[Peer] = field(default_factory=list, init=False)

    def start_peer(self, host: Space, name: str, *arguments: str) -> Peer:
        """Start `peerd` with these arguments on `host`. The process ends with the lab."""
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        identify(self.folder / name, name)
        peer = Peer(name, self.folder, arguments, partial(host.popen, cwd=ROOT))
        self.peers.append(peer)
        return peer

    def until(self, done: Callable[[], bool], complaint: str, patience_s: float = 60.0) -> None:
        """Wait until `done()`. Raises SwarmFailed if a process ends before, or after `patience_s`."""
        eventually(lambda: self._failed() or done(), patience_s)
        if not done():
            said = "".join(f"\n--- {p.name}\n{p.said[-2000:]}" for p in self.peers)
            raise SwarmFailed(f"{complaint}; ended: {self._failed()}{said}")

    def _failed(self) -> list[str]:
        return [peer.name for peer in self.peers if peer.popen.poll() not in (None, 0)]


def identify(data_dir: Path, name: str) -> None:
    """Write an identity that is the same in all runs, since a trainer's order of samples depends on it."""
    keypair = Keypair.from_seed(hashlib.sha256(name.encode()).digest())
    write_atomically(data_dir / IDENTITY_FILE, KEY_FORM + keypair.seed + keypair.peer_id.public_key)
