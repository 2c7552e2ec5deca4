"""Results of doctor's checks: what was found, whether a peer can run with it, and what to do.

`unknown` is not `ok`: it means that something was not checked or cannot be determined.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from peerd.core.errors import PeerdError


class CheckVerdict(StrEnum):
    """Verdict of one check. Only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"  # shown as FAIL
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: its subject, the verdict, what was found, and what to type or do."""

    check: str
    verdict: CheckVerdict
    found: str
    advice: str = ""


def failed(check: str, error: PeerdError, advice: str = "") -> CheckResult:
    """Failed check for an error that `peerd join` would raise. Its text after "; ", if any, becomes the advice."""
    found, _, more = str(error).partition("; ")
    return CheckResult(check, CheckVerdict.FAIL, found, more or advice)
