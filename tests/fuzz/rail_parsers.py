"""The parser of frames that name their place in a stream, on two connections of one link: see `parsers`."""

from __future__ import annotations

from peerd.wire.yamux import session as yamux
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER, StripedLane
from tests.fuzz.parsers import PARSERS, YAMUX, Corpus, parser, yamux_answers, yamux_check, yamux_frame

__all__ = ["PARSERS"]
_TURN_BYTES = 64  # the first byte of each so many says on which connection the others come


def _placed(at: int, body: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return PLACED_HEADER.pack(0, PLACED, flags, stream, len(body), at) + body


def _on(lane: int, data: bytes) -> bytes:
    step = _TURN_BYTES - 1
    rest = -len(data) % step
    if rest:  # whole turns, with a frame for a stream that nobody knows
        data += _placed(0, bytes(rest - PLACED_HEADER.size + (step if rest < PLACED_HEADER.size else 0)), stream=99)
    return b"".join(bytes([lane]) + data[begin : begin + step] for begin in range(0, len(data), step))


def _talks() -> Corpus:
    opening = yamux_frame(yamux.DATA, yamux.SYN, 1, 5, b"hello")
    early = b"".join(_placed(5 + at, b"abcdefgh") for at in (24, 16, 8))
    return [
        _on(0, opening + _placed(13, b"second") + _placed(5, b"placed..") + _placed(19, flags=yamux.FIN)),
        _on(0, opening) + _on(1, early) + _on(0, _placed(5, b"01234567")),
        _on(0, opening + _placed(9, flags=yamux.RST) + _placed(5, b"last")),
        _on(1, _placed(0, b"to nobody") + yamux_frame(yamux.GO_AWAY, 0, 0, 0)),
    ]


@parser("rail frames", _talks)
def _rails(data: bytes) -> None:
    session = YamuxSession(initiator=False, now=0.0, config=YAMUX)
    session.takes_placed = True
    session.set_rails(1, helping=False)
    lanes = [None, StripedLane(main=False)]
    out = memoryview(bytearray(4096))
    for now, begin in enumerate(range(0, len(data), _TURN_BYTES)):
        lane = lanes[data[begin] & 1]
        for event in session.receive(data[begin + 1 : begin + _TURN_BYTES], float(now), lane):
            if isinstance(event, yamux.Opened | yamux.Changed):
                yamux_answers(session, event.stream, float(now))
        while session.fill(out) or session.fill_rail(out):
            pass
        yamux_check(session)
