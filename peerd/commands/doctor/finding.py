"""Results of doctor's checks: what was found, whether a peer can live with it, and what to do.

`unknown` is not `ok`: it stands where something was not asked or cannot be known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from peerd.core.errors import PeerdError


class CheckVerdict(StrEnum):
    """End of one check. Only FAIL is a reason for exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"  # shown as FAIL
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's end: what was looked at, what was found there, and what to type or do."""

    check: str
    verdict: CheckVerdict
    found: str
    advice: str = ""


def failed(check: str, error: PeerdError, advice: str = "") -> CheckResult:
    """The failure that `peerd join` would end with, for the same reason."""
    found, _, more = str(error).partition("; ")
    return CheckResult(check, CheckVerdict.FAIL, found, more or advice)
