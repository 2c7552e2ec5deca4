"""Reports of pairs of peers, and parts of the map that is made of them, for the fuzz tests: see `parsers`."""

from __future__ import annotations

from peerd.messages.encoding import decode, encode
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport, PairFigures
from peerd.placement.network.landmarks import filled
from peerd.placement.network.network_map import NetworkMap
from tests.fuzz.parsers import PARSERS, Corpus, parser

__all__ = ["PARSERS"]
_RUN = bytes(16)
_FIGURES = [PairFigures("a", 0.02, 1e6, 2e6, 1.0, 9.0, True, True), PairFigures("b", 0.1), PairFigures("c", 0.0, 1e9)]
_REPORT = encode(NetworkReport(_RUN, _FIGURES))


def _asked() -> Corpus:
    pairs = [MappedPair(0, 1, 0.02, 1e6, 2e6, 9.0), MappedPair(0, 2, 0.1, 0.0, 0.0, 0.0, True, True, True)]
    return [
        b"\0" + encode(NetworkMapRequest(_RUN, "a", "b")),
        b"\1" + encode(NetworkPart(["a", "b", "c"], pairs, 3, True)),
    ]


@parser("reports of pairs", lambda: [_REPORT], share=0.5)
def _reports(data: bytes) -> None:
    """Whatever is told, the map holds its invariants and fills its gaps with numbers."""
    report = decode(NetworkReport, data)
    network = NetworkMap(most_figures=4)
    for now, teller in ((0.0, "a"), (10.0, "d"), (1e4, "b")):
        network.take(now, teller, report.pairs)
        network.check()
        peers, view = network.peers(), network.view
        found = filled(peers, lambda one, other, now=now, view=view: view(now, one, other))  # type: ignore[misc]
        for i in range(len(peers)):
            for j in range(len(peers)):
                assert 0 <= found.rtt_s[i][j] <= 60.0
                assert found.rtt_s[i][j] == found.rtt_s[j][i]
                assert found.rate[i][j] > 0


@parser("questions for the map and its parts", _asked)
def _parts(data: bytes) -> None:
    kind = (NetworkMapRequest, NetworkPart)[data[0] % 2] if data else NetworkPart
    body = decode(kind, data[1:])
    assert encode(decode(kind, encode(body))) == encode(body)
