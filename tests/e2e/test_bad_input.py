"""Mistakes of users: each ends in one message that names it and its place, exit code 2 or 1, and no traceback.

The table is the list. Commands run in this process where nothing keeps running; what needs other peers or files of a
run follows below it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.token import Token, seal, to_text
from peerd.model.checkpoint import Checkpoints
from peerd.model.stage.stage_module import StageModule
from peerd.run import home
from peerd.run.config import load_run
from peerd.run.runfile import fingerprint
from tests.worlds.processes.processes import LISTEN, processes, run_file
from tests.worlds.processes.webserver import serving

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ORGANIZER = Keypair.from_seed(b"o" * 32)
_GRANT = Token(bytes(8), PeerId.parse(PEER).public_key, "tiny", "Ann", ["stage"], 1_700_000_000, 9_900_000_000)
TOKEN = to_text(Token, seal(_GRANT, ORGANIZER))
GOOD = "run: tiny\nmodel: {d_model: 16, heads: 2, layers: 2, context: 16}\n"


@dataclass(frozen=True)
class Case:
    """A command line; `{tmp}` is a fresh folder, `{port}` a port in use. `files` are written first."""

    name: str
    argv: str
    code: int
    says: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()


def yaml_case(name: str, text: str, *says: str) -> Case:
    return Case(name, "join --role stage --model {tmp}/run.yaml", 2, ("{tmp}/run.yaml", *says), (("run.yaml", text),))


def token_case(name: str, text: str | None, *says: str) -> Case:
    """A run for invited peers, and what lies where this peer's token should be."""
    files = [("run.yaml", f"{GOOD}access: {{allow: tokens, organizer: {ORGANIZER.peer_id}}}\n")]
    files += [("data/access.token", text)] if text is not None else []
    return Case(name, "join --role stage --model {tmp}/run.yaml", 2, says, tuple(files))


def text_case(name: str, text: str | None, *says: str) -> Case:
    """A trainer of a whole replica, and its text."""
    files = (("run.yaml", GOOD + "data: {path: {tmp}/a.txt}\n"), *([("a.txt", text)] if text is not None else []))
    return Case(name, "join --role trainer --model {tmp}/run.yaml", 2, says, files)


def code_case(name: str, layers: str, *says: str) -> Case:
    """A stage peer with a model of its own."""
    code = f"from torch import nn\n\n\ndef layers(run):\n    return [nn.Embedding(256, 8), nn.Linear({layers})]\n"
    text = "run: own\nmodel: {kind: '{tmp}/mine.py:layers', d_model: 8, context: 16}\npipeline: {stages: 2}\n"
    files = (("run.yaml", text), ("mine.py", code))
    return Case(name, "join --role stage --model {tmp}/run.yaml", 2, says, files)


