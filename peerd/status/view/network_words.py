"""Formats the network's part of a snapshot: a matrix if all peers fit into 80 columns, else the worst links.

Text in a snapshot may come from untrusted peers: it is printed as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from peerd.screen import units
from peerd.screen.columns import Columns, Row
from peerd.status.swarm_status import NetworkStatus, PairStatus, Spread

COLUMNS: Final = 80
NAME_CHARS: Final = 14


def network_parts(
    network: NetworkStatus | None, names: Mapping[str, str], order: Sequence[str] = ()
) -> list[RenderableType]:
    """The network's part of `peerd status --swarm`, or [] if it was not read yet. `order`: the peers to show first."""
    if network is None:
        return []
    if network.why:
        return [Text(f"network: {units.named(network.why, names)}", "yellow")]
    line = Text.assemble(("network", "bold"), f": {units.counted(network.peers, 'peer')}")
    line.append(f", {_range(network.rtt_ms, 'round trip', 'ms')}, {_range(network.mbit, 'rate', 'Mb/s')}")
    if network.more:
        line.append("; not all pairs were read")
    matrix = _matrix(network.pairs, names, order)
    if matrix is not None:
        return [line, matrix]
    worst = _worst(network, names)
    return [line, worst.table()] if worst.rows else [line]


def _range(spread: Spread | None, what: str, unit: str) -> str:
    if spread is None:
        return f"no {what} measured yet"
    least, median, most = (_figure(units.known(one)) for one in (spread.least, spread.median, spread.most))
    return f"{least} to {most} {unit} (median {median})" if least != most else f"{least} {unit}"


def _figure(number: float | None) -> str:
    if number is None:
        return units.UNKNOWN
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"


def _matrix(pairs: Sequence[PairStatus], names: Mapping[str, str], order: Sequence[str]) -> Table | None:
    """Round trip and rate from each peer (row) to each other (column). Returns None if it is wider than COLUMNS."""
    there = dict.fromkeys(name for pair in pairs for name in (pair.one, pair.other))
    peers = list(dict.fromkeys([*(peer for peer in order if peer in there), *there]))
    cells: dict[tuple[str, str], str] = {}
    for pair in pairs:
        rtt = _marked(pair.rtt_ms, pair.rtt_estimated)
        cells[pair.one, pair.other] = f"{rtt}/{_marked(pair.there_mbit, pair.there_estimated)}"
        cells[pair.other, pair.one] = f"{rtt}/{_marked(pair.back_mbit, pair.back_estimated)}"
    labels = [f"{number} {_name(peer, names)}" for number, peer in enumerate(peers, 1)]
    widths = [max(len(cells.get((row, peer), "")) for row in peers) for peer in peers]
    if not peers or max(map(len, labels)) + sum(width + 1 for width in widths) > COLUMNS:
        return None
    rows = list[Row]()
    for label, row in zip(labels, peers, strict=True):
        shown = [cells.get((row, peer), "" if row == peer else units.UNKNOWN) for peer in peers]
        rows.append([label, *(Text(cell, "dim" if cell.count("~") == 2 else "") for cell in shown)])
    numbers = range(1, len(peers) + 1)
    table = Columns(("ms/Mb/s", *(f"to {number}" for number in numbers)), rows, numbers).table(gap=1)
    if any("~" in cell for cell in cells.values()):
        table.caption, table.caption_justify = "~ estimated from other pairs", "left"
    return table


def _marked(value: float | None, estimated: bool) -> str:
    return f"~{_figure(value)}" if estimated and value is not None else _figure(value)


def _name(peer: str, names: Mapping[str, str]) -> str:
    return (names.get(peer) or units.short(peer))[:NAME_CHARS]


def _worst(network: NetworkStatus, names: Mapping[str, str]) -> Columns:
    """Table of the slowest and the farthest links."""

    def row(kind: str, source: str, target: str, mbit: float | None, rtt_ms: float | None) -> Row:
        return [kind, _name(source, names), _name(target, names), _figure(mbit), _figure(rtt_ms)]

    rows = [row("slowest", line.source, line.target, line.mbit, line.rtt_ms) for line in network.slowest]
    rows += [row("farthest", pair.one, pair.other, None, pair.rtt_ms) for pair in network.farthest]
    return Columns(("worst links", "from", "to", "Mb/s", "ms"), rows, {3, 4})
