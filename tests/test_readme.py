"""Facts in the READMEs hold: keys, commands, roles, protocols, make targets, and the example of a role."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from peerd.daemon import registry
from peerd.run.runfile import ExpertsSection, RunFile

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
LINES = 200
ROOM_LINES = 40


def keys(cls: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(cls):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}"


def documented_keys() -> set[str]:
    """`a.b`, `c` in a row of the configuration table names a.b and a.c."""
    page = (ROOT / "configs/README.md").read_text("utf-8")
    table = page.partition("| key | default | meaning |")[2].partition("\n\n")[0]
    found: set[str] = set()
    for row in table.splitlines()[2:]:
        names = re.findall(r"`([a-z0-9_.]+)`", row.split("|")[1])
        section = names[0].rpartition(".")[0]
        found |= {names[0]} | {f"{section}.{name}" if section else name for name in names[1:]}
    return found


def pages() -> list[Path]:
    tops = ("peerd", "roles", "configs", "scripts", "tests")
    return [ROOT / "README.md", *sorted(page for top in tops for page in (ROOT / top).rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page} names {target}"


def linked(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    return {(page.parent / target).resolve() for target in targets if target.endswith(".md")}


def test_the_first_page_is_short_and_leads_to_all_others() -> None:
    assert len(README.splitlines()) <= LINES
    reached, left = set[Path](), {ROOT / "README.md"}
    while left:
        reached.add(page := left.pop())
        left |= linked(page) - reached
    assert set(pages()) - reached == set()


def rooms() -> list[Path]:
    return sorted(folder for folder in (ROOT / "peerd").iterdir() if (folder / "__init__.py").exists())


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_each_room_has_a_short_page_that_names_each_of_its_files(room: Path) -> None:
    pages_of_room = {page.parent: page.read_text("utf-8") for page in room.rglob("README.md")}
    assert room in pages_of_room
    for folder, text in pages_of_room.items():
        assert len(text.splitlines()) <= ROOM_LINES, folder
    for file in sorted(room.rglob("*.py")):
        text = pages_of_room[room] + pages_of_room.get(file.parent, "")
        assert file.name == "__init__.py" or f"`{file.stem}`" in text, f"{file.relative_to(ROOT)} is not named"


def test_the_configuration_table_lists_every_key_and_no_other() -> None:
    assert documented_keys() == set(keys(RunFile))


def test_the_table_of_experts_lists_every_key_of_their_section_and_no_other() -> None:
    section = (ROOT / "configs/README.md").read_text("utf-8").partition("\n## Experts\n")[2]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    found = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert found == set(ExpertsSection.__struct_fields__)


def test_every_command_role_and_make_target_is_described() -> None:
    from tests.choice.imports import entry_points
    from tests.test_house import FLAGS

    for command in filter(None, FLAGS):
        assert f"`peerd {command}" in README
    for name, target in entry_points().items():
        assert f"| `{name}` | `{target}` |" in README
    targets = re.findall(r"^([a-z0-9]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make ([a-z0-9]+)", README):
        assert target in targets


def test_every_protocol_of_ours_is_in_the_table() -> None:
    files = [path for folder in ("peerd", "roles") for path in (ROOT / folder).rglob("*.py")]
    sources = "".join(path.read_text("utf-8") for path in files)
    methods = set(re.findall(r'"([a-z]+/\d+)/[a-z_]+"', sources)) | {"dht/4", "rail/1"}
    assert '"/peerd/rail/1"' in sources
    page = (ROOT / "peerd/rpc/protocols.md").read_text("utf-8")
    assert set(re.findall(r"\| `/peerd/([a-z]+/\d+)`", page)) == methods


@pytest.mark.parametrize(("number", "target", "needs_run"), [(0, "hello:Hello", False), (1, "observer:Observer", True)])
def test_the_example_roles_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, target: str, needs_run: bool
) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "roles/README.md").read_text("utf-8"), re.DOTALL)[number]
    name = target.partition(":")[0]
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        cls = registry.load(target)
        assert (cls.name, cls.needs_run) == (name, needs_run)
    finally:
        sys.modules.pop(name, None)
