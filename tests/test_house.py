"""The rules of the house, enforced: who may import whom, how large things may grow, what may never be called, which
flags the command line has, and what the wheel holds. A rule is changed here on purpose, or not at all.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.choice.imports import ROOT, entry_points, files_imported, imported, name_of, parsed, sources
from tests.kit.house_tables import DOES_IO, ROLE_IMPORTS, ROOMS, WALL_CLOCK, WITH_TORCH

FILE_LINES = 500
FUNCTION_LINES = 60
EVENT_NAME = re.compile(r"[a-z]+\.[a-z]+(_[a-z]+)*")  # subject.verb

FILES_IN_A_FOLDER = 15
INPUT_OUTPUT = {
    *("trio", "torch", "socket", "time", "os", "logging", "asyncio", "threading", "select", "secrets", "subprocess"),
}
ANYWAY = {  # files that import these modules though their room may not
    Path("peerd/wire/clock.py"): {"time"},  # the one Clock that reads the time
    Path("peerd/core/decoders.py"): {"threading"},  # a lock around its cache
}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "cPickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# Where any exception is caught, how many times, and what ends by it.
SUPERVISORS = {
    Path("peerd/wire/faults.py"): 1,  # one link, stream, call or connection: the caller of `contain`
    Path("peerd/wire/link/link.py"): 1,  # one stream, for what runs in the link's own task: no task of its own to end
    Path("peerd/rpc/inbound.py"): 1,  # one stream's messages in the link's own task: its reader gets the error
    Path("peerd/daemon/daemon.py"): 1,  # one role
}

VALUES_ONLY = {"messages", "protobuf"}  # folders whose modules hold many small values, and no main class
# Phrases that hide who does what to whom: see "How we write" in CONTRIBUTING.
NOT_PLAIN = (
    *("See the module's header", "; None:", " whoever ", "Whoever ", "what there is", "of its own accord"),
    *("it is none", " so many ", "as much as"),
)

Rule = Callable[[Path], Iterator[str]]
RULES: list[Any] = []
FLAGS = {
    "": {"--version", "--help"},
    "backbone": {
        *("--model", "--config", "--bootstrap", "--listen", "--announce"),
        *("--data-dir", "--seed", "--log-level", "--help"),
    },
    "join": {
        *("--role", "--model", "--config", "--bootstrap", "--listen", "--announce", "--data-dir", "--device", "--seed"),
        *("--log-level", "--help", "--alone"),
        *("link", "--yes", "--data", "--token", "--allow-code", "--tokenizer", "--disk-gb", "--trust"),
        *("--upload-mbit", "--download-mbit", "--threads", "--nice", "--memory-gb", "--hours"),
    },
    "status": {"--swarm", "--watch", "--json", "--metrics", "--data-dir", "--help"},
    "demo": {"--kind", "--steps", "--data", "--calm", "--json", "--data-dir", "--help"},
    "identity": {"--model", "--config", "--run", "--data-dir", "--json", "--help"},
    "export": {"run_dir", "--backbone", "--out", "--run", "--step", "--model", "--config", "--json", "--help"},
    "generate": {
        *("--from", "prompt", "--tokens", "--temperature", "--top-k", "--seed", "--device", "--model", "--config"),
        *("--json", "--help"),
    },
    "evaluate": {"--from", "file", "--device", "--model", "--config", "--json", "--help"},
    "plan": {
        *("links", "--model", "--config", "--from", "--seconds", "--seed", "--cost", "--horizon", "--out", "--speed"),
        *("--json", "--help"),
    },
    "doctor": {
        *("--model", "--config", "--role", "--bootstrap", "--listen", "--announce"),
        *("--data-dir", "--device", "--json", "--help"),
    },
    "token": {"--help"},
    "token issue": {"--run", "--peer", "--roles", "--name", "--days", "--data-dir", "--help"},
    "token sign": {"file", "--data-dir", "--help"},
    "token list": {"--data-dir", "--json", "--help"},
    "token revoke": {"token", "--data-dir", "--help"},
}


def room_of(file: Path) -> str:
    """Such as `wire/link`; files of peerd's top folder are rooms of their own."""
    path = file.relative_to(ROOT / "peerd")
    return path.parent.as_posix() if len(path.parts) > 1 else path.stem


def in_rooms(*folders: str) -> list[Path]:
    """Modules of these folders, without what only says what a folder is for."""
    return [file for file in sources(*folders) if file.name != "__init__.py"]


