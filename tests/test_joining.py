"""Joining by one line, on the volunteer's side: what it refuses, what it asks, what it keeps."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from peerd.cli import invoke
from peerd.commands import joining
from peerd.commands.joining import JoinWish
from peerd.config import load_run
from peerd.core.errors import ConfigError, PeerdError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.messages.run_link import JoinLink
from peerd.core.messages.token import Token, seal, to_text

LINK = JoinLink("198.51.100.7", 31337, Keypair.from_seed(b"a" * 32).peer_id, "r")
TREE: dict[str, Any] = {"run": "r", "model": {"layers": 2}, "pipeline": {"stages": 2}}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": {"kind": "mine:build"}}, "code never comes over the network; get mine.py"),
        ({"model": {"kind": "a.b:build"}}, "add --allow-code a/b.py"),
        ({"data": {"kind": "dataset", "path": "mine:docs"}}, "add --allow-code mine.py"),
        ({"model": {"vocab": "tok.json"}}, "lay the organizer's tok.json into this folder"),
        ({"data": {"path": "*.txt"}}, r"trains on files \(\*\.txt\): say where yours are, --data PATH"),
        ({"data": {"sources": [{"path": "stdlib"}, {"path": "x"}]}}, "several sources, x among them"),
        ({"model": {"kind": "m\x1b[2J:f"}}, r"m\\x1b\[2J"),
    ],
)
def test_code_and_files_of_this_machine_are_the_volunteers_to_name(
    tree: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        joining.check_local({"run": "r"} | tree, ["trainer"], JoinWish())


def test_what_was_named_and_lies_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"run": "r", "model": {"kind": "mine:build", "vocab": "tok.json"}, "data": {"path": "*.txt"}}
    wish = JoinWish(data="texts", allow_code=("mine.py",))
    with pytest.raises(ConfigError, match="code of your own"):
        joining.check_local(tree, ["trainer"], wish)
    for name in ("mine.py", "tok.json"):
        (tmp_path / name).write_text("")
    joining.check_local(tree, ["trainer"], wish)
    joining.check_local({"run": "r", "data": {"path": "*.txt"}}, ["stage"], JoinWish())


def test_a_run_is_shown_and_agreed_to_once_and_a_change_is_asked_about_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="nobody is there to agree to this run file: read it, and add --yes"):
        joining.agree(TREE, LINK, tmp_path, JoinWish())
    shown = capsys.readouterr().err
    assert "signed by nobody: it is the backbone's word" in shown
    assert "stages: 2" in shown
    assert not (tmp_path / "run.yaml").exists()

    file = joining.agree(TREE, LINK, tmp_path, JoinWish(yes=True))
    assert load_run(file).run.pipeline.stages == 2
    capsys.readouterr()
    assert joining.agree(TREE, LINK, tmp_path, JoinWish()) == file
    assert capsys.readouterr().err == ""

    other = TREE | {"optimizer": {"lr": 0.5}}
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(joining.typer, "confirm", lambda *_, **__: False)
    with pytest.raises(PeerdError, match="not joined"):
        joining.agree(other, LINK, tmp_path, JoinWish())
    assert "+  lr: 0.5" in capsys.readouterr().err
    assert load_run(file).run.optimizer.lr != 0.5
    monkeypatch.setattr(joining.typer, "confirm", lambda *_, **__: True)
    joining.agree(other, LINK, tmp_path, JoinWish())
    assert load_run(file).run.optimizer.lr == 0.5


def test_a_token_is_given_as_text_or_as_a_file_and_kept_for_this_user_alone(tmp_path: Path) -> None:
    organizer, peer = Keypair.from_seed(b"o" * 32), PeerId.parse(LINK.peer.text)
    token = Token(bytes(8), peer.public_key, "r", "Ann", ["stage"], 1_700_000_000, 9_900_000_000)
    text = to_text(Token, seal(token, organizer))
    file = tmp_path / "mine.token"
    file.write_text(text + "\n")
    for given in (text, str(file)):
        place = tmp_path / given[:5].replace("/", "_")
        joining.agree(TREE, LINK, place, JoinWish(yes=True, token=given))
        kept = place / "access.token"
        assert kept.read_text().strip() == text
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="--token: neither a token nor a file with one"):
        joining.agree(TREE, LINK, tmp_path, JoinWish(yes=True, token="peerd-token-xyz"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "say what to join: a line such as peerd://HOST:PORT/PEER/RUN, or --role ROLE --model FILE"),
        (["peerd://x"], "'peerd://x' is no line to join by; it has the form peerd://HOST:PORT/PEER/RUN"),
        (["--role", "stage", "--yes"], "--yes, --data, --token and --allow-code go with a line peerd://..."),
        ([LINK.text, "--model", "x.yaml"], "give a line peerd://... or --model FILE, not both"),
    ],
)
def test_a_line_that_cannot_be_meant_is_one_message_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["join", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"peerd: {says}")


def test_a_run_in_stages_needs_stages_and_another_replicas() -> None:
    assert joining.default_roles(TREE) == ["stage"]
    assert joining.default_roles({"run": "r"}) == ["trainer"]
