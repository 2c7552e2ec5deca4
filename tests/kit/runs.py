"""Run files with other settings, for tests: only what differs is named."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from peerd.run.runfile import RunFile


def changed(run: RunFile, /, **settings: Any) -> RunFile:
    """The run with other settings: a dictionary changes keys of a section, anything else takes its place."""
    replaced = {
        name: structs.replace(getattr(run, name), **value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return structs.replace(run, **replaced)