def under(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def rule(*folders: str) -> Callable[[Rule], Rule]:
    """A rule for each file of these folders: the function yields what is wrong with one file."""

    def add(look: Rule) -> Rule:
        RULES.append(pytest.param(folders, look, id=look.__name__))
        return look

    return add


def rooms_imported(file: Path) -> set[str]:
    others = {room_of(other) for other in files_imported(file) if other.is_relative_to(ROOT / "peerd")}
    return others - {room_of(file), "__init__"}


@rule("peerd")
def each_room_imports_only_what_the_table_says(file: Path) -> Iterator[str]:
    if file.name != "__init__.py":
        for other in rooms_imported(file) - {"core", *ROOMS[room_of(file)].split()}:
            yield f"1 imports {other}; {room_of(file)} may not"
    for line, module in imported(file):
        if under(module, {"roles"}):
            yield f"{line} imports {module}; peerd never imports roles"


def test_the_table_of_rooms_has_no_circle() -> None:
    below = {"core"}
    for room, others in ROOMS.items():
        assert set(others.split()) <= below, f"{room} stands before a room that it imports"
        below.add(room)


def test_the_table_of_rooms_allows_nothing_that_is_not_used() -> None:
    used = defaultdict(set)
    for file in in_rooms("peerd"):
        used[room_of(file)] |= rooms_imported(file) - {"core"}
    assert {room: set(others.split()) for room, others in ROOMS.items()} == dict(used)


def does_io(file: Path) -> bool:
    named = DOES_IO.get(room_of(file), "").split()
    return "*" in named or file.stem in named


@rule("peerd")
def a_file_decides_or_does_io(file: Path) -> Iterator[str]:
    if does_io(file) or file.name == "__init__.py":
        return
    for line, module in imported(file):
        if under(module, INPUT_OUTPUT - ANYWAY.get(file.relative_to(ROOT), set())):
            yield f"{line} imports {module}; only files that DOES_IO names may"
    for other in files_imported(file):
        if other.is_relative_to(ROOT / "peerd") and other.name != "__init__.py" and does_io(other):
            yield f"1 imports {name_of(other)}, which does I/O"


@rule("peerd")
def torch_and_the_wall_clock_stay_in_their_rooms(file: Path) -> Iterator[str]:
    room = room_of(file)
    kept = {"torch": WITH_TORCH.split(), "time": WALL_CLOCK.split()}
    for line, module in imported(file):
        rooms = kept.get(module.partition(".")[0])
        if rooms is not None and room not in rooms and module not in ANYWAY.get(file.relative_to(ROOT), set()):
            yield f"{line} imports {module}; {room} may not"


def in_a_circle() -> list[str]:
    """Files of peerd that import each other in a circle, or stand above one."""
    left = {file: files_imported(file) for file in sources("peerd")}
    # peerd.AveragingOptimizer and its like are imported when they are asked for, which nothing inside does.
    left[ROOT / "peerd/__init__.py"] -= {
        ROOT / "peerd/library/averaging_optimizer.py",
        ROOT / "peerd/library/expert_peer.py",
    }
    while free := [file for file, needs in left.items() if not needs & left.keys()]:
        for file in free:
            del left[file]
    return sorted(map(name_of, left))


def test_no_files_import_each_other_in_a_circle() -> None:
    assert in_a_circle() == []


def test_the_house_at_a_glance() -> None:
    """Run with `-s` to read it."""
    (largest, files), *_ = source_folders().most_common(1)
    print(f"\nrooms {len(ROOMS)}, from the bottom: {', '.join(ROOMS)}")
    print(f"files in import circles: {', '.join(in_a_circle()) or 'none'}")
    names = Counter(name for file in sources("peerd") for name in public_classes(file))
    print(f"class names that stand for two things: {', '.join(n for n, c in names.items() if c > 1) or 'none'}")
    print(f"largest folder: {name_of(largest)}, {files} files")


def source_folders() -> Counter[Path]:
    """Number of source files in each folder, in whatever language they are."""
    found = [path for folder in ("peerd", "roles") for path in (ROOT / folder).rglob("*")]
    return Counter(path.parent for path in found if path.suffix in {".py", ".cpp", ".cu", ".h"})


def test_no_folder_is_crowded() -> None:
    folders = source_folders()
    assert {name_of(folder): count for folder, count in folders.items() if count > FILES_IN_A_FOLDER} == {}


def test_a_module_name_is_unique_in_its_top_room() -> None:
    names = Counter((room_of(file).partition("/")[0], file.stem) for file in in_rooms("peerd"))
    assert [name for name, count in names.items() if count > 1] == []


def public_classes(file: Path) -> list[str]:
    return [n.name for n in parsed(file).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def test_a_public_class_name_stands_for_one_thing() -> None:
    found = defaultdict(list)
    for file in sources("peerd"):
        for name in public_classes(file):
            found[name].append(name_of(file))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@rule("peerd", "roles")
def the_main_class_shares_a_word_with_its_module(file: Path) -> Iterator[str]:
    """The main class is the longest public one, if it has a quarter of the module's lines."""
    classes = [node for node in parsed(file).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    if file.parent.name in VALUES_ONLY or not classes:
        return
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes}
    main = max(sizes, key=sizes.__getitem__)
    lines = len(file.read_text(encoding="utf-8").splitlines())
    if 4 * sizes[main] >= lines and not any(
        8 * size >= lines and shares_word(name, file) for name, size in sizes.items()
    ):
        yield f"has {main}, which shares no word with the module's name"


def shares_word(name: str, file: Path) -> bool:
    return any(re.sub("(ing|er|e|s)$", "", word) in name.lower() for word in file.stem.split("_") if len(word) > 2)


@rule("peerd", "roles")
def its_words_are_plain(file: Path) -> Iterator[str]:
    text = " ".join(file.read_text(encoding="utf-8").split())
    for phrase in NOT_PLAIN:
        if phrase in text:
            yield f'has "{phrase}"; write what it is in the words of the field'


@rule("roles")
def a_role_sees_only_its_contract_compute_and_core(file: Path) -> Iterator[str]:
    allowed = {f"peerd.{name}" for name in ROLE_IMPORTS.split()}
    others = {target.partition(":")[0] for target in entry_points().values()}
    for line, module in imported(file):
        if module.startswith("peerd.") and not under(module, allowed):
            yield f"{line} imports {module}; a role may not"
        if module in others:
            yield f"{line} imports {module}; roles never import each other"


@rule("peerd")
def what_decides_draws_no_randomness_of_its_own(file: Path) -> Iterator[str]:
    """`random.Random` is a type there: the stream itself comes from outside."""
    if does_io(file):
        return
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = f"{node.value.id}.{node.attr}"
            if used == "os.urandom" or (node.value.id == "random" and node.attr != "Random"):
                yield f"{node.lineno} uses {used}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "random.Random":
            yield f"{node.lineno} seeds its own stream"
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            yield from (f"{node.lineno} imports random.{a.name}" for a in node.names if a.name != "Random")


@rule("peerd", "roles", "scripts", "tests")
def files_and_functions_stay_small(file: Path) -> Iterator[str]:
    lines = len(file.read_text("utf-8").splitlines())
    if lines > FILE_LINES:
        yield f"1 has {lines} lines; cut it in two"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LINES:
                yield f"{node.lineno} {node.name} has {size} lines"


@rule("peerd", "roles", "scripts", "tests")
def every_file_says_what_it_is_for(file: Path) -> Iterator[str]:
    if len(ast.get_docstring(parsed(file)) or "") <= 20:
        yield "1 begins without saying what it is for"


def event_names(file: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each event that a file logs under a literal name, or under one of two."""
    for node in ast.walk(parsed(file)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "event"
            and node.args
        ):
            name = node.args[0]
            for choice in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
                if isinstance(choice, ast.Constant):
                    yield node.lineno, str(choice.value)


@rule("peerd", "roles")
def events_are_named_by_subject_and_verb(file: Path) -> Iterator[str]:
    for line, name in event_names(file):
        if not EVENT_NAME.fullmatch(name):
            yield f"{line} logs {name!r}; name it subject.verb"


@rule("peerd", "roles")
def nothing_is_left_for_later(file: Path) -> Iterator[str]:
    for line, text in enumerate(file.read_text("utf-8").splitlines(), 1):
        if found := re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text):
            yield f"{line} says {found[0]}"


def test_every_bound_has_its_reason_and_is_kept_somewhere() -> None:
    """A bound that nothing refers to bounds nothing."""
    text = (ROOT / "peerd/core/limits.py").read_text("utf-8")
    bounds = dict(re.findall(r"^([A-Z_0-9]+): Final = .*?(#.*)?$", text, re.MULTILINE))
    files = [file for file in sources("peerd", "roles") if file.name != "limits.py"]
    used = {name for file in files for name in re.findall(r"\b[A-Z_0-9]+\b", file.read_text("utf-8"))}
    assert [name for name, reason in bounds.items() if not reason] == []
    assert [name for name in bounds if name not in used] == []


def broad_excepts(file: Path) -> list[int]:
    """Lines that catch everything: bare, Exception or BaseException, in a tuple or by suppress()."""
    broad = {"Exception", "BaseException"}
    lines = []
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in broad for kind in caught):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            lines += [node.lineno for kind in node.args if ast.unparse(kind) in broad]
    return lines


def test_only_the_supervisors_catch_everything() -> None:
    found = {file.relative_to(ROOT): broad_excepts(file) for file in sources("peerd", "roles")}
    wrong = {str(file): lines for file, lines in found.items() if len(lines) != SUPERVISORS.get(file, 0)}
    assert not wrong, f"broad excepts (a supervisor has exactly so many, nobody else any): {wrong}"


@rule("peerd", "roles")
def nothing_is_unpickled_or_evaluated(file: Path) -> Iterator[str]:
    for line, module in imported(file):
        if under(module, UNSAFE_MODULES):
            yield f"{line} imports {module}"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call):
            if (called := ast.unparse(node.func)) in UNSAFE_CALLS | {"torch.load", "torch.save", "yaml.load"}:
                yield f"{node.lineno} calls {called}"
            if any(word.arg == "allow_pickle" for word in node.keywords):
                yield f"{node.lineno} allows pickle"


@pytest.mark.parametrize(("folders", "look"), RULES)
def test_every_file_keeps_the_rule(folders: tuple[str, ...], look: Rule) -> None:
    files = sources(*folders)
    assert files
    assert [f"{name_of(file)}:{wrong}" for file in files for wrong in look(file)] == []


def test_the_command_line_does_not_grow() -> None:
    import typer

    from peerd.cli.cli import app

    root = typer.main.get_command(app)
    commands = {"": root, **getattr(root, "commands", {})}
    for name, group in list(commands.items()):
        if name:
            commands |= {f"{name} {under}": command for under, command in getattr(group, "commands", {}).items()}
    found = {
        name: {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for name, command in commands.items()
    }
    assert found == FLAGS


def test_every_entry_point_leads_to_a_class() -> None:
    told = entry_points()
    assert set(told) >= {"backbone", "stage", "trainer"}
    for name, target in told.items():
        module, _, attribute = target.partition(":")
        file = ROOT / (module.replace(".", "/") + ".py")
        classes = {node.name for node in parsed(file).body if isinstance(node, ast.ClassDef)}
        assert attribute in classes, f"entry point {name}: {file} has no class {attribute}"


LIGHT = {
    "status": "invoke(['status', '--data-dir', '/nowhere'])",
    "identity": "invoke(['identity', '--data-dir', FOLDER])",
    "doctor": "invoke(['doctor', '--help'])",
    "plan": "invoke(['plan', '--help'])",
    "export": "invoke(['export', '--help']); invoke(['generate', '--help']); invoke(['evaluate', '--help'])",
    "backbone": "import peerd.daemon.daemon; from peerd.daemon import registry; registry.load('backbone')",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(LIGHT))
def test_light_commands_never_import_torch(command: str, tmp_path: Path) -> None:
    code = (
        f"import sys; from peerd.cli.cli import invoke; FOLDER = {str(tmp_path)!r}\n{LIGHT[command]}\n"
        "heavy = {'torch', 'numpy', 'scipy'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_holds_all_of_peerd_and_roles_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("peerd", "roles", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("peerd-*.whl"))) as wheel:
        held = set(wheel.namelist())
        points = wheel.read(next(name for name in held if name.endswith("entry_points.txt"))).decode()
    expected = {name_of(file) for file in sources("peerd", "roles")} | {"peerd/py.typed"}
    kernels = ROOT / "peerd/codec/kernels/source"
    expected |= {name_of(file) for ending in ("cpp", "cu", "h") for file in kernels.glob(f"*.{ending}")}
    compiled = {name for name in held if re.fullmatch(r"peerd/codec/kernels/_blockwise\.[^/]+", name)}
    assert len(compiled) == (1 if compiler() else 0)
    expected |= compiled
    assert expected <= held
    others = {name for name in held - expected if not re.match(r"peerd-[^/]+\.(dist-info|data)/", name)}
    assert not others
    configs = {name.rpartition("/")[2] for name in held if "/share/peerd/configs/" in name}
    assert configs == {file.name for file in (ROOT / "configs").glob("*.yaml")}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "stage = roles.stage:StageRole" in points