CASES = [
    # The command line.
    Case("no such command", "jion", 2, ("No such command 'jion'",)),
    Case("no such flag", "join --role stage --rolle x", 2, ("No such option",)),
    Case("no role", "join", 2, ("nothing to join; pass a link like peerd://HOST:PORT/PEER/RUN, or --role ROLE",)),
    Case("steps below one", "demo --steps 0", 2, ("--steps",)),
    Case("a word for a number", "join --role stage --seed many", 2, ("--seed",)),
    Case("unknown role", "join --role stagee", 2, ("role 'stagee' is unknown; did you mean stage?",)),
    Case("role from nowhere", "join --role no_such_file:Role", 2, ("there is no module no_such_file",)),
    Case("role twice", "join --role backbone --role backbone", 2, ("role backbone is given twice",)),
    Case("role without its file", "join --role stage", 2, ("role stage needs a run file: add --model FILE",)),
    Case("unknown device", "join --role stage --device gpu", 2, ("--device 'gpu' is unknown; allowed: cpu, cuda",)),
    Case("unknown level", "backbone --log-level loud", 2, ("'loud' is unknown; allowed: debug, info, warn, error",)),
    Case("wrong bootstrap", "backbone --bootstrap 10.0.0.1:31337", 2, ("--bootstrap: '10.0.0.1:31337' is not an",)),
    Case("wrong listen", "backbone --listen /ip4/999.0.0.1/tcp/1", 2, ("--listen: '/ip4/999.0.0.1/tcp/1' is not",)),
    Case("wrong peer id", "backbone --bootstrap /ip4/1.2.3.4/tcp/1/p2p/Qm1", 2, ("--bootstrap:", "is not an address")),
    Case("a container's name", "backbone --bootstrap /dns/a_b/tcp/1", 2, ("'a_b' has an underscore, which no host",)),
    # The run file.
    Case("no such file", "join --role stage --model {tmp}/rum.yaml", 2, ("there is no file {tmp}/rum.yaml",)),
    Case(
        "a misspelt file name",
        "join --role stage --model {tmp}/rum.yaml",
        2,
        ("did you mean {tmp}/run.yaml?",),
        (("run.yaml", GOOD),),
    ),
    Case("a folder for a file", "backbone --config {tmp}", 2, ("{tmp} can't be read",)),
    yaml_case("empty file", "", "is empty"),
    yaml_case("not YAML", "run: [x", "line 1", "this is not YAML"),
    yaml_case("a list", "- run", "found a list; allowed: keys with values"),
    yaml_case("unknown key", GOOD + "pipline: {stages: 2}\n", "line 3: pipline is not a known key; did you mean pip"),
    yaml_case("wrong type", "run: tiny\nseed: soon\n", "line 2: seed is soon (text); allowed: a whole number"),
    yaml_case("impossible value", "run: tiny\noptimizer:\n  lr: 0\n", "line 3: optimizer.lr is 0.0; must be above 0"),
    yaml_case("values at odds", "run: tiny\nmodel: {heads: 5}\n", "model.heads is 5; must divide d_model (128)"),
    yaml_case("unknown choice", "run: tiny\noptimizer: {name: adma}\n", "one of sgd, adamw, lamb"),
    yaml_case("key twice", "run: tiny\nseed: 1\nseed: 2\n", "line 3: seed is given twice, first on line 2"),
    yaml_case("wrong address", "run: tiny\nbootstrap: [localhost]\n", "line 2: bootstrap[0]: 'localhost' is not an"),
    yaml_case("several mistakes", "sede: 1\nmodel: 3\n", "has 3 mistakes", "sede", "model is 3", "run is missing"),
    # Access by tokens.
    yaml_case("tokens of nobody", "run: tiny\naccess: {allow: tokens}\n", "line 2: access.organizer is empty; with"),
    yaml_case("a token for everyone", "run: tiny\naccess: {token: x}\n", "access.token has no effect without allow"),
    token_case("no token", None, "run tiny admits members by token, and there is none in {tmp}/data/access.token; ask"),
    token_case("not a token", "hello", "{tmp}/data/access.token has no valid token: a text that does not begin with"),
    token_case("half a token", TOKEN[:120], "{tmp}/data/access.token has no valid token", "copy the whole text again"),
    token_case("another's token", TOKEN, "the token shown is that of peer …4kx6nXTN; ask the organizer ("),
    Case("token for nobody", "token issue --run tiny --peer me", 2, ("--peer 'me' is not a peer id",)),
    Case("token without roles", f"token issue --run tiny --peer {PEER} --roles ,", 2, ("--roles: '' is not a role",)),
    Case(
        "token with a wrong role",
        f"token issue --run tiny --peer {PEER} --roles A",
        2,
        ("--roles: 'A' is not an installed role",),
    ),
    Case("token for no time", f"token issue --run tiny --peer {PEER} --days 0", 2, ("--days",)),
    Case("token of no run", f"token issue --run {'x' * 65} --peer {PEER}", 2, ("--run: allowed are 1 to 64",)),
    Case("no such token", "token revoke 12ab", 2, ("'12ab': there is no such token in", "peerd token list")),
    # Text and code of the user's, looked at before anything is joined.
    yaml_case("no tokenizer", GOOD.replace("{", "{vocab: no.json, "), "model.vocab: there is no file no.json here"),
    text_case("no text", None, "data.path {tmp}/a.txt: no file matches (looked from "),
    text_case("text of 5 bytes", "12345", "data.path: {tmp}/a.txt has 5 bytes to train with in 1 files; one sample of"),
    code_case("a wrong layer", "8, 16), nn.Linear(16, 256", "1 (Linear) got [2, 16, 8] float32 and returned [2, "),
    code_case("a layer that fails", "9, 8), nn.Linear(8, 256", "1 (Linear) got [2, 16, 8] float32 and failed: Run"),
    code_case("scores of no vocabulary", "8, 8), nn.Linear(8, 9", "returned [2, 16, 9] float32; expected [2, 16, 256]"),
    code_case("code that cannot be read", "8, 8)), nn.Linear(8, 256", "{tmp}/mine.py", "mine.py, line 5: closing"),
    # This machine.
    Case("port in use", "backbone --listen /ip4/127.0.0.1/tcp/{port}", 2, ("/tcp/{port}: address already in use",)),
    Case("not our address", "backbone --listen /ip4/203.0.113.1/tcp/0", 2, ("cannot listen on /ip4/203.0.113.1",)),
    Case("a file for a directory", "backbone --data-dir {tmp}/f", 2, ("{tmp}/f is a file",), (("f", ""),)),
    Case("damaged identity", "backbone", 2, ("{tmp}/data/identity.key is damaged",), (("data/identity.key", "x"),)),
    Case("no daemon", "status --data-dir {tmp}", 1, ("no peerd daemon is running in {tmp}",)),
    Case("no daemon anywhere", "status", 1, ("no peerd daemon of this user is running",)),
    Case("no such data directory", "status --data-dir {tmp}/no", 2, ("there is no data directory {tmp}/no",)),
    Case("data that is not there", "demo --data {tmp}/no", 2, ("--data {tmp}/no: there is no such file or folder",)),
    # Bootstraps, asked by doctor: what is wrong, and what to do.
    Case("doctor: refused", "doctor --listen {here} --bootstrap {no}", 1, ("refused", "is the backbone running")),
    Case(
        "doctor: not libp2p", "doctor --listen {here} --bootstrap /ip4/127.0.0.1/tcp/{mute}", 1, ("not a peerd daemon",)
    ),
    Case("doctor: port in use", "doctor --listen /ip4/127.0.0.1/tcp/{port}", 1, ("address already in use",)),
    Case("doctor: wrong address", "doctor --bootstrap nowhere", 2, ("'nowhere' is not an address",)),
]


