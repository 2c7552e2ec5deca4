"""Roles are found by name or as module:Class, and never from a package that is not theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from peerd.core.errors import ConfigError
from peerd.daemon import registry

ROLE = """
class Quiet:
    name = "quiet"
    needs_run = False
    def __init__(self, ctx): pass
    async def run(self, *, task_status): task_status.started()
    async def leave(self): pass
    def status(self): return {}
class Half:
    name = "half"
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the user stands in, with a role of their own."""
    (tmp_path / "my_role_of_test_registry.py").write_text(ROLE)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_role_of_test_registry", None)


def installed(folder: Path, *, record: str | None, editable: bool = False) -> EntryPoint:
    """The entry point of a distribution whose metadata lies in `folder`."""
    meta = folder / "roles_of_test-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Name: roles-of-test\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[peerd.roles]\nquiet = my_role_of_test_registry:Quiet\n")
    if record is not None:
        (meta / "RECORD").write_text(record)
    if editable:
        (meta / "direct_url.json").write_text(f'{{"url": "{folder.as_uri()}", "dir_info": {{"editable": true}}}}')
    return next(p for p in entry_points(group="peerd.roles") if p.name == "quiet")


def test_a_role_of_the_users_own_is_given_as_module_and_class(folder: Path) -> None:
    assert registry.load("my_role_of_test_registry:Quiet").name == "quiet"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stagee", "role 'stagee' is unknown; did you mean stage?"),
        ("zzzzzz", "role 'zzzzzz' is unknown; allowed: .*backbone.*module:Class"),
        ("no_such_module_here:Role", "there is no module no_such_module_here"),
        ("my_role_of_test_registry:Nobody", "has no class 'Nobody'"),
        ("my_role_of_test_registry:number", "has no class 'number'"),
        ("my_role_of_test_registry:Half", "Half is not a role; it lacks needs_run, run, leave, status"),
        ("broken_of_test_registry:X", "module broken_of_test_registry can't be loaded"),
        ("needy_of_test_registry:X", "needs the package not_installed_anywhere, which is not installed"),
        (":X", "can't be loaded|no module"),
    ],
)
def test_a_role_that_cannot_be_had_says_why(folder: Path, text: str, message: str) -> None:
    (folder / "broken_of_test_registry.py").write_text("def :")
    (folder / "needy_of_test_registry.py").write_text("import not_installed_anywhere")
    with pytest.raises(ConfigError, match=message):
        registry.load(text)


def test_an_installed_role_whose_file_is_recorded_is_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    registry.refuse_foreign(installed(folder, record="my_role_of_test_registry.py,,\n"))
    assert registry.load("quiet").name == "quiet"


def test_an_editable_install_owns_what_lies_in_its_source_tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    registry.refuse_foreign(installed(folder, record="", editable=True))
    assert registry.load("quiet").name == "quiet"


def test_a_role_whose_module_another_package_provides_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    point = installed(folder, record="something_else.py,,\n")
    with pytest.raises(ConfigError, match="another package provides the module my_role_of_test_registry"):
        registry.refuse_foreign(point)
    assert "my_role_of_test_registry" not in sys.modules, "it was run before it was checked"


def test_a_role_whose_module_is_gone_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    point = installed(folder, record="my_role_of_test_registry.py,,\n")
    (folder / "my_role_of_test_registry.py").unlink()
    with pytest.raises(ConfigError, match="its module my_role_of_test_registry is missing; install roles-of-test"):
        registry.refuse_foreign(point)
