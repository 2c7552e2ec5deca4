"""Hostile yamux sessions: opening, resetting and breaking rules gain a peer nothing that stays."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from peerd.core import limits
from peerd.core.errors import ProtocolViolation, Unreachable
from peerd.wire.yamux import session
from peerd.wire.yamux.session import DATA, RST, SYN, WINDOW, YamuxSession
from peerd.wire.yamux.stream import YamuxStream
from tests.worlds.network.hostile import frame


@pytest.mark.slow
def test_streams_that_are_opened_and_reset_while_nothing_can_be_sent_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(YamuxStream):
        """One that is in `living` for as long as anything refers to it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            living.add(self)

    living = weakref.WeakSet[YamuxStream]()
    monkeypatch.setattr(session, "YamuxStream", Watched)
    mux = YamuxSession(initiator=False, now=0.0)
    for number in range(1, 20_001, 2):
        mux.receive(frame(DATA, SYN, number, 0), 0.0)
        stream = mux.streams[number]
        mux.write(stream, b"greeting")
        mux.receive(frame(WINDOW, RST, number, 0), 0.0)
        mux.abandon(stream)
    assert 0 < len(living) <= limits.RINGED_RESETS + 2
    assert mux.inbound == 0


def test_events_before_a_violation_are_heard_of() -> None:
    mux = YamuxSession(initiator=False, now=0.0)
    events: list[session.Event] = []
    with pytest.raises(ProtocolViolation):
        mux.receive(frame(DATA, SYN, 1, 1, b"x") + frame(WINDOW, RST, 1, 0) + b"\xff" * 12, 0.0, None, events)
    (stream,) = {event.stream for event in events if isinstance(event, session.Opened | session.Changed)}
    assert stream.was_reset
    with pytest.raises(Unreachable):
        mux.write(stream, b"an answer")
