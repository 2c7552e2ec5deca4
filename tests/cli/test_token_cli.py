"""`peerd token`: what an organizer types, what lands in his book, and what a peer makes of its own token."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import trio

from peerd.access import token_files as membership
from peerd.access.members import RunMembers
from peerd.cli.cli import invoke
from peerd.core.errors import ConfigError
from peerd.core.keys import Keypair
from peerd.messages.token import Revoked, Token, from_text, signed_by, unseal
from peerd.run import home
from peerd.run.runfile import AccessSection, RunFile

ANN = Keypair.from_seed(b"a" * 32)
BOB = Keypair.from_seed(b"b" * 32)
DAY_S = 86400


@pytest.fixture
def organizer(tmp_path: Path) -> Path:
    return tmp_path / "organizer"


def issue(place: Path, capsys: pytest.CaptureFixture[str], *more: str, peer: Keypair = ANN) -> str:
    """One token as text."""
    argv = ["token", "issue", "--run", "tiny", "--peer", str(peer.peer_id), "--data-dir", str(place), *more]
    assert invoke(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ("stage,trainr", "--roles: 'trainr' is not an installed role; did you mean trainer?"),
        (
            "walrus",
            "--roles: 'walrus' is not an installed role; allowed: aux, backbone, expert, stage, trainer; a role of",
        ),
        ("no_such_file:Role", "there is no module no_such_file"),
    ],
)
def test_a_role_that_nobody_knows_is_refused_and_nothing_is_issued(
    organizer: Path, capsys: pytest.CaptureFixture[str], roles: str, says: str
) -> None:
    argv = ["token", "issue", "--run", "tiny", "--peer", str(ANN.peer_id), "--data-dir", str(organizer)]
    assert invoke([*argv, "--roles", roles]) == 2
    told = capsys.readouterr()
    assert (told.out, says in told.err) == ("", True), told.err
    assert listed(organizer, capsys) == []


def test_the_token_of_a_role_of_ones_own_has_the_name_that_its_peer_is_asked_for(
    organizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Hello:\n    name = 'greeter'\n    needs_run = True\n    run = leave = status = None\n"
    (tmp_path / "greeting_of_test_token.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    token = issue(organizer, capsys, "--roles", "greeting_of_test_token:Hello, aux")
    run, place = peer_of(organizer, tmp_path / "peer")
    (place / membership.TOKEN_FILE).write_text(token)
    assert listed(organizer, capsys)[0]["roles"] == ["aux", "greeter"]
    membership.own_papers(run, ["greeter"], place, ANN.peer_id, time.time())


def listed(place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert invoke(["token", "list", "--json", "--data-dir", str(place)]) == 0
    return list(json.loads(capsys.readouterr().out)["tokens"])


def test_a_token_goes_to_stdout_and_what_to_do_with_it_to_stderr(
    organizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["token", "issue", "--run", "tiny", "--peer", str(ANN.peer_id), "--name", "Ann", "--days", "2"]
    assert invoke([*argv, "--data-dir", str(organizer)]) == 0
    told = capsys.readouterr()
    data = from_text(Token, told.out)
    token = unseal(Token, data)
    key = home.load_identity(organizer)
    assert told.out.count("\n") == 1
    assert (token.peer, token.run, token.name, token.roles) == (ANN.peer_id, "tiny", "Ann", ["stage", "trainer"])
    assert (token.expires - token.issued, abs(token.issued - time.time()) < 60) == (2 * DAY_S, True)
    assert signed_by(key.peer_id, Token, data)
    assert f"access:\n  allow: tokens\n  organizer: {key.peer_id}\n" in told.err
    assert token.id.hex() in told.err
    assert (organizer / home.IDENTITY_FILE).stat().st_mode & 0o777 == 0o600


def test_the_book_lists_what_was_issued_and_what_was_taken_back(
    organizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issue(organizer, capsys, "--name", "Ann")
    issue(organizer, capsys, "--roles", "aux", peer=BOB)
    first, second = listed(organizer, capsys)
    assert (first["name"], first["state"], second["roles"], second["peer"]) == (
        "Ann",
        "valid",
        ["aux"],
        str(BOB.peer_id),
    )
    assert invoke(["token", "revoke", str(first["id"])[:6], "--data-dir", str(organizer)]) == 0
    assert f"revoked {first['id']}: Ann ({ANN.peer_id}), run tiny" in capsys.readouterr().out
    assert [entry["state"] for entry in listed(organizer, capsys)] == ["revoked", "valid"]
    invoke(["token", "list", "--data-dir", str(organizer)])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [[first["id"], "revoked"], [second["id"], "valid"]]


def test_each_revocation_makes_a_newer_list_and_repeating_one_does_not(
    organizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        issue(organizer, capsys)
    ids = [str(entry["id"]) for entry in listed(organizer, capsys)]
    key = home.load_identity(organizer)
    file = organizer / membership.BOOK_DIR / membership.REVOKED_FILE
    numbers = []
    for wanted in (ids[0], ids[0], ids[2]):
        assert invoke(["token", "revoke", wanted, "--data-dir", str(organizer)]) == 0
        data = from_text(Revoked, file.read_text())
        assert signed_by(key.peer_id, Revoked, data)
        numbers.append(unseal(Revoked, data).number)
    assert numbers == [1, 1, 2]
    assert unseal(Revoked, data).ids == sorted(bytes.fromhex(one) for one in (ids[0], ids[2]))


def test_expired_tokens_leave_the_list_so_that_it_stays_short(organizer: Path) -> None:
    book = membership.TokenBook(organizer, ANN)
    grant = membership.TokenGrant(run="tiny", peer=str(BOB.peer_id), name="", roles=["stage"], days=1)
    for start in (0.0, 10.0 * DAY_S):
        book.issue(grant, start)
        book.revoke(book.entries()[-1].id, start)
    revoked = unseal(Revoked, from_text(Revoked, (book.folder / membership.REVOKED_FILE).read_text()))
    assert (revoked.number, [one.hex() for one in revoked.ids]) == (2, [book.entries()[1].id])
    assert [entry.state(11.5 * DAY_S) for entry in book.entries()] == ["revoked", "revoked"]


def test_a_damaged_book_is_named_and_not_written_on(organizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    issue(organizer, capsys)
    file = organizer / membership.BOOK_DIR / membership.ISSUED_FILE
    damaged = file.read_text()[:-20] + "\n"
    file.write_text(damaged)
    for argv in (["list"], ["revoke", "12"], ["issue", "--run", "tiny", "--peer", str(ANN.peer_id)]):
        assert invoke(["token", *argv, "--data-dir", str(organizer)]) == 2
        assert f"{file}, line 1: damaged" in capsys.readouterr().err
    assert file.read_text() == damaged


# --- a peer's own token --------------------------------------------------------------------------------------------


def peer_of(organizer: Path, place: Path) -> tuple[RunFile, Path]:
    access = AccessSection(allow="tokens", organizer=str(home.load_identity(organizer).peer_id))
    place.mkdir(exist_ok=True)
    return RunFile(run="tiny", access=access), place


def test_a_peer_takes_its_token_from_its_data_directory(
    organizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = issue(organizer, capsys, "--roles", "stage, aux")
    run, place = peer_of(organizer, tmp_path / "peer")
    (place / membership.TOKEN_FILE).write_text(f"  {text[:50]}\n{text[50:]}\n")
    papers = membership.own_papers(run, ["stage"], place, ANN.peer_id, time.time())
    assert trio.run(papers.token) == from_text(Token, text)
    assert trio.run(papers.revoked) == []
    with pytest.raises(ConfigError, match="is not for the role trainer; ask the organizer"):
        membership.own_papers(run, ["stage", "trainer"], place, ANN.peer_id, time.time())
    with pytest.raises(ConfigError, match="the token shown expired 10 days ago; ask the organizer"):
        membership.own_papers(run, ["stage"], place, ANN.peer_id, time.time() + 40 * DAY_S)
    with pytest.raises(ConfigError, match="the token shown is that of peer"):
        membership.own_papers(run, ["stage"], place, BOB.peer_id, time.time())


def test_the_newest_list_outlives_the_process_and_counts_at_the_next_start(
    organizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = issue(organizer, capsys)
    run, place = peer_of(organizer, tmp_path / "peer")
    (place / membership.TOKEN_FILE).write_text(text)
    papers = membership.own_papers(run, ["stage"], place, ANN.peer_id, time.time())
    book = membership.TokenBook(organizer, home.load_identity(organizer))
    book.revoke(book.entries()[0].id, time.time())
    data = from_text(Revoked, (book.folder / membership.REVOKED_FILE).read_text())
    trio.run(papers.keep, data)
    assert trio.run(papers.revoked) == [data]
    with pytest.raises(ConfigError, match="was revoked by the organizer"):
        membership.own_papers(run, ["stage"], place, ANN.peer_id, time.time())


def test_a_machine_with_the_organizers_identity_is_told_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run, place = peer_of(home.make_private_dir(tmp_path / "peerd" / "organizer"), tmp_path / "peer")
    typed = f"so type: peerd token issue --run tiny --peer {ANN.peer_id} --roles stage > {place}/access.token"
    with pytest.raises(ConfigError, match=typed):
        membership.own_papers(run, ["stage"], place, ANN.peer_id, time.time())


def test_the_organizers_own_peer_needs_no_token_and_brings_its_list(
    organizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issue(organizer, capsys)
    (entry,) = listed(organizer, capsys)
    invoke(["token", "revoke", str(entry["id"]), "--data-dir", str(organizer)])
    run, _ = peer_of(organizer, organizer)
    key = home.load_identity(organizer)
    papers = membership.own_papers(run, ["backbone"], organizer, key.peer_id, time.time())
    assert trio.run(papers.token) == b""
    roll = RunMembers("tiny", key.peer_id, 1)
    assert [roll.learn_revoked(data) for data in trio.run(papers.revoked)] == [True]


def test_a_list_given_by_file_is_read_and_its_absence_named(
    organizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = issue(organizer, capsys)
    run, place = peer_of(organizer, tmp_path / "peer")
    (place / membership.TOKEN_FILE).write_text(text)
    access = AccessSection(allow="tokens", organizer=run.access.organizer, revoked=str(tmp_path / "list.txt"))
    with pytest.raises(ConfigError, match=r"the list of revoked tokens .*list\.txt can't be read"):
        membership.own_papers(RunFile(run="tiny", access=access), ["stage"], place, ANN.peer_id, time.time())
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"list\.txt has no valid list of revoked tokens"):
        membership.own_papers(RunFile(run="tiny", access=access), ["stage"], place, ANN.peer_id, time.time())
