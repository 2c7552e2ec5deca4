"""`peerd doctor` on set-ups that are broken: it fails what `peerd join` would fail or wait for, for the same reason."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.cli.cli import invoke
from peerd.cli.doctor.network_checks import NetworkTarget, bootstrap_checks
from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.token import Token, seal, to_text
from peerd.role.peer_stack import peer_stack
from peerd.run import home
from tests.worlds.network.internet import Peers, internet
from tests.worlds.processes.processes import LISTEN, processes
from tests.worlds.processes.webserver import serving
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.programs import stack_on, swarm
from tests.worlds.simulation.world import Node, World

ORGANIZER = Keypair.from_seed(b"o" * 32)
OTHER = Keypair.from_seed(b"x" * 32).peer_id
NOW = int(time.time())
SMALL = "run: tiny\nmodel: {d_model: 16, heads: 2, layers: 2, context: 16%s}\npipeline: {stages: 2, microbatch: 2}\n"
TEXT = 'data: {path: "{tmp}/text.txt", holdout: 0.1, shuffle_buffer: 100}\n'
TOKENS = f"access: {{allow: tokens, organizer: {ORGANIZER.peer_id}}}\n"


def small(model: str = "", more: str = "", text: str = TEXT) -> str:
    return SMALL % model + "batch: {target_samples: 8}\n" + text + more


@dataclass(frozen=True)
class Broken:
    """A set-up that cannot work, the check that finds it, and what join says, too."""

    name: str
    role: str
    file: str
    check: str
    says: str
    token: tuple[str, int] | None = None  # of whom: own or other, and when it expires
    own_code: str = ""


HUGE = "d_model: 4096, heads: 2, layers: 8"  # 1.6e9 parameters: 40 GB
BROKEN = [
    Broken("no token", "stage", small(more=TOKENS), "token", "there is none in {tmp}/data/access.token"),
    Broken("another's token", "stage", small(more=TOKENS), "token", "that of peer", ("other", NOW + 1000)),
    Broken("an expired token", "stage", small(more=TOKENS), "token", "expired 2 days ago", ("own", NOW - 2 * 86400)),
    Broken("a role not in the token", "trainer", small(more=TOKENS), "token", "not for the role", ("own", NOW + 86400)),
    Broken(
        "no text", "trainer", small(text="data: {path: /no/*.txt}\n"), "text", "data.path /no/*.txt: no file matches"
    ),
    Broken(
        "no tokenizer", "trainer", small(", vocab: no.json"), "tokenizer", "model.vocab: no.json is not a JSON file"
    ),
    Broken(
        "a wrong model",
        "stage",
        small(", kind: 'own:layers'"),
        "model",
        "NameError: name 'torsh'",
        own_code="torsh.x",
    ),
    Broken(
        "too large",
        "stage",
        small(more="limits: {memory_gb: 4}\n").replace("d_model: 16, heads: 2, layers: 2", HUGE),
        "memory",
        "limits.memory_gb allows 4.0 GB",
    ),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "no.json").write_text("<html>")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 2000)


def checks(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Doctor's exit code, and its findings by check, without the addresses in their names."""
    capsys.readouterr()
    code = invoke(["doctor", *argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, {finding["check"].partition(" /")[0]: finding for finding in found["checks"]}


def prepared(case: Broken, folder: Path) -> list[str]:
    """The arguments of doctor and of join; the files are there."""
    file, place = folder / "run.yaml", home.make_private_dir(folder / "data")
    file.write_text(case.file.replace("{tmp}", str(folder)))
    if case.own_code:
        (folder / "own.py").write_text(f"def layers(run):\n    {case.own_code}\n")
    if "allow: tokens" in case.file:
        own = home.load_identity(place).peer_id
    if case.token is not None:
        whose, until = case.token
        peer: PeerId = own if whose == "own" else OTHER
        token = Token(bytes(8), peer.public_key, "tiny", "Ann", ["stage"], until - 86400, until)
        (place / "access.token").write_text(to_text(Token, seal(token, ORGANIZER)))
    return ["--role", case.role, "--model", str(file), "--data-dir", str(place), "--listen", LISTEN]


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_doctor_fails_what_join_fails_and_for_the_same_reason(
    case: Broken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = prepared(case, tmp_path)
    code, found = checks(capsys, *argv)
    says = case.says.replace("{tmp}", str(tmp_path))
    failing = [check for check, finding in found.items() if finding["verdict"] == "fail"]
    assert (code, failing[0], len(failing) == 1 or case.name == "too large") == (1, case.check, True), found
    assert says in found[case.check]["found"] + found[case.check]["advice"]
    assert found[case.check]["advice"]
    assert "\n" not in found[case.check]["found"]
    capsys.readouterr()
    assert invoke(["join", *argv]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert "Traceback" not in told.err


@pytest.mark.slow
@pytest.mark.socket
def test_what_is_well_passes_and_what_was_not_asked_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(small().replace("{tmp}", str(tmp_path)))
    argv = ["--model", "run.yaml", "--data-dir", "data", "--listen", LISTEN]
    code, found = checks(capsys, *argv)
    verdicts = {check: finding["verdict"] for check, finding in found.items()}
    assert (code, verdicts["bootstrap"]) == (0, "unknown")
    for check in ("token", "tokenizer", "text", "text to validate", "model", "memory", "room for checkpoints"):
        assert verdicts[check] == "ok", found[check]
    _, found = checks(capsys, *argv, "--role", "stage")
    assert {"text", "text to validate"} & set(found) == set()
    _, found = checks(capsys, "--data-dir", "data", "--listen", LISTEN)
    assert found["run"]["verdict"] == "unknown"
    assert "--model FILE" in found["run"]["advice"]
    assert not (tmp_path / "data" / home.IDENTITY_FILE).exists()


@pytest.mark.slow
@pytest.mark.socket
def test_a_port_in_use_and_a_directory_in_use_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = home.make_private_dir(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as taken, home.locked(place):
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        code, found = checks(capsys, "--data-dir", str(place), "--listen", listen)
    assert (code, found["listen"]["verdict"], found["data directory"]["verdict"]) == (1, "fail", "warn")
    assert "address already in use" in found["listen"]["found"]
    assert f"in use by process {os.getpid()}" in found["data directory"]["found"]


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of a megabyte in `folder`, of which nothing is left."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.socket
def test_a_full_disk_fails_doctor_and_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(small().replace("{tmp}", str(tmp_path)))
    with full_disk(tmp_path / "disk"):
        argv = ["--model", "run.yaml", "--role", "stage", "--data-dir", str(tmp_path / "disk"), "--listen", LISTEN]
        code, found = checks(capsys, *argv)
        room = found["room for checkpoints"]
        assert (code, room["verdict"], found["data directory"]["verdict"]) == (1, "fail", "fail"), room
        assert "0.0 MB are free" in room["found"]
        assert "No space left on device" in found["data directory"]["found"]
        assert invoke(["join", *argv]) == 1
        told = capsys.readouterr().err
        assert f"the disk is full: {tmp_path / 'disk' / 'lock'} can't be written; make room in the data dir" in told


@pytest.mark.slow
@pytest.mark.socket
def test_a_backbone_needs_room_for_sets_of_all_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = small().replace("{tmp}", str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    argv = ["--model", "run.yaml", "--role", "backbone", "--listen", LISTEN, "--data-dir"]
    code, found = checks(capsys, *argv, str(tmp_path / "data"))
    assert (code, found["room for kept checkpoints"]["verdict"]) == (0, "ok"), found
    assert "sets of checkpoints of all 2 stages, one being written and one being fetched take" in str(found)
    assert "room for checkpoints" not in found
    with full_disk(tmp_path / "disk"):
        code, found = checks(capsys, *argv, str(tmp_path / "disk"))
        assert (code, found["room for kept checkpoints"]["verdict"]) == (1, "fail")


# --- the way into the swarm ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.socket
def test_a_bootstrap_that_leads_nowhere_fails_in_the_words_in_which_join_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes(tmp_path) as started, serving(tmp_path) as web, socket.socket() as closed:
        addr = started.backbone().address()
        closed.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        port = closed.getsockname()[1]
        stranger = f"{addr.partition('/p2p/')[0]}/p2p/{OTHER}"
        website = f"/ip4/127.0.0.1/tcp/{web.address.rpartition(':')[2]}/p2p/{OTHER}"
        for wrong, says in (
            (f"/ip4/127.0.0.1/tcp/{port}/p2p/{OTHER}", "connection refused"),
            (stranger, "another peer answers there: "),
            (website, "answers, but is not a peerd peer"),
        ):
            code, found = checks(capsys, "--bootstrap", wrong, "--data-dir", "data", "--listen", LISTEN)
            assert (code, found["bootstrap"]["verdict"], says in found["bootstrap"]["found"]) == (1, "fail", True), (
                found
            )
            assert found["bootstrap"]["advice"]
            assert found["clock"]["verdict"] == found["reachability"]["verdict"] == "unknown"
            waiting = started.start(f"join-{says[:7].strip()}", "backbone", "--listen", LISTEN, "--bootstrap", wrong)
            waiting.wait_for(found["bootstrap"]["found"])


@pytest.mark.usefixtures("autojump_clock")
@pytest.mark.parametrize(
    ("skews_s", "verdict", "says"),
    [
        ((0.0,), "ok", "0.0 s from that peer's"),
        ((10.0,), "fail", "10.0 s behind that peer's: they reject each other's records"),
        ((-10.0,), "fail", "10.0 s ahead of that peer's"),
        ((10.0, 10.0, 10.0), "warn", "10.0 s behind those of 3 peers; it is corrected"),
        ((-200_000.0,) * 3, "fail", "too far to correct"),
    ],
)
async def test_a_clock_that_is_off_is_judged_as_a_running_peer_judges_it(
    skews_s: tuple[float, ...], verdict: str, says: str
) -> None:
    found: dict[str, Any] = {}

    async def visitor(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        stack = stack_on(node)
        addrs = [str(other.full_addr) for other in node.world.nodes.values() if other is not node]
        for finding in await bootstrap_checks(stack, NetworkTarget(addrs, [str(node.addr)]), [node.addr]):
            found[finding.check.partition(" /")[0]] = finding
        task_status.started()

    async with World(1, swarm()).running() as world:
        for number, skew_s in enumerate(skews_s):
            await world.start(skew_s=skew_s, ip=f"198.{51 + number}.100.7")
        await world.start("visitor", program=visitor, ip="203.0.113.5")
    assert found["bootstrap"].verdict == "ok", found
    assert (found["clock"].verdict, says in found["clock"].found) == (verdict, True), found["clock"]


@pytest.mark.usefixtures("autojump_clock")
@pytest.mark.parametrize(
    ("kind", "others", "verdict", "says"),
    [
        ("symmetric", 1, "unknown", "a second observer is needed to know if the port is stable"),
        ("port-restricted", 1, "unknown", "a second observer is needed to know if the port is stable"),
        ("symmetric", 3, "warn", "a router maps each connection to another port"),
        ("port-restricted", 3, "warn", "port-restricted NAT"),
        ("public", 1, "ok", "reachable"),
    ],
)
async def test_what_one_observer_cannot_tell_of_a_router_is_unknown(
    kind: Any, others: int, verdict: str, says: str
) -> None:
    async with internet() as peers:
        for number in range(others):
            await peers.join_swarm(f"b{number}", "public")
        reached = await visit(peers, kind, [f"b{number}" for number in range(others)])
    assert (reached.verdict, says in reached.found) == (verdict, True), reached


async def visit(peers: Peers, kind: Any, others: list[str]) -> Any:
    """Doctor's word on the reachability of a machine behind such a router."""
    transport, clock = peers.machine("visitor", kind), SimClock(1, "visitor")
    stack = peer_stack(Keypair.from_seed(b"v" * 32), clock, [transport])
    addr = "/ip4/0.0.0.0/tcp/4001"
    found = await bootstrap_checks(
        stack, NetworkTarget([str(peers.addr(name)) for name in others], [addr]), [parse_addr(addr)]
    )
    return found[-1]


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize(("addr", "verdict"), [("/dns/b.example.org/tcp/31338", "ok"), ("/ip4/10.1.2.3/tcp/1", "warn")])
def test_an_address_to_announce_is_shown_with_how_far_it_leads(
    addr: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = checks(capsys, "--data-dir", "data", "--listen", LISTEN, "--announce", addr)
    assert (found["announce"]["verdict"], f"announced as {addr}" in found["announce"]["found"]) == (verdict, True)
    assert invoke(["doctor", "--announce", "/ip4/0.0.0.0/tcp/1"]) == 2
