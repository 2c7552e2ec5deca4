"""Messages of hand-over have the bytes that were agreed; a ticket names one way, through stages in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import is_peer_text
from peerd.core.keys import Keypair
from peerd.core.limits import ATTEMPTS, BROKEN_CHARS, STAGES
from peerd.core.varint import encode_varint
from peerd.messages.encoding import Message, decode, encode
from peerd.messages.handover import Broken, Hop, NotFiniteAt, PassAnswer, PassRequest, RelayRequest, Ticket
from peerd.messages.proof import grant, is_ticket_of, receipt, signed_ticket
from peerd.messages.swarm import GrantStatement, Mb, Receipt, Seqs

CONDUCTOR, TRAINER, *STAGE_KEYS = (Keypair.from_seed(bytes([n]) * 32) for n in range(5))
OWN, ROUTE = TRAINER.peer_id.text, [key.peer_id.text for key in STAGE_KEYS]
RUN, OTHER_RUN = bytes(range(16)), bytes(range(16, 32))
GOLDEN = Path(__file__).parents[1] / "golden" / "handover_v2.bin"


def ticket(**changes: Any) -> Ticket:
    good = Ticket(7, (3 << 31) + 5, 0, 0, 2, 0, ROUTE)
    return signed_ticket(TRAINER.sign, RUN, OWN, msgspec.structs.replace(good, **changes))


def messages() -> list[Message]:
    shown = grant(CONDUCTOR.sign, GrantStatement(RUN, 4, 7, OWN, Seqs.of([(3 << 31) + 5])))
    whole = PassRequest(RUN, 0, OWN, ticket(), shown)
    again = PassRequest(RUN, 1, OWN, ticket(attempt=65_535, low=1, high=1, first=0), shown, 12.5e6)
    hops = [
        Hop(name, receipt(key.sign, RUN, 5, stage, 7, Mb(OWN, (3 << 31) + 5)))
        for stage, (name, key) in enumerate(zip(ROUTE, STAGE_KEYS, strict=True))
    ]
    hops[1] = msgspec.structs.replace(
        hops[1], service_s=0.25, wait_s=1.5, onward_s=2.0, way="relay", instead_of=ROUTE[2]
    )
    return [
        whole,
        again,
        PassRequest(
            RUN, STAGES - 1, OWN, ticket(low=STAGES - 1, high=STAGES - 1, first=STAGES - 2, route=ROUTE[:2]), None
        ),
        RelayRequest(ROUTE[1], again),
        PassAnswer(),
        PassAnswer(hops, 3.25, None, 1e6),
        PassAnswer(broken=Broken(2, ROUTE[2], "the peer has left the swarm")),
    ]


def test_messages_survive_their_encoding_and_look_as_they_always_did() -> None:
    raws = [encode(message) for message in messages()]
    assert [decode(type(message), raw) for message, raw in zip(messages(), raws, strict=True)] == messages()
    assert b"".join(encode_varint(len(raw)) + raw for raw in raws) == GOLDEN.read_bytes()


def test_a_way_that_ends_since_values_are_not_finite_is_told_from_one_that_is_broken() -> None:
    for broken in (NotFiniteAt(2, ROUTE[2], "the output"), Broken(2, ROUTE[2], "the output")):
        assert decode(PassAnswer, encode(PassAnswer(broken=broken))).broken == broken


def test_every_message_of_hand_over_is_among_the_golden_ones() -> None:
    made = {kind for kind in Message.__subclasses__() if kind.__module__ == PassRequest.__module__}
    assert made == {type(message) for message in messages()}


# --- what a ticket may say --------------------------------------------------------------------------------------------
class Raw(Message, frozen=True):
    """What a hostile peer may put in a ticket's place."""

    ticket: tuple[Any, ...]


class Shown(Message, frozen=True):
    """A ticket as it is decoded."""

    ticket: Ticket


NEAR = st.integers(-1, 5)


