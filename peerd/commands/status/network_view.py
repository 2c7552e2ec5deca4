"""Reads the conductor's map of the network between a run's peers, and returns it as plain data for a status snapshot.

The map is one peer's claim: figures are numbers within bounds, but names may be any text.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio

from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.run.runfile import BYTES_PER_MBIT
from peerd.service.network.link_watch import NamedPair, ReadMap
from peerd.service.run_services import RunServices

Told = Mapping[str, Any]

READ_S: Final = 1.0
PAIRS_TOLD: Final = 512  # most pairs in a snapshot; of a larger map it has the worst lines and a summary
WORST: Final = 3  # lines of each kind (slowest, farthest)


async def network_view(services: RunServices, swarm: Told) -> dict[str, Any]:
    """The network by the conductor's map. `swarm` is the directory's view, whose records name the conductor."""
    conductor = services.following.conductor or _named_conductor(swarm)
    if conductor is None:
        return {"why": "the run has no conductor"}
    try:
        with trio.fail_after(READ_S):
            read = await services.link_watch.read_map(conductor)
    except trio.TooSlowError:
        return {"why": f"the conductor {conductor.short} did not send its network map within {READ_S:g} s"}
    except RemoteError as error:
        return {"why": f"the conductor {conductor.short} did not send its network map: {error}"}
    return {"why": None, **told_of(read)}


def _named_conductor(swarm: Told) -> PeerId | None:
    """The conductor that most stage peers name in their records."""
    named = Counter(row["conductor"] for stage in swarm.get("stages", []) for row in stage["peers"] if row["conductor"])
    for name, _ in named.most_common(1):
        try:
            return PeerId.parse(name)
        except ValueError:
            return None
    return None


def told_of(read: ReadMap) -> dict[str, Any]:
    """A network map as plain data. The summary counts each direction of a pair; a row of `pairs` has both."""
    rows = [_row(pair) for pair in read.pairs]
    rtts = [row["rtt_ms"] for row in rows if row["rtt_ms"] is not None and not row["rtt_estimated"]]
    lines = [line for row in rows for line in _directions(row)]
    rates = [line["mbit"] for line in lines]
    far = sorted(
        (row for row in rows if row["rtt_ms"] is not None and not row["rtt_estimated"]), key=_rtt, reverse=True
    )
    return {
        "peers": read.total_peers,
        "pairs_measured": len(rtts),
        "rates_measured": len(rates),
        "more": read.more,
        "rtt_ms": _spread(rtts),
        "mbit": _spread(rates),
        "farthest": far[:WORST],
        "slowest": sorted(lines, key=lambda line: float(line["mbit"]))[:WORST],
        "pairs": rows if len(rows) <= PAIRS_TOLD else [],
    }


def _row(pair: NamedPair) -> dict[str, Any]:
    figures = pair.figures
    return {
        "one": pair.one,
        "other": pair.other,
        "rtt_ms": figures.rtt_s * 1000 or None,
        "there_mbit": figures.there_bytes_per_s / BYTES_PER_MBIT or None,
        "back_mbit": figures.back_bytes_per_s / BYTES_PER_MBIT or None,
        "rtt_estimated": figures.rtt_estimated,
        "there_estimated": figures.there_estimated,
        "back_estimated": figures.back_estimated,
        "age_s": figures.age_s,
    }


def _rtt(row: Told) -> float:
    return float(row["rtt_ms"])


def _directions(row: Told) -> list[dict[str, Any]]:
    """The directions of a pair whose rate was measured, one dict each."""
    ends = (("there", row["one"], row["other"]), ("back", row["other"], row["one"]))
    return [
        {"from": source, "to": target, "mbit": row[f"{way}_mbit"], "rtt_ms": row["rtt_ms"]}
        for way, source, target in ends
        if row[f"{way}_mbit"] is not None and not row[f"{way}_estimated"]
    ]


def _spread(figures: Sequence[float]) -> dict[str, float] | None:
    if not figures:
        return None
    return {"least": min(figures), "median": statistics.median(figures), "most": max(figures)}
