"""A run for invited peers, with real processes: who has a token trains, who has none is told so and harms nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from peerd.run import home
from tests.e2e.test_processes import assert_ends_well
from tests.worlds.processes.processes import Process, Processes, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]


def invite(folder: Path, name: str, roles: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The token's id; the token lies where the peer of that name looks for it."""
    place = home.make_private_dir(folder / name)
    peer = home.load_identity(place).peer_id
    argv = ["token", "issue", "--run", "e2e", "--peer", str(peer), "--roles", roles, "--name", name.title()]
    assert invoke([*argv, "--data-dir", str(folder / "organizer")]) == 0
    (place / "access.token").write_text(capsys.readouterr().out)
    assert invoke(["token", "list", "--json", "--data-dir", str(folder / "organizer")]) == 0
    return str(json.loads(capsys.readouterr().out)["tokens"][-1]["id"])


def closed_run(folder: Path, name: str = "run.yaml", extra: str = "") -> Path:
    organizer = home.load_identity(home.make_private_dir(folder / "organizer")).peer_id
    return run_file(folder, f"access: {{allow: tokens, organizer: {organizer}}}\n{extra}", name)


def start(started: Processes, file: Path) -> tuple[Process, str]:
    """The organizer's own backbone, which needs no token, and its address."""
    backbone = started.backbone("--config", str(file), name="organizer")
    return backbone, backbone.address()


@pytest.mark.thorough
def test_invited_peers_train_while_others_are_refused_and_a_revoked_one_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, open_file = closed_run(tmp_path), run_file(tmp_path, name="open.yaml")
    invite(tmp_path, "ann", "stage", capsys)
    bob = invite(tmp_path, "bob", "stage", capsys)
    invite(tmp_path, "cleo", "trainer", capsys)
    with processes(tmp_path) as started:
        backbone, addr = start(started, file)
        ann, bobs = (started.join(name, "stage", file, addr) for name in ("ann", "bob"))
        cleo = started.join("cleo", "trainer", file, addr)
        cleo.reaches(2)
        assert invoke(["doctor", "--data-dir", str(tmp_path / "doctor"), "--bootstrap", addr]) == 0
        assert "the peer belongs to a run with tokens" in capsys.readouterr().out

        none = started.join("none", "stage", file, addr)
        assert none.popen.wait(200) == 2
        assert "run e2e admits members by token, and there is none in" in none.said
        (home.make_private_dir(tmp_path / "thief") / "access.token").write_bytes(
            (tmp_path / "ann" / "access.token").read_bytes()
        )
        thief = started.join("thief", "stage", file, addr)
        assert thief.popen.wait(200) == 2
        assert "the token shown is that of peer" in thief.said
        sly = started.join("sly", "stage", open_file, addr)  # leaves its `access` section out
        sly.wait_for("it refuses us: no valid token for run e2e")
        outsider = sly.status()["peer"]["id"]
        cleo.reaches(cleo.step() + 3)
        assert f"peer {outsider}: its call of dht/4/" in backbone.said
        shown = [peer["peer"] for stage in ann.status()["swarm"]["stages"] for peer in stage["peers"]]
        assert sorted(shown) == sorted(process.status()["peer"]["id"] for process in (ann, bobs))

        assert invoke(["token", "revoke", bob, "--data-dir", str(tmp_path / "organizer")]) == 0
        bobs.wait_for("the token shown was revoked by the organizer", 150)
        assert ann.popen.poll() is None
        for process in (cleo, ann, backbone):
            assert_ends_well(process, 2)
        assert not [process.name for process in started.all if "Traceback" in process.said]
