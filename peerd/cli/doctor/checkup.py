"""Runs all checks of `peerd doctor` in order and prints their results.

Each check performs the real operation (binds the port, reads the token, opens the text, connects and shakes hands) with
the functions that `peerd join` uses. Checks have no side effects: they create no identity and do not disturb a running
daemon. A check never raises: it returns ok, warn, FAIL or unknown, with what it found and what the user can do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import trio
from rich.console import Console
from rich.text import Text

from peerd.cli.doctor.check_result import CheckResult, CheckVerdict, failed
from peerd.cli.doctor.machine_checks import data_dir_checks, device_checks, version_checks
from peerd.cli.doctor.network_checks import NetworkTarget, network_checks
from peerd.cli.doctor.run_checks import RunNeeds, run_checks, visiting_as
from peerd.core.errors import ConfigError
from peerd.daemon import registry
from peerd.run.runfile import RunFile

_STYLES = {
    CheckVerdict.OK: "green",
    CheckVerdict.WARN: "yellow",
    CheckVerdict.FAIL: "bold red",
    CheckVerdict.UNKNOWN: "cyan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckupConfig:
    """Settings to check. `roles` are names as on the command line; empty means: check what stages and trainers need."""

    roles: tuple[str, ...]
    run: RunFile | None
    bootstrap: tuple[str, ...]
    listen: tuple[str, ...]
    data_dir: Path
    device: str
    announced: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()  # messages on files that the run file names and that are missing here


def run(wish: CheckupConfig, *, as_json: bool) -> int:
    """Run all checks and print the results. Returns the exit code: 1 if any check failed, else 0."""
    console, findings = Console(), list[CheckResult]()
    for finding in _all(wish):
        findings.append(finding)
        if not as_json:
            _show(console, finding)
    fails = any(finding.verdict == CheckVerdict.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not fails, "checks": [asdict(finding) for finding in findings]}, ensure_ascii=False))
    return 1 if fails else 0


def _all(wish: CheckupConfig) -> Iterator[CheckResult]:
    yield from version_checks()
    yield from device_checks(wish.device)
    names, findings = _role_names(wish.roles)
    yield from findings
    yield from data_dir_checks(wish.data_dir, wish.run is not None)
    identity, papers = None, None
    if wish.run is None:
        checks = "token, text, model, memory and room for checkpoints"
        yield CheckResult("run", CheckVerdict.UNKNOWN, f"{checks} were not checked", "pass --model FILE, as for join")
    else:
        needs = RunNeeds(wish.run, names, wish.data_dir, wish.device)
        for text in wish.uncompared if not names or set(names) - {"backbone"} else ():
            yield CheckResult("files to compare", CheckVerdict.FAIL, *text.partition("; ")[::2])
        yield from run_checks(needs)
        identity, papers = visiting_as(needs)
    visit = NetworkTarget(wish.bootstrap, wish.listen, wish.run, identity, papers, wish.announced)
    yield from trio.run(network_checks, visit)


def _role_names(texts: tuple[str, ...]) -> tuple[tuple[str, ...], list[CheckResult]]:
    """Load the roles. Returns the names of those that loaded, and one result for each."""
    names, findings = [], []
    for text in texts:
        try:
            names.append(registry.load(text).name)
        except ConfigError as error:
            findings.append(failed(f"role {text}", error, "see README.md for the available roles"))
        else:
            findings.append(CheckResult(f"role {text}", CheckVerdict.OK, "can be loaded"))
    return tuple(names), findings


def _show(console: Console, finding: CheckResult) -> None:
    label = "FAIL" if finding.verdict == CheckVerdict.FAIL else finding.verdict.value
    line = Text.assemble((f"{label:8}", _STYLES[finding.verdict]), f"{finding.check}: {finding.found}")
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"        {finding.advice}", "dim"), soft_wrap=True)
