"""Service `run/1`: backbones and users' own loops send the run file to anyone who asks.

A stranger needs the file to see what a run is, before it has a token. The host's resource book limits these calls like
any others, and only a few are served at once. A hostile backbone may send anything: `messages/run_link.py` rejects
what must not be used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from peerd.core.errors import ConfigError, Refused, RemoteError
from peerd.messages.run_link import DOMAIN, METHOD, SERVICE, JoinLink, RunFileAnswer, RunFileRequest, shared_run
from peerd.role.peer_stack import PeerStack
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Rpc
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.run.runfile import RunFile
from peerd.wire.host.host import Host

SIGNATURE_FILE: Final = "run.signature"  # in the data directory
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
    """Answers requests for the run file with the current result of `told`, between `open` and `close`."""

    def __init__(self, rpc: Rpc, run: str, told: Callable[[], RunFileAnswer]) -> None:
        self._rpc, self._run, self._told = rpc, run, told

    def open(self) -> None:
        self._rpc.serve(METHOD, RunFileRequest, self._answer, declared=DECLARED[METHOD])

    def close(self) -> None:
        self._rpc.unserve(SERVICE)

    async def _answer(self, incoming: Incoming[RunFileRequest]) -> Answer[RunFileAnswer]:
        if incoming.body.run != self._run:
            raise Refused("this backbone is of another run")
        return Answer(self._told())


def own_signature(run: RunFile, file: bytes, host: Host, path: Path) -> bytes:
    """The organizer's signature of `file`, or b"" if the run has no organizer.

    The organizer's own peer signs `file` here; any other peer reads the signature from `path`. Raises ConfigError if
    the signature is missing or wrong; its text says what to do.
    """
    organizer = run.access.organizer
    if not organizer:
        return b""
    if host.id.text == organizer:
        return host.sign(DOMAIN + file)
    try:
        signature = bytes.fromhex(path.read_text("ascii").strip())
        shared_run(RunFileAnswer(file, signature), run.run)
    except (OSError, ValueError, RemoteError) as error:
        advice = f"`peerd token sign RUN_FILE` on its machine makes one: save it as {path}"
        raise ConfigError(f"the run file has no valid signature of the organizer ({error}); {advice}") from None
    return signature


async def fetch_file(stack: PeerStack, link: JoinLink, timeout_s: float) -> RunFileAnswer:
    """Fetch the run file from the backbone of `link`. Raises RemoteError if that fails."""
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(stack.host.run, []))
        await nursery.start(stack.rpc.run)
        with trio.fail_after(timeout_s):
            peer = await stack.host.connect_addr(link.addr)
        answer = await stack.rpc.call(peer, METHOD, RunFileRequest(link.run), RunFileAnswer, timeout_s=timeout_s)
        nursery.cancel_scope.cancel()
    return answer.body
