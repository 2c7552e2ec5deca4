"""Data directories, locks, identities and the list of running daemons."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from peerd.core.errors import ConfigError
from peerd.run import home


def test_an_identity_is_made_once_and_kept_private(tmp_path: Path) -> None:
    first = home.load_identity(tmp_path)
    assert home.load_identity(tmp_path).peer_id == first.peer_id
    assert stat.S_IMODE((tmp_path / home.IDENTITY_FILE).stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [home.IDENTITY_FILE]


def test_the_identity_file_has_libp2ps_private_key_form(tmp_path: Path) -> None:
    key = home.load_identity(tmp_path)
    raw = (tmp_path / home.IDENTITY_FILE).read_bytes()
    assert raw == b"\x08\x01\x12\x40" + key.seed + key.peer_id.public_key


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_an_identity_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    home.load_identity(tmp_path)
    (tmp_path / home.IDENTITY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}\); run: chmod 600"):
        home.load_identity(tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"\x08\x02" + raw[2:]])
def test_a_damaged_identity_is_refused_and_left_as_it_is(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    home.load_identity(tmp_path)
    file = tmp_path / home.IDENTITY_FILE
    file.write_bytes(damaged := damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"is damaged: it is not an Ed25519 key.*restore it from a backup"):
        home.load_identity(tmp_path)
    assert file.read_bytes() == damaged


def test_one_flipped_bit_in_an_identity_is_noticed(tmp_path: Path) -> None:
    home.load_identity(tmp_path)
    file = tmp_path / home.IDENTITY_FILE
    raw = bytearray(file.read_bytes())
    raw[20] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="halves do not match"):
        home.load_identity(tmp_path)


def test_a_data_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; the data directory must be a directory"):
        home.make_private_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="can't be used"):
        home.make_private_dir(tmp_path / "file" / "below")


@pytest.mark.slow
def test_a_second_daemon_cannot_take_the_same_data_directory(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from peerd.run import home\nwith home.locked(Path({str(tmp_path)!r})): pass"
    with home.locked(tmp_path):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"is in use by process {os.getpid()}" in ended.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    home.write_atomically(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{re.escape(str(file))}'"):
        home.write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_default_data_directories_are_one_per_run_and_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert home.default_data_dir("tiny", ["trainer", "stage"]).name == "tiny-stage-trainer"
    assert home.default_data_dir(None, ["backbone"]).name == "backbone"
    names = {home.default_data_dir(run, ["stage"]).name for run in ("a/b", "a_b", "../../b", "ä", "..")}
    assert len(names) == 5
    assert all("/" not in name and not name.startswith(".") for name in names)


def made(place: Path, *roles: str) -> Path:
    """A data directory in which a peer of these roles has been."""
    for role in roles:
        (place / role).mkdir(parents=True)
    home.load_identity(home.make_private_dir(place))
    return place


def test_a_peer_of_a_run_is_the_same_whatever_its_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    first = made(home.run_data_dir("tiny", ["stage"]), "stage")
    assert first == tmp_path / "peerd" / "tiny"
    for roles in ([], ["trainer"], ["stage", "trainer"], ["backbone"]):
        assert home.run_data_dir("tiny", roles) == first
    assert home.run_data_dir("organizer", ["stage"]).name == "organizer+run", "not the organizer's own identity"


def test_beside_a_process_of_other_roles_a_peer_has_the_next_directory_and_finds_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    first = made(home.run_data_dir("tiny", ["stage"]), "stage")
    with home.locked(first), home.noted(home.RunningDaemon(7, str(first), "s", "tiny", ["stage"])):
        second = made(home.run_data_dir("tiny", ["trainer"]), "trainer")
        assert second.name == "tiny+2"
        assert home.run_data_dir("tiny", ["stage"]) == first, "which says that it is in use"
    assert home.run_data_dir("tiny", ["trainer"]) == second, "whatever runs today"
    assert home.run_data_dir("tiny", ["stage"]) == first
    assert home.run_identities("tiny") == [first, second]


def test_directories_of_earlier_versions_go_on_being_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    old = made(home.default_data_dir("tiny", ["stage"]), "stage")
    made(home.default_data_dir("tiny-v2", ["stage"]), "stage")
    assert home.run_data_dir("tiny", ["stage"]) == old
    assert home.run_data_dir("tiny", ["trainer"]) == old
    assert home.run_identities("tiny") == [old]


def test_the_socket_moves_to_a_short_path_when_the_data_directory_is_deep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("r" * 100)))
    assert home.socket_path(Path("/tmp/short")) == Path("/tmp/short/control.sock")
    deep = home.socket_path(tmp_path / ("d" * 120))
    assert len(os.fsencode(deep)) <= home.SOCKET_PATH_BYTES
    assert home.socket_path(tmp_path / ("e" * 120)) != deep


def test_a_runtime_directory_that_others_can_enter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert home.runtime_dir() == tmp_path / "peerd"
    (tmp_path / "peerd").chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        home.runtime_dir()


def test_running_daemons_are_listed_while_they_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    note = home.RunningDaemon(7, str(tmp_path / "d"), "s", "tiny", ["stage"])
    with home.noted(note):
        (tmp_path / "peerd" / "broken.json").write_text("{")
        assert home.notes() == [note]
    assert home.notes() == []
