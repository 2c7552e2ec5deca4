"""The conductor's answers about the network between peers: `network/1/report` and `network/1/map`.

Accepts reports of peers that report to this conductor as stage peers, helpers or trainers, one in five seconds from
each. Only their measurements about other such peers count. Any peer of the run may read the map, page by page: for a
small swarm all pairs, with estimates; for a large one the measured pairs. The work for a page is bounded, and the order
of pages is computed at most once in five seconds. Hostile input: any body. `placement/network` limits its effect.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Overloaded, Refused, not_conducting, other_run_file
from peerd.core.limits import MEMBERS, NETWORK_PART_PAIRS
from peerd.messages.encoding import Empty
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport
from peerd.placement.network.landmarks import FilledNetwork
from peerd.placement.network.network_map import PairView
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.swarm.conductor.machine_driver import MachineDriver
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.posts import peer_of

REPORT_PAUSE_S: Final = 5.0  # between two reports of one peer
FILLED_PEERS: Final = 32  # at most, in a swarm whose missing pairs are estimated
_OUTLINE_S: Final = 5.0
_REPORT: Final = "network/1/report"
_MAP: Final = "network/1/map"
_SMALL = Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0)
DECLARED: Final = {
    _REPORT: replace(_SMALL, body_bytes=32 << 10, calls_per_peer=2, calls=1024),
    _MAP: replace(_SMALL, body_bytes=1 << 10, calls_per_peer=1, calls=16),
}

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Outline:
    """The pairs of the map in the order of its pages, at the time `at`. `filled`: with estimates, for a small swarm."""

    of: Tenure
    at: float
    peers: int
    pairs: list[Pair]
    filled: FilledNetwork | None


class NetworkMapServer:
    """Serves `network/1` while this peer conducts. `run`: the run's fingerprint."""

    def __init__(self, run: bytes, rpc: Rpc, driver: MachineDriver) -> None:
        self._run, self._rpc, self._driver = run, rpc, driver
        self._reported = BoundedDict[str, float](MEMBERS)
        self._outline: _Outline | None = None

    def serve(self) -> None:
        """Answer calls from now on."""
        self._rpc.serve(_REPORT, NetworkReport, self._report, declared=DECLARED[_REPORT])
        self._rpc.serve(_MAP, NetworkMapRequest, self._map, declared=DECLARED[_MAP])

    def unserve(self) -> None:
        """Stop answering calls."""
        self._rpc.unserve("network/1")

    def _tenure(self, fingerprint: bytes) -> Tenure:
        """The tenure. Raises Refused for another run, or if this peer does not conduct."""
        if fingerprint != self._run:
            raise other_run_file()
        if self._driver.tenure is None:
            raise not_conducting()
        return self._driver.tenure

    def _posts(self) -> dict[str, str]:
        """The peers that report here, each with one of its posts, or its own name if it is a trainer."""
        return {peer_of(name): name for name in self._driver.heard}

    async def _report(self, call: Incoming[NetworkReport]) -> Answer[Empty]:
        tenure, teller, now = self._tenure(call.body.run), call.peer.text, trio.current_time()
        known = self._posts()
        if teller not in known:
            raise Refused("you do not report to this conductor as a stage peer, helper or trainer")
        since_s = now - self._reported.get(teller, float("-inf"))
        if since_s < REPORT_PAUSE_S:
            raise Overloaded("you have just reported", REPORT_PAUSE_S - since_s)
        self._reported[teller] = now
        tenure.take_figures(teller, (one for one in call.body.pairs if one.peer in known))
        return Answer(Empty())

    async def _map(self, call: Incoming[NetworkMapRequest]) -> Answer[NetworkPart]:
        tenure, body = self._tenure(call.body.run), call.body
        outline = self._outline_of(tenure)
        begin = bisect.bisect_right(outline.pairs, (body.one, body.other))
        told = outline.pairs[begin : begin + NETWORK_PART_PAIRS]
        peers = list(dict.fromkeys(peer for pair in told for peer in pair))
        place = {peer: number for number, peer in enumerate(peers)}
        pairs = [self._mapped(tenure, outline, pair, (place[pair[0]], place[pair[1]])) for pair in told]
        return Answer(NetworkPart(peers, pairs, outline.peers, begin + len(told) < len(outline.pairs)))

    def _outline_of(self, tenure: Tenure) -> _Outline:
        outline, now = self._outline, trio.current_time()
        if outline is None or outline.of is not tenure or now - outline.at > _OUTLINE_S:
            posts = self._posts()
            if len(posts) <= FILLED_PEERS:
                posts = {peer: posts[peer] for peer in sorted(posts)}
                outline = _Outline(tenure, now, len(posts), list(combinations(posts, 2)), tenure.network_between(posts))
            else:
                pairs = [(one, other) for one, other in tenure.network.pairs() if one in posts and other in posts]
                outline = _Outline(tenure, now, len(posts), pairs, None)
            self._outline = outline
        return outline

    def _mapped(self, tenure: Tenure, outline: _Outline, pair: Pair, places: tuple[int, int]) -> MappedPair:
        filled = outline.filled
        if filled is None:
            view: PairView = tenure.network.view(trio.current_time(), *pair)
            rates = view.there or 0.0, view.back or 0.0
            return MappedPair(*places, view.rtt_s or 0.0, *rates, view.age_s)
        i, j = (bisect.bisect_left(filled.peers, peer) for peer in pair)
        guessed = filled.rate_guessed
        return MappedPair(
            *places,
            0.0 if filled.rtt_guessed else filled.rtt_s[i][j],
            0.0 if guessed else filled.rate[i][j],
            0.0 if guessed else filled.rate[j][i],
            filled.age_s[i][j],
            not filled.rtt_measured[i][j],
            not filled.rate_measured[i][j],
            not filled.rate_measured[j][i],
        )
