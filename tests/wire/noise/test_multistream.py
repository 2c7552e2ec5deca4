"""multistream-select: both sides, in pieces of any size, against talkers that do not keep to it."""

from __future__ import annotations

import pytest

from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.limits import MULTISTREAM_ATTEMPTS, MULTISTREAM_LINE_BYTES
from peerd.wire.noise.multistream import HEADER, NOT_AVAILABLE, MultistreamSelector, Proposal, encode_line


def feed_selector(selector: MultistreamSelector, data: bytes, piece_bytes: int) -> tuple[bytes, str | None, bytes]:
    """All of `data` in pieces; what came after the choice is one string, as a stream would hand it on."""
    answer, chosen, rest = b"", None, b""
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes]
        if chosen is not None:
            rest += piece
        else:
            more, chosen, rest = selector.feed(piece)
            answer += more
    return answer, chosen, rest


def feed_proposal(proposal: Proposal, data: bytes, piece_bytes: int) -> bytes | None:
    rest: bytes | None = None
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes]
        rest = proposal.feed(piece) if rest is None else rest + piece
    return rest


def test_the_bytes_are_those_of_the_specification() -> None:
    assert HEADER == b"\x13/multistream/1.0.0\n"
    assert NOT_AVAILABLE == b"\x03na\n"
    assert Proposal("/x/1").hello == HEADER + b"\x05/x/1\n"


@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 100])
def test_a_spoken_protocol_is_agreed_and_what_follows_is_kept(piece_bytes: int) -> None:
    proposal = Proposal("/x/1")
    answer, chosen, rest = feed_selector(
        MultistreamSelector("/x/1".__eq__), proposal.hello + b"first data", piece_bytes
    )
    assert (answer, chosen, rest) == (encode_line("/x/1"), "/x/1", b"first data")
    assert feed_proposal(proposal, HEADER + answer + b"reply", piece_bytes) == b"reply"


@pytest.mark.parametrize("piece_bytes", [1, 3, 100])
def test_an_unknown_protocol_is_refused_and_another_may_follow(piece_bytes: int) -> None:
    data = HEADER + encode_line("/nope") + encode_line("ls") + encode_line("/x/1")
    answer, chosen, _ = feed_selector(MultistreamSelector("/x/1".__eq__), data, piece_bytes)
    assert (answer, chosen) == (NOT_AVAILABLE * 2 + encode_line("/x/1"), "/x/1")
    with pytest.raises(Refused, match="/nope"):
        feed_proposal(Proposal("/nope"), HEADER + NOT_AVAILABLE, piece_bytes)


def test_after_many_proposals_nothing_more_is_answered() -> None:
    selector = MultistreamSelector(lambda name: False)
    answer, _, _ = selector.feed(HEADER + encode_line("/nope") * MULTISTREAM_ATTEMPTS * 3)
    assert len(answer) < MULTISTREAM_ATTEMPTS * len(NOT_AVAILABLE)
    assert selector.feed(encode_line("/nope") * 1000) == (b"", None, b"")


def test_data_sent_before_a_refusal_is_heard_is_no_crime() -> None:
    selector = MultistreamSelector("/x/1".__eq__)
    answer, chosen, _ = selector.feed(Proposal("/nope").hello + b"\xff\xff\xff\xff optimistic data")
    assert (answer, chosen) == (NOT_AVAILABLE, None)


@pytest.mark.parametrize(
    "raw",
    [
        encode_line("/multistream/2.0.0"),
        b"\x00",
        b"\x02ab",
        b"\xff\xff\x7f",
        b"\x80" * 20,
        encode_line("x" * MULTISTREAM_LINE_BYTES),
        b"GET / HTTP/1.1\r\n" * 9,
    ],
)
def test_what_is_not_multistream_is_a_violation_on_both_sides(raw: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        MultistreamSelector(lambda name: True).feed(raw)
    with pytest.raises(ProtocolViolation):
        Proposal("/x/1").feed(raw)


def test_an_answer_to_another_question_and_a_name_that_is_no_text_are_violations() -> None:
    with pytest.raises(ProtocolViolation, match="answers"):
        Proposal("/x/1").feed(HEADER + encode_line("/y/1"))
    with pytest.raises(ProtocolViolation, match="UTF-8"):
        MultistreamSelector(lambda name: True).feed(HEADER + b"\x03\xff\xfe\n")


def test_a_truncated_agreement_is_no_agreement() -> None:
    proposal = Proposal("/x/1")
    for end in range(len(proposal.hello)):
        assert Proposal("/x/1").feed(proposal.hello[:end]) is None
        assert MultistreamSelector(lambda name: True).feed(proposal.hello[:end])[1] is None
