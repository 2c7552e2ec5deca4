"""Prepares the foreign libp2p peers that the interoperability tests talk to, under .foreign/ (git-ignored).

    python scripts/foreign/setup.py [go] [js] [py]

go: the daemon p2pd, taken out of the hivemind wheel (Linux, x86-64). js: js-libp2p from npm. py: py-libp2p in a
virtual environment of its own. Every version is pinned. What is already there and up to date is left alone: a
stamp holds the digest of everything the preparation depends on. Exit code 1 when one of those asked for is missing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FOREIGN = Path(os.environ.get("PEERD_FOREIGN_DIR", SOURCES.parent.parent / ".foreign"))
HIVEMIND = "hivemind==1.1.12"
HIVEMIND_SHA256 = "acb8f0cf2cdb085259feb1c0a092c530f1953287cbfa4a1ab5e14e8c65359a2c"
P2PD = "hivemind/hivemind_cli/p2pd"
WHEEL_PLATFORM = ["--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--only-binary", ":all:"]


class Missing(Exception):
    """This foreign peer cannot be had here; the message says why."""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = done.stdout.decode(errors="replace").strip().splitlines()[-8:]
        raise Missing("\n  ".join([f"`{' '.join(str(part) for part in command)}` failed:", *tail]))


def prepare_go(folder: Path) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Missing("the hivemind wheel holds p2pd for Linux on x86-64 only")
    with tempfile.TemporaryDirectory() as temporary:
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", *WHEEL_PLATFORM, "-d", temporary, HIVEMIND)
        wheel = next(Path(temporary).glob("hivemind-*.whl"))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != HIVEMIND_SHA256:
            raise Missing(f"{wheel.name} has SHA-256 {found}, expected {HIVEMIND_SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            (folder / "p2pd").write_bytes(archive.read(P2PD))
    (folder / "p2pd").chmod(0o755)


def prepare_js(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise Missing("node and npm are not installed")
    for name in ("package.json", "package-lock.json", "js_peer.mjs"):
        shutil.copy(SOURCES / name, folder / name)
    run(npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)


def prepare_py(folder: Path) -> None:
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv/bin/python", "-m", "pip", "install", "-q", "-r", SOURCES / "requirements-py.txt")


PEERS = {
    "go": (prepare_go, ()),
    "js": (prepare_js, ("package.json", "package-lock.json", "js_peer.mjs")),
    "py": (prepare_py, ("requirements-py.txt",)),
}


def digest(name: str) -> str:
    """Digest of what the prepared folder depends on; changes when a pin does."""
    parts = [(SOURCES / part).read_bytes() for part in PEERS[name][1]]
    return hashlib.sha256(b"\0".join([HIVEMIND_SHA256.encode(), sys.version.split()[0].encode(), *parts])).hexdigest()


def is_ready(name: str) -> bool:
    stamp = FOREIGN / name / "stamp"
    return stamp.exists() and stamp.read_text() == digest(name)


def prepare(name: str) -> None:
    if is_ready(name):
        return
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    PEERS[name][0](folder)
    (folder / "stamp").write_text(digest(name))


def main(names: list[str]) -> int:
    failed = 0
    for name in names or list(PEERS):
        if name not in PEERS:
            print(f"there is no foreign peer named {name!r}; known: {', '.join(PEERS)}", file=sys.stderr)
            return 2
        try:
            prepare(name)
            print(f"{name}: ready in {FOREIGN / name}")
        except (Missing, OSError) as error:
            print(f"{name}: not available: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
