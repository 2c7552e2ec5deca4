"""Layout of a picture that fills a terminal of any size: loss curves, a table, facts and events.

The head, the facts and the foot are wrapped into as many lines as they need. The chart, the table and the events share
the remaining lines; of the events, the newest are shown. A wide screen has the events beside the table. This module
turns texts into lines, and does no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from peerd.screen.chart import Curve, Point, chart
from peerd.screen.columns import Columns

WIDE: Final = 110  # columns from which the events are beside the table
_BETWEEN: Final = " · "  # parts of one line
_GAP: Final = "   "  # between the table and the events beside it
_TABLE_PART: Final = 0.55  # largest share of a wide screen's width
_CHART_LEAST, _EVENTS_LEAST, _TABLE_LEAST = 5, 3, 3  # fewest lines, if all three fit
_CHART_PART: Final = 0.6  # largest share of the lines that the three share

Parts = Sequence[Text]  # texts that are joined into lines, each unbroken if it fits into a line


@dataclass(frozen=True, slots=True)
class FramePicture:
    """Contents of a picture. Events are sorted by age, the oldest first."""

    head: Sequence[Parts]
    title: Text
    curves: Sequence[Curve]
    x_range: Point
    table: Columns
    facts: Sequence[Parts]
    events: Sequence[Text]
    foot: Text
    empty: str = "waiting for the first step"


@dataclass(frozen=True, slots=True)
class Framed:
    """Renderable for rich that draws a picture at the current size of the screen."""

    picture: FramePicture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        yield Text("\n").join(compose(self.picture, width, height))


def compose(picture: FramePicture, width: int, height: int) -> list[Text]:
    """Lay a picture out in `height` lines of at most `width` columns. If it does not fit, the bottom is cut."""
    head = [line for parts in picture.head for line in flow(parts, width)]
    foot = [line for parts in [*picture.facts, [picture.foot]] for line in flow(parts, width)]
    room = height - len(head) - len(foot)
    middle = _middle(picture, width, room) if room > 0 else []
    middle += [Text("")] * (room - len(middle))
    lines = [*head, *middle, *foot] if room >= 0 else [*head, *foot[room - len(foot) :]]
    return [_cut(line, width) for line in lines[:height]]


def flow(parts: Parts, width: int) -> list[Text]:
    """Join the parts into as few lines as possible. A part that is wider than a line is wrapped between words."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(_BETWEEN) + part.cell_len <= width:
            lines[-1] = lines[-1].copy().append(_BETWEEN, "dim").append_text(part)
        elif part.cell_len <= width:
            lines.append(part.copy())
        else:
            console = Console(width=width, color_system=None)
            lines += list(part.wrap(console, width))
            for line in lines:
                line.rstrip()
    return lines


def _middle(picture: FramePicture, width: int, room: int) -> list[Text]:
    """Chart, table and events in at most `room` lines."""
    if width >= WIDE and picture.events:
        return _side_by_side(picture, width, room)
    want = 1 + len(picture.table.rows)
    table = min(want, max(_TABLE_LEAST, room - _CHART_LEAST - min(_EVENTS_LEAST, len(picture.events))), room)
    rest = room - table
    events = min(len(picture.events), max(min(_EVENTS_LEAST, rest), rest // 3))
    if rest - events < _CHART_LEAST - 1:
        events = min(len(picture.events), rest)
    shown = [_cut(line, width) for line in picture.table.lines(table)]
    newest = list(picture.events[-events:]) if events else []
    return [*_chart(picture, width, room - len(shown) - len(newest)), *shown, *newest]


def _side_by_side(picture: FramePicture, width: int, room: int) -> list[Text]:
    want = max(1 + len(picture.table.rows), min(len(picture.events), room // 3), round(room * (1 - _CHART_PART)))
    low = min(want, max(_TABLE_LEAST, room - _CHART_LEAST), room)
    table = [_cut(line, int(width * _TABLE_PART)) for line in picture.table.lines(low)]
    across = max((line.cell_len for line in table), default=0)
    newest = list(picture.events[-low:])
    lines = []
    for number in range(low):
        line = table[number].copy() if number < len(table) else Text("")
        line.append(" " * (across - line.cell_len) + _GAP)
        if number < len(newest):
            line.append_text(_cut(newest[number], width - across - len(_GAP)))
        lines.append(line)
    return [*_chart(picture, width, room - low), *lines]


def _chart(picture: FramePicture, width: int, height: int) -> list[Text]:
    """The chart under its title, or empty lines if `height` is too small for a curve."""
    if height < _CHART_LEAST - 1:
        return [Text("")] * max(0, height)
    lines = chart(picture.curves, width=width, height=height - 1, x_range=picture.x_range, empty=picture.empty)
    return [picture.title, *lines]


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.no_wrap = True
    line.truncate(max(0, width), overflow="ellipsis")
    return line


def bar(done: float, columns: int) -> Text:
    """Progress bar of `columns` characters. `done` is the finished share, 0 to 1."""
    filled = round(columns * min(max(done, 0.0), 1.0))
    return Text("━" * filled, "green") + Text("─" * (columns - filled), "dim")
