"""Help texts in groups: the commands of `peerd`, and the options of a command with many.

The group of a command or an option is its `rich_help_panel`, which typer shows only if rich renders the help. Here the
plain help of click shows it, which fits any terminal and starts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from typer.core import TyperCommand, TyperGroup

TAKE_PART: Final = "Take part"
ORGANIZE: Final = "Organize a run"
USE: Final = "Use the trained model"
LIMITS: Final = "Limits of this machine"
WITH_LINK: Final = "With a join link"

_ORDER: Final = (TAKE_PART, ORGANIZE, USE)  # of commands
Row = tuple[str, str]  # a name, and its help


class HelpFormatter(Protocol):
    """The writer of help texts, which typer does not export."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]:
        """Write a heading, and indent what is written inside."""
        ...

    def write_dl(self, rows: Sequence[Row]) -> None:
        """Write names, and beside them their help."""
        ...


class GroupedCommands(TyperGroup):
    """A group of commands whose help lists them by their `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: HelpFormatter) -> None:
        """Write the commands, group by group."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in commands if command is not None and not command.hidden]
        width = formatter.width - 6 - max((len(name) for name, _ in shown), default=0)
        rows = [(_panel(command, TAKE_PART), (name, command.get_short_help_str(width))) for name, command in shown]
        _write(sorted(rows, key=lambda row: _ORDER.index(row[0])), formatter)


class GroupedOptions(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: HelpFormatter) -> None:
        """Write arguments and options, group by group."""
        rows = []
        for one in self.get_params(ctx):
            default = "Options" if one.param_type_name == "option" else "Arguments"
            rows.append((_panel(one, default), one.get_help_record(ctx)))
        _write([(panel, row) for panel, row in rows if row is not None], formatter)


def _panel(of: object, default: str) -> str:
    found = getattr(of, "rich_help_panel", None)
    return found if isinstance(found, str) else default


def _write(rows: Iterable[tuple[str, Row]], formatter: HelpFormatter) -> None:
    panels: dict[str, list[Row]] = {}
    for panel, row in rows:
        panels.setdefault(panel, []).append(row)
    for panel, found in panels.items():
        with formatter.section(panel):
            formatter.write_dl(found)
