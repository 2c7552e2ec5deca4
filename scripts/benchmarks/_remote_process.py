"""Processes of benchmarks that receive orders and return answers, each as one JSON line; and what such peers share.

`RemoteProcess` starts one. In it, `obey` runs the orders: {"do": NAME, ...} calls the coroutine NAME of an object with
the other fields as keywords.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from peerd.core.keys import Keypair
from peerd.messages.encoding import Message
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.wire.clock import RealClock
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.kit.declared import ANY

ROOT: Final = Path(__file__).resolve().parents[2]
ECHO: Final = "bench/1/echo"


class Start(Protocol):
    """Type of subprocess.Popen, and of its equivalent on a host in a network lab."""

    def __call__(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]: ...


def module(name: str, *arguments: str) -> list[str]:
    """The command line of a module of this folder."""
    return [sys.executable, "-m", f"scripts.benchmarks.{name}", *arguments]


class RemoteProcess:
    """A process that receives orders. Its first answer describes it."""

    def __init__(self, start: Start, argv: list[str], **options: Any) -> None:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = start(argv, **pipes, cwd=ROOT, env=env, **options)
        self.pid = self._process.pid

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        """The answer to this order."""
        self.order(**order)
        return self.answer()

    def dismiss(self) -> None:
        """Close the process' input, after which it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        self.dismiss()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


# --- in the process ---------------------------------------------------------------------------------------------------
def reply(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


async def obey(peer: object) -> None:
    """Run orders until the input is closed."""
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        order = json.loads(line)
        reply(**await getattr(peer, order.pop("do"))(**order))


class Blob(Message, frozen=True):
    """A body for calls."""

    data: bytes


def new_stack(number: int | None = None) -> PeerStack:
    """The network stack of a new peer, over TCP. Peers with the same number have the same identity."""
    clock = RealClock()
    seed = clock.secure_bytes(32) if number is None else number.to_bytes(32, "big")
    return peer_stack(Keypair.from_seed(seed), clock, [TcpTransport()])


def serve_echo(rpc: Rpc) -> None:
    async def echo(call: Incoming[Blob]) -> Answer[Blob]:
        return Answer(call.body)

    rpc.serve(ECHO, Blob, echo, declared=ANY)
