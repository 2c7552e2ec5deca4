"""Generates the table of all RPC methods in peerd/SECURITY.md from the methods' declarations.

python -m scripts.method_table           rewrites the table
python -m scripts.method_table --check   exits with 1 if the page's table is out of date
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Final

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peerd.access.members import CALLERS, OPEN
from peerd.rpc.methods.declaration import Declaration, Needs

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "peerd" / "SECURITY.md"
BEGIN: Final = "<!-- methods: written by scripts/method_table.py -->"
END: Final = "<!-- end of methods -->"
HEAD: Final = (
    "| method | a caller shows | with tokens | rows | body | frames | memory | device "
    "| calls: all | peer | address | network | kept for members | at most |"
)


def modules() -> list[str]:
    """Names of the modules that declare methods."""
    files = sorted((ROOT / "peerd").rglob("*.py"))
    declare = re.compile(r"^DECLARED\b", re.MULTILINE)
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if declare.search(file.read_text("utf-8"))
    ]


def declared() -> dict[str, Declaration]:
    """The declarations of all methods, by name."""
    found: dict[str, Declaration] = {}
    for module in modules():
        for method, declaration in importlib.import_module(module).DECLARED.items():
            if method in found:
                raise SystemExit(f"{module} declares {method}, which another module declares too")
            found[method] = declaration
    return dict(sorted(found.items()))


def table() -> str:
    """The table as Markdown."""
    lines = [HEAD, re.sub(r"[^|]+", "---", HEAD)]
    lines += [f"| `{method}` | {' | '.join(_cells(method, what))} |" for method, what in declared().items()]
    return "\n".join(lines)


def _cells(method: str, what: Declaration) -> list[str]:
    service = method.rpartition("/")[0]
    roles = CALLERS.get(method) or CALLERS.get(service)
    share = what.share
    return [
        what.shows.value,
        "nothing" if service in OPEN else ", ".join(sorted(roles)) if roles else "a token",
        "" if what.rows is None else str(what.rows),
        _bytes(what.body_bytes),
        f"{what.frames} x, {_bytes(what.frame_bytes)}" if what.frames else "",
        _bytes(what.memory_bytes),
        "" if what.device_s == 0 else str(what.device_s) if isinstance(what.device_s, Needs) else f"{what.device_s} s",
        *(str(count) for count in (share.total, share.peer, share.place, share.region, share.reserved)),
        f"{what.deadline_s:.0f} s",
    ]


def _bytes(size: int | Needs) -> str:
    if isinstance(size, Needs) or not size:
        return str(size or "")
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def page(text: str) -> str:
    """The page `text` with an up-to-date table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the table, or check it."""
    text = PAGE.read_text("utf-8")
    if arguments == ["--check"]:
        if page(text) == text:
            return 0
        print("peerd/SECURITY.md has another table of methods: type python -m scripts.method_table", file=sys.stderr)
        return 1
    PAGE.write_text(page(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
