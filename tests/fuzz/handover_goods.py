"""What is handed over in a `service_scene`: tickets of the hostile peer and of others, and answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from peerd.codec.format.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.encoding import decode
from peerd.messages.handover import Broken, Hop, PassAnswer, PassRequest, RelayRequest, Ticket
from peerd.messages.proof import grant, receipt, signed_ticket
from peerd.messages.swarm import GrantStatement, Mb, MemberInfo, Seqs
from tests.fuzz import goods
from tests.fuzz.bodies import Pool
from tests.fuzz.calls import Good
from tests.fuzz.goods import HOST, MATE, SELF, SEQ
from tests.fuzz.service_scene import MARK
from tests.fuzz.session_points import WHO
from tests.worlds.network.hosts import keypair
from tests.worlds.roles.stagescene import microbatch
from tests.worlds.simulation.clock import EPOCH_S

ME, HONEST = WHO.identity, keypair("honest")
TOKENS, TARGETS = microbatch(1)[0], microbatch(2)[0]
HIDDEN = TensorFrame("float32", (2, 16, 16), np.linspace(-1, 1, 512, dtype="float32").tobytes())
AS_MEMBER = MemberInfo(SELF.text, 1, [], True, since=EPOCH_S + 1)
SIGNED: list[Ticket] = []


def _signed(by: Keypair, low: int, high: int, first: int, route: Sequence[PeerId], attempt: int) -> Ticket:
    bare = Ticket(0, SEQ, attempt, low, high, first, [peer.text for peer in route])
    SIGNED.append(signed_ticket(by.sign, MARK, by.peer_id.text, bare))
    return SIGNED[-1]


def _pass(
    stage: int, by: Keypair, low: int, high: int, first: int, *route: PeerId, attempt: int = 0, seq: int = SEQ
) -> Good:
    """A call with what belongs to it, by a trainer that the conductor has admitted."""
    shown = _signed(by, low, high, first, route, attempt)
    if seq != SEQ:
        shown = signed_ticket(by.sign, MARK, by.peer_id.text, msgspec.structs.replace(shown, seq=seq))
        SIGNED.append(shown)
    granted = GrantStatement(MARK, 1, 0, by.peer_id.text, Seqs.of([SEQ, SEQ + 1]))
    body = PassRequest(MARK, stage, by.peer_id.text, shown, grant(keypair("host").sign, granted))
    frames = [TOKENS if stage == 0 else HIDDEN] if low <= stage <= high else []
    frames += [TARGETS] if high == 1 and stage <= high else []
    return Good("handover/2/pass", body, tuple(frames))


# At the first stage, by its trainer: a whole way, a later attempt, stage 0 anew, stage 1 anew, and what cannot be.
AT_FIRST = [
    _pass(0, ME, 0, 1, 0, HOST, MATE),
    _pass(0, ME, 0, 1, 0, HOST, MATE, seq=SEQ + 1),
    _pass(0, ME, 0, 1, 0, HOST, MATE, attempt=1),
    _pass(0, ME, 0, 0, 0, HOST, MATE, attempt=2),
    _pass(0, ME, 1, 1, 0, HOST, MATE, attempt=2),
    _pass(0, ME, 0, 1, 0, HOST, SELF, attempt=3),
    _pass(0, ME, 0, 0, 0, HOST, attempt=3),
    _pass(0, ME, 0, 1, 0, SELF, MATE, attempt=(1 << 16) - 1),
]
AT_FIRST.append(replace(AT_FIRST[0], frames=(goods.MANY, TARGETS)))
# At the last stage, by a peer of the one before, or its trainer.
AT_LAST = [
    *(_pass(1, by, 0, 1, 0, HOST, MATE, attempt=attempt) for by in (HONEST, ME) for attempt in (0, 1)),
    *(_pass(1, by, 1, 1, 0, HOST, MATE, attempt=2) for by in (HONEST, ME)),
    *(_pass(1, by, 0, 0, 0, HOST, MATE, attempt=2) for by in (HONEST, ME)),
    _pass(1, ME, 1, 1, 1, MATE, attempt=3),
    _pass(1, HONEST, 0, 1, 0, SELF, MATE, attempt=3),
]
# Over the next stage's peer that is hostile, and over one that nobody knows.
OVER_SELF = [
    _pass(0, ME, 0, 1, 0, HOST, SELF),
    _pass(0, ME, 0, 1, 0, HOST, SELF, seq=SEQ + 1),
    _pass(0, ME, 0, 0, 0, HOST, SELF, attempt=1),
    _pass(0, ME, 1, 1, 0, HOST, SELF, attempt=1),
]
_OF_HOST = _pass(1, keypair("host"), 0, 1, 0, SELF, MATE)
CARRY = [
    Good("handover/2/relay", RelayRequest(to, _OF_HOST.body), _OF_HOST.frames)  # type: ignore[arg-type]
    for to in (MATE.text, HOST.text, "x")
]
TICKET_OF_HOST = SIGNED[-1]
POOL = Pool(goods.POOL.texts, (*goods.POOL.data, *(one.signature for one in SIGNED), goods.GRANT.signature))


def passed_for(body: PassRequest, by: Keypair = ME) -> Good:
    """What an honest peer of stage 1 answers, or of stage 0 that only gives its input."""
    shown, mb = body.ticket, Mb(body.trainer, body.ticket.seq)
    is_done = shown.is_done_at(1)
    hop = Hop(by.peer_id.text, receipt(by.sign, MARK, 5, 1, shown.step, mb), 0.1, 0.0, 0.0)
    gradient = (HIDDEN,) if shown.is_done_at(0) else ()
    return Good("handover/2/pass", PassAnswer([hop] if is_done else [], 0.5, None, 1e6), gradient)


def _answers(body: PassRequest) -> list[Good]:
    good = passed_for(body)
    infinite = TensorFrame("float32", (2, 16, 16), b"\x7f" * len(HIDDEN.payload))
    huge = TensorFrame("float32", (2, 16, 16), np.full(512, 1e30, "float32").tobytes())
    bad = [Good(good.method, good.body, (frame,) * len(good.frames)) for frame in (infinite, huge, TOKENS)]
    return [
        good,
        good,
        *bad,
        *(Good(good.method, PassAnswer(broken=Broken(at, HOST.text, "gone"))) for at in (0, 1, 2)),
    ]


def to_pass(data: bytes) -> list[Good]:
    """Answers of the next stage, to a call's body."""
    return _answers(decode(PassRequest, data))


def to_carry_on(data: bytes) -> list[Good]:
    """Answers of a trainer that is to carry a call."""
    return _answers(decode(RelayRequest, data).passed)
