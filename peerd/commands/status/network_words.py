"""Formats the network's part of a snapshot: a matrix if all peers fit into 80 columns, else the worst lines.

Text in a snapshot may come from untrusted peers: it is printed as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from peerd.screen import units

Told = Mapping[str, Any]

COLUMNS: Final = 80
NAME_CHARS: Final = 14


def network_parts(told: Told | None, names: Mapping[str, str], order: Sequence[str] = ()) -> list[RenderableType]:
    """The network's part of `peerd status --swarm`, or [] if it was not read yet. `order`: the peers to show first."""
    if not told:
        return []
    if told.get("why"):
        return [Text(f"network: {units.named(str(told['why']), names)}", "yellow")]
    matrix = _matrix(told.get("pairs") or [], names, order)
    return [*_summary(told), matrix] if matrix is not None else [*_summary(told), *_worst(told, names)]


def _summary(told: Told) -> list[Text]:
    line = Text.assemble(("network", "bold"), f": {units.counted(int(told.get('peers', 0)), 'peer')}")
    line.append(f", {_range(told.get('rtt_ms'), 'round trip', 'ms')}, {_range(told.get('mbit'), 'rate', 'Mb/s')}")
    if told.get("more"):
        line.append("; not all pairs were read")
    return [line]


def _range(spread: Told | None, what: str, unit: str) -> str:
    if not spread:
        return f"no {what} measured yet"
    least, median, most = (_figure(spread.get(key)) for key in ("least", "median", "most"))
    return f"{least} to {most} {unit} (median {median})" if least != most else f"{least} {unit}"


def _figure(value: object) -> str:
    number = units.known(value)
    if number is None:
        return units.UNKNOWN
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def _matrix(pairs: Sequence[Told], names: Mapping[str, str], order: Sequence[str]) -> Table | None:
    """Round trip and rate from each peer (row) to each other (column). Returns None if it is wider than COLUMNS."""
    there = dict.fromkeys(str(name) for pair in pairs for name in (pair["one"], pair["other"]))
    peers = list(dict.fromkeys([*(peer for peer in order if peer in there), *there]))
    cells: dict[tuple[str, str], str] = {}
    for pair in pairs:
        one, other, rtt = str(pair["one"]), str(pair["other"]), _marked(pair["rtt_ms"], pair["rtt_estimated"])
        cells[one, other] = f"{rtt}/{_marked(pair['there_mbit'], pair['there_estimated'])}"
        cells[other, one] = f"{rtt}/{_marked(pair['back_mbit'], pair['back_estimated'])}"
    labels = [f"{number} {_name(peer, names)}" for number, peer in enumerate(peers, 1)]
    widths = [max(len(cells.get((row, peer), "")) for row in peers) for peer in peers]
    if not peers or max(map(len, labels)) + sum(width + 1 for width in widths) > COLUMNS:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("ms/Mb/s", no_wrap=True)
    for number in range(1, len(peers) + 1):
        table.add_column(f"to {number}", justify="right", no_wrap=True)
    for label, row in zip(labels, peers, strict=True):
        shown = [cells.get((row, peer), "" if row == peer else units.UNKNOWN) for peer in peers]
        table.add_row(Text(label), *(Text(cell, "dim" if cell.count("~") == 2 else "") for cell in shown))
    if any("~" in cell for cell in cells.values()):
        table.caption, table.caption_justify = "~ estimated from other pairs", "left"
    return table


def _marked(value: object, estimated: object) -> str:
    shown = _figure(value)
    return f"~{shown}" if estimated and shown != units.UNKNOWN else shown


def _name(peer: str, names: Mapping[str, str]) -> str:
    return (names.get(peer) or units.short(peer))[:NAME_CHARS]


def _worst(told: Told, names: Mapping[str, str]) -> list[RenderableType]:
    """Table of the slowest and the farthest lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, right in (("worst lines", False), ("from", False), ("to", False), ("Mb/s", True), ("ms", True)):
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    rows = [("slowest", line["from"], line["to"], line["mbit"], line["rtt_ms"]) for line in told.get("slowest") or []]
    rows += [("farthest", row["one"], row["other"], None, row["rtt_ms"]) for row in told.get("farthest") or []]
    for kind, source, target, mbit, rtt_ms in rows:
        ends = _name(str(source), names), _name(str(target), names)
        table.add_row(*map(Text, (kind, *ends, _figure(mbit), _figure(rtt_ms))))
    return [table] if table.row_count else []