@given(NEAR, NEAR, NEAR, st.integers(0, 6))
def test_a_ticket_is_taken_if_and_only_if_its_route_fits_its_stages(
    low: int, high: int, first: int, count: int
) -> None:
    """The stages to be done follow each other; the route has these, and at most one more at each end."""
    stages = list(range(first, first + count))
    done = list(range(low, high + 1))
    fits = bool(done) and stages[:1] in ([low], [low - 1]) and stages[-1:] in ([high], [high + 1]) and stages[0] >= 0
    fits = fits and low >= 0
    raw = encode(Raw((0, 0, 0, low, high, first, ["x"] * count, b"")))
    if not fits:
        with pytest.raises(ProtocolViolation):
            decode(Shown, raw)
        return
    found = decode(Shown, raw).ticket
    assert [stage for stage in range(-2, 9) if found.peer_of(stage) is not None] == stages
    assert [stage for stage in range(-2, 9) if found.is_done_at(stage)] == done
    assert found.last == stages[-1]


@pytest.mark.parametrize(
    "bad",
    [
        {"attempt": ATTEMPTS},
        {"attempt": -1},
        {"seq": 1 << 62},
        {"step": -1},
        {"high": STAGES, "route": ["x"] * (STAGES + 1)},
        {"route": []},
        {"route": ["x" * 65] * 3},
        {"signature": bytes(65)},
    ],
    ids=str,
)
def test_a_ticket_out_of_bounds_is_refused_in_decoding(bad: dict[str, Any]) -> None:
    values = dict(zip(Ticket.__struct_fields__, (0, 0, 0, 0, 2, 0, ["x"] * 3, b""), strict=True)) | bad
    with pytest.raises(ProtocolViolation):
        decode(Shown, encode(Raw(tuple(values.values()))))


def test_hops_and_reasons_have_bounds() -> None:
    class RawPassed(Message, frozen=True):
        hops: list[Any]
        loss_sum: float
        broken: Any

    hop = (ROUTE[0], (0, b""))
    assert len(decode(PassAnswer, encode(RawPassed([hop] * STAGES, 0.0, None))).hops) == STAGES
    for hops, broken in (
        ([hop] * (STAGES + 1), None),
        ([], (0, "x", "r" * (BROKEN_CHARS + 1))),
        ([(ROUTE[0], (0, b""), float("nan"))], None),
        ([(ROUTE[0], (0, b""), 0.0, 0.0, 0.0, "by post")], None),
    ):
        with pytest.raises(ProtocolViolation):
            decode(PassAnswer, encode(RawPassed(hops, 0.0, broken)))


def test_names_are_those_of_peers_and_each_peer_has_one() -> None:
    """White space around a name, which base58 overlooks, would make several of it."""
    assert ticket().is_well_named
    for odd in ("", "x", ROUTE[0] + " ", ROUTE[0] + "\n", " " + ROUTE[0], ROUTE[0][:-1], "\u00e9" * 20):
        assert not is_peer_text(odd)
        assert not ticket(route=[ROUTE[0], odd, ROUTE[2]]).is_well_named


# --- what a signature is worth ----------------------------------------------------------------------------------------
def test_a_ticket_is_its_trainers_word_for_one_attempt_in_one_run() -> None:
    good = ticket()
    assert is_ticket_of(TRAINER.peer_id, RUN, good)
    assert not is_ticket_of(TRAINER.peer_id, OTHER_RUN, good)
    assert not is_ticket_of(CONDUCTOR.peer_id, RUN, good)
    for changes in (
        {"step": 8},
        {"seq": 9},
        {"attempt": 1},
        {"low": 1},
        {"high": 1},
        {"first": 1, "low": 1, "high": 3},
        {"route": [ROUTE[1], ROUTE[0], ROUTE[2]]},
        {"signature": good.signature[:-1]},
        {"signature": b""},
        {"signature": bytes(64)},
    ):
        assert not is_ticket_of(TRAINER.peer_id, RUN, msgspec.structs.replace(good, **changes)), changes


def test_a_ticket_is_neither_a_grant_nor_a_receipt() -> None:
    shown = grant(TRAINER.sign, GrantStatement(RUN, 4, 7, OWN, Seqs.of([5])))
    signed: Receipt = receipt(TRAINER.sign, RUN, 5, 0, 7, Mb(OWN, 5))
    for signature in (shown.signature, signed.signature):
        assert not is_ticket_of(TRAINER.peer_id, RUN, msgspec.structs.replace(ticket(), signature=signature))