@pytest.fixture
def ports() -> Iterator[dict[str, object]]:
    """A port in use, and one where something answers that is no libp2p peer; where to listen, where nobody does."""
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with mute.accept()[0] as caller:
                        caller.sendall(b"220 mail.example ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        places = {"here": LISTEN, "no": "/ip4/127.0.0.1/tcp/9"}
        yield places | {"port": taken.getsockname()[1], "mute": mute.getsockname()[1]}
        mute.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No daemons, data or signal handlers but this test's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.socket
@pytest.mark.slow  # the first role that computes loads torch
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_ends_in_one_clear_message(
    case: Case, tmp_path: Path, ports: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in case.files:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace("{tmp}", str(tmp_path)))
        file.chmod(0o600)
    facts = {"tmp": str(tmp_path), **ports}
    argv = case.argv.format(**facts).split()
    if argv[0] in ("backbone", "join", "doctor") and "--data-dir" not in argv:
        argv += ["--data-dir", str(tmp_path / "data")]
    code = invoke(argv)
    told = capsys.readouterr()
    text = told.err if argv[0] != "doctor" or code == 2 else told.out
    assert code == case.code, text
    for part in case.says:
        assert part.format(**facts) in text
    assert "Traceback" not in told.out + told.err
    assert len(told.err.strip().splitlines()) <= 6


def test_a_data_directory_in_use_names_the_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = home.make_private_dir(tmp_path / "data")
    with home.locked(place):
        assert invoke(["backbone", "--data-dir", str(place)]) == 2
    assert f"the data directory {place} is in use by process" in capsys.readouterr().err


# --- what needs other peers, or files that a run has written -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.socket
def test_a_bootstrap_that_is_down_is_waited_for_and_the_reason_shown(tmp_path: Path) -> None:
    """Not an error: it may come back. What is wrong is said once, in status too, and Ctrl+C ends it with 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    addr = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"
    with processes(tmp_path) as started:
        peer = started.backbone("--bootstrap", addr)
        peer.wait_for(f"bootstrap {addr}: connection refused")
        assert peer.status()["dht"]["bootstrap"][0]["problem"] == f"{addr}: connection refused"
        code, seconds = peer.end()
        assert (code, seconds < 10) == (0, True)
        assert peer.said.count("connection refused") == 1
        assert "Traceback" not in peer.said


@pytest.mark.slow
@pytest.mark.socket
def test_a_peer_that_reaches_nobody_waits_says_what_it_tried_and_begins_when_told(
    tmp_path: Path,
) -> None:
    """A closed port, a web server, and the right port with the wrong peer id: each is told as what it is."""
    file = run_file(tmp_path)
    with processes(tmp_path) as started, serving(tmp_path) as web:
        addr = started.backbone().address()
        closed, page = "/ip4/127.0.0.1/tcp/9", f"/ip4/127.0.0.1/tcp/{web.address.rpartition(':')[2]}"
        wrong, _, right = addr.partition("/p2p/")
        options = ["--role", "stage", "--model", str(file), "--listen", LISTEN]
        for place in (closed, page, f"{wrong}/p2p/{PEER}"):
            options += ["--bootstrap", place]
        lost = started.start("lost", "join", *options)
        lost.wait_for("company.missing")
        (line,) = [line for line in lost.said.splitlines() if "company.missing" in line]
        print(line)
        assert "warning: company.missing" in line
        assert "reached none of the 3 bootstrap addresses: " in line
        assert f"{closed}: connection refused; " in line
        assert f"{page}: answers, but is not a peerd peer; " in line
        assert f"{wrong}: another peer answers there: …{right[-8:]}, not …{PEER[-8:]}; retrying;" in line
        assert line.endswith('give --alone to begin without"')
        assert lost.status()["roles"][0]["waits_for"].startswith("reached none of the 3 bootstrap addresses")
        assert "role.started" not in lost.said
        assert lost.end()[0] == 0
        alone = started.start("alone", "join", *options, "--alone")
        alone.wait_for("role.started role=stage")
        assert "company.missing" not in alone.said


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.thorough
def test_doctor_tells_a_healthy_bootstrap_from_one_with_another_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with processes(tmp_path) as started:
        addr = started.backbone().address()
        options = ["--data-dir", str(tmp_path / "doctor"), "--bootstrap"]
        assert invoke(["doctor", *options, addr]) == 0
        told = capsys.readouterr().out
        assert "reached peerd/" in told
        assert "clock: 0.0 s from that peer's" in told
        bare = addr.partition("/p2p/")[0]
        assert invoke(["doctor", *options, f"{bare}/p2p/{PEER}"]) == 1
        told = capsys.readouterr().out
        assert "another peer answers there: ask the organizer for the new join link" in told
        assert invoke(["doctor", *options, bare, "--json"]) == 0
        assert "the address has no peer id" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.socket
def test_a_peer_whose_run_file_differs_is_told_which_key(tmp_path: Path) -> None:
    with processes(tmp_path) as started:
        addr = started.backbone().address()
        first = started.join("first", "stage", run_file(tmp_path), addr)
        first.wait_for("role.started role=stage")
        other = run_file(tmp_path, "optimizer: {lr: 0.5}\n", "other.yaml")
        second = started.join("second", "trainer", other, addr)
        assert second.popen.wait(200) == 2, second.said
        assert "run 'e2e' is running with other settings: optimizer.lr is 0.5 here and 0.001 there" in second.said
        assert "Traceback" not in second.said
        assert first.popen.poll() is None


@pytest.mark.slow
@pytest.mark.socket
def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_file(tmp_path)
    run = load_run(file).run
    folder = tmp_path / "data" / "stage" / "checkpoints" / "e2e" / "stage-0"
    saved = Checkpoints(folder, 3, fingerprint(run), 0)
    saved.save(4, StageModule(run, 0).state(), {"lineage": ""})
    tensors = next(folder.glob("*.safetensors"))
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(damaged)
    argv = ["join", "--role", "stage", "--model", str(file), "--listen", LISTEN, "--data-dir", str(tmp_path / "data")]
    assert invoke(argv) == 2
    told = capsys.readouterr().err
    assert f"{tensors} is damaged: its SHA-256 is not the manifest's; delete step-00000004.json" in told
    assert "Traceback" not in told
    assert tensors.read_bytes() == bytes(damaged)
