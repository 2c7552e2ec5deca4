"""Reads the conductor's map of the network between a run's peers, for a status snapshot.

The map is one peer's claim: figures are numbers within bounds, but names may be any text.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import trio

from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.role.run_services import RunServices
from peerd.run.runfile import BYTES_PER_MBIT
from peerd.status.swarm_status import DirectionStatus, NetworkStatus, PairStatus, Spread, SwarmStatus
from peerd.swarm.conductor.link_watch import NamedPair, ReadMap

READ_S: Final = 1.0
PAIRS_TOLD: Final = 512  # most pairs in a snapshot; of a larger map it has the worst lines and a summary
WORST: Final = 3  # lines of each kind (slowest, farthest)


async def network_view(services: RunServices, swarm: SwarmStatus) -> NetworkStatus:
    """The network by the conductor's map. `swarm` is the directory's view, whose records name the conductor."""
    conductor = services.following.conductor or _named_conductor(swarm)
    if conductor is None:
        return NetworkStatus(why="the run has no conductor")
    why = f"the conductor {conductor.short} did not send its network map"
    try:
        with trio.fail_after(READ_S):
            return network_status(await services.link_watch.read_map(conductor))
    except trio.TooSlowError:
        return NetworkStatus(why=f"{why} within {READ_S:g} s")
    except RemoteError as error:
        return NetworkStatus(why=f"{why}: {error}")


def _named_conductor(swarm: SwarmStatus) -> PeerId | None:
    """The conductor that most stage peers name in their records."""
    named = Counter(row.conductor for row in swarm.stage_peers() if row.conductor)
    for name, _ in named.most_common(1):
        try:
            return PeerId.parse(name)
        except ValueError:
            return None
    return None


def network_status(read: ReadMap) -> NetworkStatus:
    """Status of a network map. The summary counts each direction of a pair; a row of `pairs` has both."""
    pairs = [_pair(pair) for pair in read.pairs]
    timed = [(pair.rtt_ms, pair) for pair in pairs if pair.rtt_ms is not None and not pair.rtt_estimated]
    lines = [line for pair in pairs for line in _directions(pair)]
    far = sorted(timed, key=lambda entry: -entry[0])
    return NetworkStatus(
        peers=read.total_peers,
        pairs_measured=len(timed),
        rates_measured=len(lines),
        more=read.more,
        rtt_ms=_spread([rtt_ms for rtt_ms, _ in timed]),
        mbit=_spread([line.mbit for line in lines]),
        farthest=[pair for _, pair in far[:WORST]],
        slowest=sorted(lines, key=lambda line: line.mbit)[:WORST],
        pairs=pairs if len(pairs) <= PAIRS_TOLD else [],
    )


def _pair(pair: NamedPair) -> PairStatus:
    figures = pair.figures
    return PairStatus(
        one=pair.one,
        other=pair.other,
        rtt_ms=figures.rtt_s * 1000 or None,
        there_mbit=figures.there_bytes_per_s / BYTES_PER_MBIT or None,
        back_mbit=figures.back_bytes_per_s / BYTES_PER_MBIT or None,
        rtt_estimated=figures.rtt_estimated,
        there_estimated=figures.there_estimated,
        back_estimated=figures.back_estimated,
        age_s=figures.age_s,
    )


def _directions(pair: PairStatus) -> Iterator[DirectionStatus]:
    """The directions of a pair whose rate was measured."""
    if pair.there_mbit is not None and not pair.there_estimated:
        yield DirectionStatus(source=pair.one, target=pair.other, mbit=pair.there_mbit, rtt_ms=pair.rtt_ms)
    if pair.back_mbit is not None and not pair.back_estimated:
        yield DirectionStatus(source=pair.other, target=pair.one, mbit=pair.back_mbit, rtt_ms=pair.rtt_ms)


def _spread(figures: Sequence[float]) -> Spread | None:
    if not figures:
        return None
    return Spread(least=min(figures), median=statistics.median(figures), most=max(figures))
