"""The run file, offered to strangers and fetched from a backbone: service `run/1`, open to everyone.

A stranger needs the file to see what a run is, before it has a token. Bounded by the host's book as any call is, and to
a few at once. A hostile backbone may give anything: `core.messages.run_link` refuses what may not be used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import trio

from peerd.core.errors import Refused
from peerd.core.messages.run_link import METHOD, SERVICE, JoinLink, RunFileAsked, RunFileTold
from peerd.machine.rpc.declaration import Declaration, Shows
from peerd.service.peer_stack import PeerStack
from peerd.service.rpc.rpc import Rpc
from peerd.service.rpc.types import Answer, Incoming

_ANSWER_S: Final = 10.0  # for a file of some kilobytes
DECLARED: Final = {
    METHOD: Declaration(
        shows=Shows.NOTHING,
        rows=None,
        memory_bytes=0,
        device_s=0.0,
        body_bytes=256,
        calls_per_peer=2,
        calls=64,
        deadline_s=_ANSWER_S,
    )
}


class RunOffer:
    """Answers with `told`'s file, as it is at that time, while it is open."""

    def __init__(self, rpc: Rpc, run: str, told: Callable[[], RunFileTold]) -> None:
        self._rpc, self._run, self._told = rpc, run, told

    def open(self) -> None:
        self._rpc.serve(METHOD, RunFileAsked, self._answer, declared=DECLARED[METHOD])

    def close(self) -> None:
        self._rpc.unserve(SERVICE)

    async def _answer(self, incoming: Incoming[RunFileAsked]) -> Answer[RunFileTold]:
        if incoming.body.run != self._run:
            raise Refused("this backbone is of another run")
        return Answer(self._told())


async def fetch_file(stack: PeerStack, link: JoinLink, timeout_s: float) -> RunFileTold:
    """Ask the backbone of `link` for its run file; RemoteError says why there is none."""
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(stack.host.run, []))
        await nursery.start(stack.rpc.run)
        with trio.fail_after(timeout_s):
            peer = await stack.host.connect_addr(link.addr)
        answer = await stack.rpc.call(peer, METHOD, RunFileAsked(link.run), RunFileTold, timeout_s=timeout_s)
        nursery.cancel_scope.cancel()
    return answer.body
