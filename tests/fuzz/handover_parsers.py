"""The messages of hand-over and the judge of tickets, for the fuzz tests: see `parsers`."""

from __future__ import annotations

import msgspec

from peerd.core.errors import PeerdError
from peerd.core.limits import STAGES
from peerd.messages.encoding import decode, encode
from peerd.messages.handover import PassAnswer, PassRequest, RelayRequest, Ticket
from peerd.pipeline.routes.tickets import Tickets
from tests.fuzz import handover_goods as goods
from tests.fuzz.parsers import PARSERS, Corpus, parser

__all__ = ["PARSERS"]
_KINDS = (PassRequest, RelayRequest, PassAnswer)


def _said() -> Corpus:
    found = [good.body for good in (*goods.AT_FIRST, *goods.AT_LAST, *goods.CARRY)]
    found += [goods.passed_for(good.body).body for good in goods.AT_LAST if isinstance(good.body, PassRequest)]
    return [bytes([_KINDS.index(type(body))]) + encode(body) for body in found]  # type: ignore[arg-type]


def _holds(ticket: Ticket) -> None:
    assert 0 <= ticket.first <= ticket.low <= ticket.high <= ticket.last < STAGES + 1
    stages = [ticket.peer_of(stage) for stage in range(ticket.first, ticket.last + 1)]
    assert stages == ticket.route
    assert ticket.peer_of(ticket.last + 1) is ticket.peer_of(ticket.first - 1) is None


@parser("messages of hand-over", _said)
def _messages(data: bytes) -> None:
    kind = _KINDS[data[0] % len(_KINDS)] if data else PassRequest
    body = decode(kind, data[1:])
    assert encode(decode(kind, encode(body))) == encode(body)
    if isinstance(body, PassRequest):
        _holds(body.ticket)


@parser("tickets shown to their judge", lambda: [one for one in _said() if one[0] == 0], share=0.3)
def _shown(data: bytes) -> None:
    body = decode(PassRequest, data[1:])
    judge = Tickets(goods.MARK, goods.HOST.text, 0, 2)
    for caller in (body.trainer, goods.MATE.text):
        why = judge.objection(caller, body, {goods.MATE.text})
        assert why is None or isinstance(why, PeerdError)
        if why is None:
            assert body.ticket in goods.SIGNED
            judge.begin(body)
            assert not judge.objection(caller, body, ())
            earlier = msgspec.structs.replace(body, ticket=msgspec.structs.replace(body.ticket, attempt=0))
            assert (judge.objection(caller, earlier, ()) is None) == (body.ticket.attempt == 0)
