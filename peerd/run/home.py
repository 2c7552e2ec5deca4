"""A daemon's files: its data directory with lock and identity key, and the list of running daemons.

A file lock allows one daemon per data directory; the system releases it when the process ends in any way. The identity
is an Ed25519 key in libp2p's private key format (readable by other libp2p programs), mode 0600, written atomically.
Each running daemon writes a note into a directory that only this user can write, so that `peerd status` finds it; notes
of dead daemons are recognized by their socket, which does not answer. Nothing here waits or uses the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from peerd.core.errors import ConfigError
from peerd.core.keys import Keypair

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

IDENTITY_FILE: Final = "identity.key"
ORGANIZER_DIR: Final = "organizer"  # under the data root, for a user who issues tokens
_NOT_OF_RUNS: Final = frozenset({ORGANIZER_DIR, "backbone"})
SOCKET_PATH_BYTES: Final = 100  # the system's limit is 104 to 108

# Protobuf of libp2p's PrivateKey: field 1 = Ed25519 (1), field 2 = 64 bytes: the seed, then the public key.
_KEY_PREFIX: Final = bytes([0x08, 0x01, 0x12, 0x40])
_KEY_BYTES: Final = len(_KEY_PREFIX) + 64


def data_root() -> Path:
    """peerd's folder in this platform's folder for a user's program data."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "peerd"


def default_data_dir(run: str | None, roles: Sequence[str]) -> Path:
    """Default directory for a run and a set of roles in earlier versions; today only used without a run."""
    name = "-".join(part for part in (run, *sorted(roles)) if part)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "peer"
    if safe != name:  # so that two names never get the same directory
        safe += "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return data_root() / safe


def run_data_dir(run: str, roles: Sequence[str]) -> Path:
    """Default data directory of a peer of `run`. There is one per run, so that a peer keeps its identity in all roles.

    If another process of this run with other roles is running, the peer gets its own directory and so its own identity:
    the one that its roles used before, else a new one. A second process with the same role gets the first one's
    directory, and then fails because it is in use.
    """
    there, old = run_identities(run), default_data_dir(run, roles)
    if not roles or old in there:
        return old if roles else next(iter(there), _of_run(run, 1))
    taken = [place for place in there if _is_held(place)]
    held = {Path(note.data_dir): set(note.roles) for note in notes()}
    same = next((place for place in taken if held.get(place.resolve(), set()) & set(roles)), None)
    if same is not None:
        return same
    free = [place for place in there if place not in taken]
    if free:
        return max(free, key=lambda place: sum((place / role).is_dir() for role in roles))
    return next(place for number in itertools.count(1) if (place := _of_run(run, number)) not in there)


def run_identities(run: str) -> list[Path]:
    """Directories under the data root with an identity for this run; those of earlier versions are last."""
    numbered = itertools.takewhile(_has_identity, (_of_run(run, number) for number in itertools.count(1)))
    stem = f"{default_data_dir(run, []).name}-"
    earlier = [
        place
        for place in known_identities()
        if place.name.startswith(stem)
        and all((place / role).is_dir() for role in place.name.removeprefix(stem).split("-"))
    ]
    return [*numbered, *earlier]


def _of_run(run: str, number: int) -> Path:
    place = default_data_dir(run, [])
    name = f"{place.name}+run" if place.name in _NOT_OF_RUNS else place.name
    return place.with_name(name if number == 1 else f"{name}+{number}")  # names of runs have no plus


def _has_identity(place: Path) -> bool:
    return (place / IDENTITY_FILE).exists()


def _is_held(data_dir: Path) -> bool:
    """True while a process has locked the directory."""
    with _open_lock(data_dir / "lock") as file:
        return not _try_lock(file)


def make_private_dir(path: Path) -> Path:
    """Create the directory (mode 0700) if it is missing. Raises ConfigError if that or writing into it fails."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError as error:
        raise ConfigError(f"{path} is a file; the data directory must be a directory") from error
    except OSError as error:
        raise ConfigError(f"the data directory {path} can't be used: {error.strerror or error}") from error
    return path.resolve()


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically: writes and syncs a temporary file, renames it, and syncs the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with _named(path), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk. Windows has no such call for directories."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to an OSError in the block, for messages: the system adds it only when opening a file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Lock the data directory for this process. Raises ConfigError if another process has locked it."""
    with _open_lock(data_dir / "lock") as file:
        if not _try_lock(file):
            file.seek(0)
            holder = file.read(20).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise ConfigError(
                f"the data directory {data_dir} is in use by {who}; stop that daemon, or choose another --data-dir"
            )
        with _named(data_dir / "lock"):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


