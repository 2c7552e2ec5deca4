"""The control socket: sends each client one JSON snapshot of the daemon. It accepts no requests.

It is a unix socket of mode 0600, so that only the daemon's own user can connect. The daemon answers a limited number of
clients at once and drops those that do not read. The client functions need no trio event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import trio

from peerd.core.errors import ConfigError, PeerdError
from peerd.run.home import RunningDaemon, forget, notes, socket_path

CALLERS: Final = 8  # clients at once; enough for the watchers of one user
ANSWER_TIMEOUT_S: Final = 10.0  # for building a snapshot and sending it
_MORE_S: Final = 2.0  # a client waits this much longer, to see the daemon close a connection that timed out
_ACCEPT_S: Final = 1.0  # for a running daemon to accept a connection; one that takes longer is busy
SNAPSHOT_BYTES: Final = 16 << 20  # most that a client reads
SUPPORTED: Final = hasattr(socket, "AF_UNIX")

Snapshot = Callable[[], Awaitable[dict[str, Any]]]


async def serve(
    path: Path, snapshot: Snapshot, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer every connection with one snapshot until cancelled. The caller has locked the data directory."""
    slots = trio.CapacityLimiter(CALLERS)

    async def answer(stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                async with slots, stream:
                    await stream.send_all(json.dumps(await snapshot(), ensure_ascii=False).encode())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the client disconnected

    with _listening(path) as listener:
        await trio.serve_listeners(answer, [listener], task_status=_Quiet(task_status))


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[trio.SocketListener]:
    path.unlink(missing_ok=True)  # left by a daemon that died
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.bind(os.fspath(path))
        path.chmod(0o600)  # nobody can connect before listen()
        opened.listen(CALLERS)
        try:
            yield trio.SocketListener(trio.socket.from_stdlib_socket(opened))
        finally:
            path.unlink(missing_ok=True)


class _Quiet:
    """Task status that reports the start without passing the listeners on."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status = status

    def started(self, value: object = None) -> None:
        self._status.started()


def fetch(path: str, *, timeout_s: float = ANSWER_TIMEOUT_S + _MORE_S) -> dict[str, Any]:
    """Fetch one snapshot. Raises OSError if no daemon answers, and ValueError if the answer is not a snapshot."""
    if not SUPPORTED:
        raise ConfigError("this platform has no unix sockets, so a daemon here can't be asked for its status")
    parts: list[bytes] = []
    size = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        client.connect(path)
        while chunk := client.recv(1 << 16):
            parts.append(chunk)
            size += len(chunk)
            if size > SNAPSHOT_BYTES:
                raise ValueError("the answer is too long")
    found = json.loads(b"".join(parts))
    if not isinstance(found, dict):
        raise ValueError("the answer is not a snapshot")
    return found


def alive(note: RunningDaemon) -> bool:
    """True while the daemon accepts connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ACCEPT_S)
        try:
            client.connect(note.socket)
        except TimeoutError:
            return True  # it is busy, not dead
        except OSError:
            return False
    return True


def running() -> list[RunningDaemon]:
    """This user's running daemons. Removes the notes of dead ones."""
    if not SUPPORTED:
        return []
    living: list[RunningDaemon] = []
    for note in notes():
        if alive(note):
            living.append(note)
        else:
            forget(note)
    return living


def find(data_dir: Path | None) -> str:
    """Socket of the daemon in `data_dir`, or of the only one running.

    Raises PeerdError if no daemon runs, and ConfigError if there are several, or `data_dir` does not exist.
    """
    if data_dir is not None:
        if not data_dir.is_dir():
            raise ConfigError(f"there is no data directory {data_dir}")
        return os.fspath(socket_path(data_dir))
    found = running()
    if not found:
        raise PeerdError("no peerd daemon of this user is running; start one with `peerd backbone` or `peerd join`")
    if len(found) > 1:
        told = "\n".join(f"  {note.line()}" for note in found)
        raise ConfigError(f"{len(found)} daemons are running; choose one:\n{told}")
    return found[0].socket


def ask(data_dir: Path | None) -> dict[str, Any]:
    """Fetch the snapshot of the daemon in `data_dir`, or of the only one running. Raises PeerdError if it fails."""
    path = find(data_dir)
    try:
        return fetch(path)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        where = f" in {data_dir}" if data_dir is not None else ""
        raise PeerdError(f"no peerd daemon is running{where}") from error
    except PermissionError as error:
        raise PeerdError(f"the daemon's socket {path} belongs to another user") from error
    except (OSError, ValueError) as error:
        raise PeerdError(f"the daemon at {path} did not answer: {error}") from error
