"""Tables for the terminal, used by all commands.

Cells are plain text, never markup, because text may come from untrusted peers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

_UNBOUNDED: Final = 1 << 16  # columns of a console on which no table is wrapped
Row = Sequence[str | Text]


@dataclass(frozen=True, slots=True)
class Columns:
    """A table. `fewer` replaces `rows` if those do not fit on a screen.

    On a narrow screen, words that are too long are wrapped in the last column and in those of `whole`, and cut with an
    ellipsis in the others.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    right: Collection[int] = ()  # columns of figures
    fewer: Sequence[Row] = ()
    whole: Collection[int] = ()

    def table(self, gap: int = 2) -> Table:
        """The table, for printing: long cells are wrapped. `gap`: spaces between columns."""
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for column, head in enumerate(self.heads):
            wrapped = column in self.whole or column == len(self.heads) - 1
            side: JustifyMethod = "right" if column in self.right else "left"
            table.add_column(head, justify=side, overflow="fold" if wrapped else "ellipsis")
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def lines(self, most: int) -> list[Text]:
        """The table in at most `most` lines of any length. If rows are left out, the last line has their number."""
        rows = self.rows if len(self.rows) < most or not self.fewer else self.fewer
        left = len(rows) - (most - 1)
        if left > 0:
            rows, left = rows[: max(0, most - 2)], left + 1
        drawn = Console(width=_UNBOUNDED).render_lines(replace(self, rows=rows).table(), pad=False)
        lines = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in drawn]
        for line in lines:
            line.rstrip()
        if left > 0:
            lines.append(Text(f"and {left:,} more", "dim"))
        return lines[: max(0, most)]


def styled(cells: Iterable[str], style: str) -> list[Text]:
    """A row whose cells all have one style."""
    return [Text(cell, style) for cell in cells]


def facts(lines: Mapping[str, str]) -> str:
    """Lines of a name and its value, with the values below each other."""
    width = max(map(len, lines), default=0) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in lines.items())
