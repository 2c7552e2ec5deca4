"""Declarations of the methods that tests serve: nothing is asked of callers but what a test says."""

from __future__ import annotations

from typing import Any

from peerd.rpc.methods.declaration import Declaration, Shows


def declared(**bounds: Any) -> Declaration:
    """A declaration with these bounds, and the usual ones else."""
    given: dict[str, Any] = {"shows": Shows.NOTHING, "rows": None, "memory_bytes": 0, "device_s": 0.0}
    return Declaration(**(given | bounds))


ANY = declared()
