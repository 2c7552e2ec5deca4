"""Whatever bytes a peer sends, a parser accepts them or raises ProtocolViolation; soon, and in little memory."""

from __future__ import annotations

import re

import pytest

from peerd.core.errors import PeerdError
from tests.fuzz import (
    access_parsers,
    handover_parsers,
    line_parsers,
    link_parsers,
    map_parsers,
    network_parsers,
    position_parsers,
    rail_parsers,
)
from tests.fuzz.parsers import PARSERS, Parser
from tests.kit.amount import mutations
from tests.kit.mutate import INPUT_BYTES_MAX, accepts, fuzz, mutated, worst_allocation

FEW, MANY, TRACED = 500, 100_000, 2_000
# Beyond what was held before: a few copies of the largest input, and the 1 MiB of payload that the calls accept.
HELD_BYTES_MAX = 8 * INPUT_BYTES_MAX + (2 << 20)

joining = (
    *(access_parsers, handover_parsers, line_parsers, link_parsers),
    *(map_parsers, network_parsers, position_parsers, rail_parsers),
)
for joined in joining:
    assert joined.PARSERS is PARSERS  # by importing
each_parser = pytest.mark.parametrize("parser", [pytest.param(one, id=one.name) for one in PARSERS])


@each_parser
def test_a_parser_accepts_its_own_corpus(parser: Parser) -> None:
    assert [data for data in parser.corpus() if not accepts(parser.parse, data, parser.allowed)] == []


@each_parser
def test_a_parser_survives_a_few_mutated_inputs(parser: Parser) -> None:
    count = max(50, int(FEW * parser.share))
    assert fuzz(parser.parse, parser.corpus(), count, seed=1, also_allowed=parser.allowed) == ""


@each_parser
@pytest.mark.slow
def test_a_parser_survives_many_mutated_inputs(parser: Parser) -> None:
    count = mutations(int(MANY * parser.share))
    assert fuzz(parser.parse, parser.corpus(), count, seed=2, also_allowed=parser.allowed) == ""


@each_parser
@pytest.mark.slow
def test_no_input_makes_a_parser_hold_much_memory(parser: Parser) -> None:
    held, index = worst_allocation(parser.parse, parser.corpus(), mutations(int(TRACED * parser.share)), seed=3)
    assert held < HELD_BYTES_MAX, f"{held} bytes for input {index} of seed 3"


def test_an_input_follows_from_its_seed_and_index_alone() -> None:
    corpus = [b"first", b"second"]
    inputs = [mutated(corpus, 5, index) for index in range(200)]
    assert inputs == [mutated(corpus, 5, index) for index in range(200)]
    assert len(set(inputs)) > 150
    assert inputs != [mutated(corpus, 6, index) for index in range(200)]


def test_the_harness_notices_another_error_than_the_protocols() -> None:
    def careless(data: bytes) -> None:
        data[7]

    assert re.match(r"IndexError.* for input \d+ of seed 4", fuzz(careless, [b"12345678"], 1000, seed=4))


def test_the_harness_notices_memory_that_a_length_claims() -> None:
    def trusting(data: bytes) -> None:
        if len(data) >= 4:
            bytearray(min(int.from_bytes(data[:4], "big"), 1 << 24))

    held, _ = worst_allocation(trusting, [b"\0\0\0\4data"], 100, seed=5)
    assert held > HELD_BYTES_MAX


def test_the_harness_lets_the_protocols_own_errors_pass() -> None:
    def strict(_: bytes) -> None:
        raise PeerdError("always")

    assert fuzz(strict, [b"x"], 1).startswith("PeerdError")
    assert fuzz(strict, [b"x"], 1, also_allowed=(PeerdError,)) == ""