def _open_lock(path: Path) -> IO[bytes]:
    try:
        return path.open("a+b", buffering=0)  # with a buffer, close() would repeat a write that failed on a full disk
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            file.seek(1 << 20)  # a byte beyond the text, which stays readable for others
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def load_identity(data_dir: Path) -> Keypair:
    """Read the peer's key from its data directory. Creates a key if the file is missing."""
    path = data_dir / IDENTITY_FILE
    try:
        raw = path.read_bytes()
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _new_identity(path)
    except OSError as error:
        raise ConfigError(f"the identity {path} can't be read: {error.strerror or error}") from error
    if sys.platform != "win32" and mode & 0o077:
        raise ConfigError(
            f"the identity {path} can be read or changed by other users (mode {stat.S_IMODE(mode):04o}); "
            f"run: chmod 600 {path}"
        )
    return _decode_identity(path, raw)


def _new_identity(path: Path) -> Keypair:
    keypair = Keypair.from_seed(os.urandom(32))
    try:
        write_atomically(path, _KEY_PREFIX + keypair.seed + keypair.peer_id.public_key)
    except OSError as error:
        raise ConfigError(f"the identity {path} can't be written: {error.strerror or error}") from error
    return keypair


def _decode_identity(path: Path, raw: bytes) -> Keypair:
    advice = "restore it from a backup, or move it away to get a new identity at the next start"
    if len(raw) != _KEY_BYTES or not raw.startswith(_KEY_PREFIX):
        raise ConfigError(f"the identity {path} is damaged: it is not an Ed25519 key of {_KEY_BYTES} bytes; {advice}")
    keypair = Keypair.from_seed(raw[4:36])
    if keypair.peer_id.public_key != raw[36:]:
        raise ConfigError(f"the identity {path} is damaged: its two halves do not match; {advice}")
    return keypair


def known_identities() -> list[Path]:
    """Data directories under the data root that have an identity, sorted."""
    return sorted(path.parent for path in data_root().glob(f"*/{IDENTITY_FILE}"))


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """Note of a running daemon: its process, data directory, socket, run and roles."""

    pid: int
    data_dir: str
    socket: str
    run: str
    roles: list[str]

    def line(self) -> str:
        what = f"{', '.join(self.roles)} of {self.run}" if self.run else ", ".join(self.roles)
        return f"{what} (process {self.pid}): --data-dir {self.data_dir}"


def runtime_dir() -> Path:
    """This user's private directory for notes and sockets. Raises ConfigError if it belongs to another user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return _own_dir(Path(base) / "peerd") if base else _temporary_dir()


def _temporary_dir() -> Path:
    user = os.getuid() if sys.platform != "win32" else 0
    return _own_dir(Path(tempfile.gettempdir()) / f"peerd-{user}")


def _own_dir(path: Path) -> Path:
    """Create the directory if it is missing, and check its owner: in a shared folder, others may have created it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"the directory {path} can't be used: {error.strerror or error}") from error
    if sys.platform == "win32":
        return path
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} belongs to another user or is open to others; remove it, or set XDG_RUNTIME_DIR")
    return path


def _tag(data_dir: Path) -> str:
    return hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]


def socket_path(data_dir: Path) -> Path:
    """Path of the control socket: in the data directory, or in the runtime directory if that path is too long."""
    path = data_dir.resolve() / "control.sock"
    if _fits(path):
        return path
    path = runtime_dir() / f"{_tag(data_dir)}.sock"
    return path if _fits(path) else _temporary_dir() / path.name


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES


@contextlib.contextmanager
def noted(note: RunningDaemon) -> Iterator[None]:
    """Write the daemon's note into the list of running daemons, and remove it at the end of the block."""
    path = runtime_dir() / f"{_tag(Path(note.data_dir))}.json"
    try:
        write_atomically(path, json.dumps(asdict(note)).encode())
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def notes() -> list[RunningDaemon]:
    """All notes, also of dead daemons, sorted by data directory. Skips unreadable ones."""
    found: list[RunningDaemon] = []
    for path in runtime_dir().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(RunningDaemon(**json.loads(path.read_bytes())))
    return sorted(found, key=lambda note: note.data_dir)


def forget(note: RunningDaemon) -> None:
    """Remove the note of a dead daemon."""
    (runtime_dir() / f"{_tag(Path(note.data_dir))}.json").unlink(missing_ok=True)
