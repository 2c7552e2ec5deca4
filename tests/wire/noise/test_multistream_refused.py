"""Optimistic opening under a refused name: the bytes already sent must not look like a broken negotiation."""

from __future__ import annotations

import pytest

from peerd.core.errors import ProtocolViolation
from peerd.wire.noise.multistream import HEADER, NOT_AVAILABLE, MultistreamSelector, encode_line


@pytest.mark.parametrize("optimistic", [b"\xff" * 100, bytes(40), b"\x05hello", encode_line("/other") * 50])
def test_data_after_a_refused_proposal_is_passed_over(optimistic: bytes) -> None:
    for size in (1, 7, 1000):
        selector = MultistreamSelector(lambda name: name == "/spoken")
        data, answers = HEADER + encode_line("/unknown") + optimistic, b""
        for at in range(0, len(data), size):
            answer, chosen, _ = selector.feed(data[at : at + size])
            assert chosen is None
            answers += answer
        assert answers.startswith(NOT_AVAILABLE)


def test_rubbish_before_any_proposal_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        MultistreamSelector(lambda name: True).feed(b"\xff" * 100)
