"""Runs benchmarks. Each measures peerd and its baseline in the same run, so that ratios hold on any machine.

    python scripts/bench.py                      list of the benchmarks
    python scripts/bench.py transport            results as a table
    python scripts/bench.py transport --json     the table on stderr, one JSON object as the last line of stdout
    python scripts/bench.py transport --full     a longer run with less noise
    python scripts/bench.py placement --large    larger instances, if the benchmark has any

A benchmark is a module in scripts/benchmarks with a docstring and `measure(full: bool) -> Report`, and optionally
`measure_large() -> Report`, and `WHY_NOT`, a function that returns why this machine cannot run it, or None. Hyphens in
its name are underscores in the module's name. Modules whose names begin with an underscore are helpers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import benchmarks
from scripts.benchmarks._report import Figure, Report


def names() -> list[str]:
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.benchmarks.{name.replace('-', '_')}")


def first_line(name: str) -> str:
    return (module_of(name).__doc__ or "").partition("\n")[0]


def shown(figure: Figure) -> tuple[str, str, str, str]:
    met = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met]
    return figure.text, f"{figure.value:,.{figure.digits}f} {figure.unit}".strip(), figure.target_text, met


def show(report: Report, console: Console) -> None:
    table = Table("figure", "measured", "target", "", title=report.title, caption=report.note, title_justify="left")
    for section in report.sections:
        for figure in section:
            table.add_row(*shown(figure))
        table.add_section()
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure peerd beside its baselines.")
    parser.add_argument("name", nargs="?", choices=names(), help="which benchmark; without it they are listed")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--full", action="store_true", help="take longer for steadier figures")
    parser.add_argument("--large", action="store_true", help="larger instances, where the benchmark has such")
    options = parser.parse_args()
    if options.name is None:
        for name in names():
            print(f"{name:12} {first_line(name)}")
        return 0
    module = module_of(options.name)
    if options.large and not hasattr(module, "measure_large"):
        parser.error(f"{options.name} has no larger instances; without --large it measures what it has")
    if reason := getattr(module, "WHY_NOT", lambda: None)():
        raise SystemExit(reason)
    report: Report = module.measure_large() if options.large else module.measure(options.full)
    show(report, Console(stderr=options.json))
    if options.json:
        print(json.dumps(report.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
