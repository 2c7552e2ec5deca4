"""Joining by one line, on the volunteer's side: what it refuses, what it asks, what it keeps."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerd.cli import joining
from peerd.cli.cli import invoke
from peerd.core.errors import ConfigError, PeerdError
from peerd.core.keys import Keypair
from peerd.daemon.control.guest import JoinRequest
from peerd.messages.run_link import JoinLink, RunFileAnswer, shared_run
from peerd.messages.token import Token, seal, to_text
from peerd.run.config import load_run
from peerd.run.runfile import AccessSection, LineSection, ModelSection, OptimizerSection, PipelineSection, RunFile

LINK = JoinLink("198.51.100.7", 31337, Keypair.from_seed(b"a" * 32).peer_id, "r")
RUN = RunFile(
    run="r", model=ModelSection(layers=2), pipeline=PipelineSection(stages=2), line=LineSection(link=LINK.text)
)


def accept(tree: dict[str, Any], roles: list[str], wish: JoinRequest) -> RunFile:
    text = msgspec.json.encode({"run": "r"} | tree)
    return joining.accept(shared_run(RunFileAnswer(text, b""), "r"), LINK, roles, wish)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": {"kind": "mine:build"}}, "code of the run, which is never sent over the network.*get 'mine.py'"),
        ({"model": {"kind": "a.b:build"}}, "get 'a/b.py' from somebody .* add --allow-code"),
        ({"data": {"kind": "dataset", "path": "mine:docs"}}, "data.path is 'mine:docs': code"),
        ({"data": {"sources": [], "kind": "dataset", "path": "mine:docs"}}, "data.path is 'mine:docs': code"),
        ({"experts": {"block": "os:path"}}, "experts.block is 'os:path': code"),
        ({"model": {"vocab": "tok.json"}}, "model.vocab is 'tok.json': .*--tokenizer FILE"),
        ({"data": {"path": "*.txt"}}, r"data.path is '\*\.txt': the run trains on files; add --data PATH"),
        ({"data": {"path": ".ssh/id"}}, "data.path is '.ssh/id': the run trains on files"),
        ({"data": {"sources": [{"path": "stdlib"}, {"path": "x"}]}}, "has several sources"),
        ({"data": {"path": "http://a.example/x", "digest": "0" * 64}}, "data.path is .*without https; allowed: stdlib"),
        ({"data": {"path": "https://169.254.169.254/x"}}, "no address of the public internet"),
        ({"checkpoint": {"keep": 10**9}}, "checkpoint.keep is 1000000000; allowed .*: 1 to 64"),
        ({"data": {"shuffle_buffer": 10_000_000}, "model": {"context": 1 << 20}}, "bytes of memory; allowed by a join"),
        ({"model": {"kind": "m\x1b[2J:f"}}, r"m\\x1b\[2J"),
    ],
)
def test_code_and_files_of_this_machine_are_the_volunteers_to_name(
    tree: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        accept(tree, ["trainer"], JoinRequest())


def test_what_was_named_and_lies_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"kind": "mine:build", "vocab": "tok.json"}, "data": {"path": "*.txt"}}
    wish = JoinRequest(data="texts", allow_code=("mine.py",), tokenizer="tok.json")
    with pytest.raises(ConfigError, match=r"--allow-code mine\.py: there is no such Python file here"):
        accept(tree, ["trainer"], wish)
    for name in ("mine.py", "tok.json"):
        (tmp_path / name).write_text("")
    run = accept(tree, ["trainer"], wish)
    assert (run.data.path, run.model.vocab) == ("texts", "tok.json")
    assert accept({"data": {"path": "*.txt"}}, ["stage"], JoinRequest()).data.path == ""


def test_a_kept_run_file_uses_the_code_that_was_allowed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("def build(run): ...\n")  # elsewhere this name is an installed module
    wish = JoinRequest(yes=True, allow_code=("json.py",))
    file = joining.agree(accept({"model": {"kind": "json:build"}}, ["stage"], wish), LINK, tmp_path / "home", wish)
    assert load_run(file).run.model.kind == "json:build"
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"'json\.py', which is not in this folder"):
        load_run(file)
    (tmp_path / "elsewhere/json.py").write_text("import os\n")
    with pytest.raises(ConfigError, match="has changed since it was allowed"):
        load_run(file)
    assert invoke(["doctor", "--model", str(file)]) == 2


def test_a_run_is_shown_and_agreed_to_once_and_a_change_is_asked_about_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="there is no terminal to ask you about this run file: read it, and add --yes"
    ):
        joining.agree(RUN, LINK, tmp_path, JoinRequest())
    shown = capsys.readouterr().err
    assert "not signed: only the backbone vouches for it" in shown
    assert "stages: 2" in shown
    assert not (tmp_path / "run.yaml").exists()

    file = joining.agree(RUN, LINK, tmp_path, JoinRequest(yes=True))
    assert load_run(file).run == RUN
    capsys.readouterr()
    assert joining.agree(RUN, LINK, tmp_path, JoinRequest()) == file
    assert capsys.readouterr().err == ""

    other = msgspec.structs.replace(RUN, optimizer=OptimizerSection(lr=0.5))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(joining.typer, "confirm", lambda *_, **__: False)
    with pytest.raises(PeerdError, match="not joined"):
        joining.agree(other, LINK, tmp_path, JoinRequest())
    assert "+  lr: 0.5" in capsys.readouterr().err
    assert load_run(file).run.optimizer.lr != 0.5
    monkeypatch.setattr(joining.typer, "confirm", lambda *_, **__: True)
    joining.agree(other, LINK, tmp_path, JoinRequest())
    assert load_run(file).run.optimizer.lr == 0.5


ORGANIZER = Keypair.from_seed(b"o" * 32)


def token_of(organizer: Keypair) -> str:
    token = Token(bytes(8), LINK.peer.public_key, "r", "Ann", ["stage"], 1_700_000_000, 9_900_000_000)
    return to_text(Token, seal(token, organizer))


def organized(organizer: Keypair) -> RunFile:
    access = AccessSection(allow="tokens", organizer=organizer.peer_id.text)
    return msgspec.structs.replace(RUN, access=access)


def test_a_token_is_given_as_text_or_as_a_file_and_kept_for_this_user_alone(tmp_path: Path) -> None:
    text, run = token_of(ORGANIZER), organized(ORGANIZER)
    file = tmp_path / "mine.token"
    file.write_text(text + "\n")
    for given in (text, str(file)):
        place = tmp_path / given[:5].replace("/", "_")
        joining.agree(run, LINK, place, JoinRequest(yes=True, token=given))
        kept = place / "access.token"
        assert kept.read_text().strip() == text
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="--token: neither a token nor a file with one"):
        joining.agree(run, LINK, tmp_path, JoinRequest(yes=True, token="peerd-token-xyz"))


def test_with_a_token_the_run_file_is_its_organizers_or_refused(tmp_path: Path) -> None:
    wish, stranger = JoinRequest(yes=True, token=token_of(ORGANIZER)), Keypair.from_seed(b"s" * 32)
    with pytest.raises(ConfigError, match=r"access\.organizer is missing, and the run file is not signed"):
        joining.agree(RUN, LINK, tmp_path, wish)
    with pytest.raises(ConfigError, match="allowed with your token: the organizer who issued it"):
        joining.agree(organized(stranger), LINK, tmp_path, wish)
    assert not (tmp_path / "run.yaml").exists()
    assert not (tmp_path / "access.token").exists()
    joining.agree(organized(ORGANIZER), LINK, tmp_path, wish)
    for run in (RUN, organized(stranger)):  # the token and the organizer are remembered
        with pytest.raises(ConfigError, match=f"allowed: {ORGANIZER.peer_id.text}, who signed"):
            joining.agree(run, LINK, tmp_path, JoinRequest(yes=True))
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(ConfigError, match=r"access\.organizer is missing"):
        joining.agree(RUN, LINK, tmp_path, JoinRequest(yes=True))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "nothing to join; pass a link like peerd://HOST:PORT/PEER/RUN, or --role ROLE --model FILE"),
        (["peerd://x"], "'peerd://x' is not a join link; it has the form peerd://HOST:PORT/PEER/RUN"),
        (
            ["--role", "stage", "--yes"],
            "--yes, --data, --token, --allow-code and --tokenizer need a join link peerd://...",
        ),
        ([LINK.text, "--model", "x.yaml"], "pass either a join link peerd://... or --model FILE, not both"),
    ],
)
def test_a_line_that_cannot_be_meant_is_one_message_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["join", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"peerd: {says}")


def test_a_run_in_stages_needs_stages_and_another_replicas() -> None:
    assert joining.default_roles(RUN) == ["stage"]
    assert joining.default_roles(RunFile(run="r")) == ["trainer"]
