"""`peerd` started where files lie that have the names of modules it imports, or where torch is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.socket]
TRAP = "raise SystemExit('imported ' + __file__)\n"
NEEDS_A_FILE = "peerd: role stage needs a run file: add --model FILE\n"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which packages and modules of common names lie, and which end whatever imports them."""
    for package in ("roles", "trio", "numpy"):
        (tmp_path / package / "tasks").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(TRAP)
    for module in ("platform", "torch", "secrets"):
        (tmp_path / f"{module}.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=200)


def test_python_m_peerd_imports_nothing_from_where_it_is_started(odd: Path) -> None:
    ended = run("-m", "peerd", "join", "--role", "stage")
    assert (ended.returncode, ended.stderr) == (2, NEEDS_A_FILE)


@pytest.mark.thorough
def test_a_folder_roles_without_a_package_in_it_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "roles" / "webserver" / "tasks").mkdir(parents=True)  # as Ansible has it
    (tmp_path / "own.py").write_text(
        "class Own:\n    name = 'own'\n    needs_run = True\n    run = leave = status = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    for roles in (("stage",), ("own:Own", "stage")):
        ended = run("-m", "peerd", "join", *(word for role in roles for word in ("--role", role)))
        assert (ended.returncode, "needs a run file: add --model FILE" in ended.stderr) == (2, True), ended.stderr


def test_a_local_file_named_like_an_installed_module_is_named(odd: Path) -> None:
    ended = run("-m", "peerd", "join", "--role", "platform:Role")
    assert ended.returncode == 2
    assert f"so {odd}/platform.py is never read; give the file another name" in ended.stderr


def test_a_role_of_ones_own_is_found_beside_such_files_and_its_mistakes_have_a_line(odd: Path) -> None:
    (odd / "mine.py").write_text("import trio\nimport platform\n\n1 / 0\n")
    ended = run("-m", "peerd", "join", "--role", "mine:Role")
    says = f"role 'mine:Role': module mine can't be loaded: ZeroDivisionError: division by zero ({odd}/mine.py, line 4)"
    assert (ended.returncode, ended.stderr) == (2, f"peerd: {says}\n")


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["join", "--role", "stage"], "role 'stage': it needs"),
        (["join", "--role", "backbone", "--device", "cuda"], "this needs"),
    ],
)
def test_where_torch_is_missing_the_message_says_what_to_type(argv: list[str], what: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom peerd.cli.cli import invoke\nsys.exit(invoke({argv!r}))"
    data = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=data)
    told = f"peerd: {what} the package torch, which is not installed; type: pip install torch\n"
    assert (ended.returncode, ended.stderr) == (2, told)
