"""Tokens: one encoding, one peer, one run; nothing else passes, and what is wrong is said."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.keys import Keypair
from peerd.core.limits import REVOKED_BYTES, REVOKED_TOKENS, TOKEN_BYTES
from peerd.messages.contributions import Contributed, decode_contributed
from peerd.messages.encoding import encode
from peerd.messages.token import Revoked, Token, age, fault, from_text, normal_roles, seal, signed_by, to_text, unseal

ORGANIZER, ANN, BOB = (Keypair.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
NOW = 1_800_000_000


def ann(**changes: Any) -> Token:
    plain = Token(b"12345678", ANN.peer_id.public_key, "tiny", "Ann", ["stage", "trainer"], NOW, NOW + 60)
    return msgspec.structs.replace(plain, **changes)


texts = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
tokens = st.builds(
    Token,
    id=st.binary(min_size=8, max_size=8),
    public_key=st.binary(min_size=32, max_size=32),
    run=texts,
    name=st.just("") | texts,
    roles=st.sets(texts, min_size=1, max_size=5).map(sorted),
    issued=st.integers(0, 1 << 37),
    expires=st.integers(0, 1 << 37),
)
lists = st.builds(
    Revoked, number=st.integers(0, 1 << 50), ids=st.sets(st.binary(min_size=8, max_size=8), max_size=20).map(sorted)
)


@pytest.mark.slow
@given(tokens | lists)
def test_what_was_sealed_is_read_back_the_same_from_bytes_and_from_text(body: Token | Revoked) -> None:
    kind, other = (Token, Revoked) if isinstance(body, Token) else (Revoked, Token)
    data = seal(body, ORGANIZER)
    assert unseal(kind, data) == body
    assert signed_by(ORGANIZER.peer_id, kind, data)
    assert not signed_by(ANN.peer_id, kind, data)
    assert not signed_by(ORGANIZER.peer_id, other, data)  # a list never passes for a token
    assert from_text(kind, to_text(kind, data)) == data
    wrapped = "\n  ".join(to_text(kind, data)[at : at + 20] for at in range(0, 4000, 20))
    assert from_text(kind, f"\r\n{wrapped}\t\n") == data
    with pytest.raises(ProtocolViolation):
        from_text(other, to_text(kind, data))


@given(st.data())
def test_a_changed_byte_is_malformed_or_not_signed(draws: st.DataObject) -> None:
    data = bytearray(seal(ann(), ORGANIZER))
    at = draws.draw(st.integers(0, len(data) - 1))
    data[at] ^= draws.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolViolation):
        unseal(Token, bytes(data))
        assert not signed_by(ORGANIZER.peer_id, Token, bytes(data))


def test_cut_off_and_trailing_bytes_are_refused_everywhere() -> None:
    for kind, body in ((Token, ann()), (Revoked, Revoked(3, [b"12345678"]))):
        data = seal(body, ORGANIZER)
        for end in range(len(data)):
            with pytest.raises(ProtocolViolation):
                unseal(kind, data[:end])
        with pytest.raises(ProtocolViolation):
            unseal(kind, data + b"\0")


def test_a_token_has_one_encoding_only() -> None:
    content = encode(ann())
    roles = content.index(b"\x92\xa5stage")
    longer = content[:roles] + b"\xdc\x00\x02" + content[roles + 1 :]  # the same list, its length in more bytes
    with pytest.raises(ProtocolViolation, match="another encoding"):
        unseal(Token, bytes(64) + longer)
    text = to_text(Token, seal(ann(name="An"), ORGANIZER))
    assert (len(text) - len("peerd-token-")) % 4  # so the last character has bits that mean nothing
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    with pytest.raises(ProtocolViolation, match="another encoding"):
        from_text(Token, text[:-1] + last[last.index(text[-1]) + 1])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "An\x1b[31mn"}, "cannot be shown"),
        ({"run": "a\nb"}, "cannot be shown"),
        ({"roles": ["trainer", "stage"]}, "out of order"),
        ({"roles": ["stage", "stage"]}, "out of order"),
        ({"roles": []}, "length"),
        ({"roles": ["x" * 33]}, "length"),
        ({"name": "x" * 65}, "length"),
        ({"run": ""}, "length"),
        ({"id": b"1234567"}, "length"),
        ({"expires": 1 << 38}, "int"),
        ({"expires": -1}, "int"),
        ({"run": "𝕩" * 64, "name": "𝕩" * 64, "roles": sorted("𝕩" * 10 + chr(c) * 22 for c in range(97, 108))}, "bytes"),
    ],
)
def test_a_token_that_nobody_would_take_is_never_sealed(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        seal(ann(**changes), ORGANIZER)


def test_the_largest_list_fits_and_one_more_does_not() -> None:
    ids = [number.to_bytes(8, "big") for number in range(REVOKED_TOKENS)]
    data = seal(Revoked((1 << 53) - 1, ids), ORGANIZER)
    assert len(data) <= REVOKED_BYTES
    assert from_text(Revoked, to_text(Revoked, data)) == data
    with pytest.raises(ConfigError):
        seal(Revoked(1, [*ids, b"\xff" * 8]), ORGANIZER)
    with pytest.raises(ConfigError, match="out of order"):
        seal(Revoked(1, ids[::-1]), ORGANIZER)


def test_the_reason_why_a_token_does_not_count_is_named() -> None:
    assert fault(ann(), "tiny", ANN.peer_id, NOW + 59.9) is None
    assert fault(ann(), "tiny", BOB.peer_id, NOW) == f"the token shown is that of peer {ANN.peer_id.short}"
    assert fault(ann(), "large", ANN.peer_id, NOW) == "the token shown is for run tiny"
    assert fault(ann(), "tiny", ANN.peer_id, NOW + 60) == "the token shown expired 0 s ago"
    assert fault(ann(), "tiny", ANN.peer_id, NOW + 60 + 86400 * 3) == "the token shown expired 3 days ago"
    assert [age(s) for s in (-1.0, 119.0, 120.0, 7200.0, 172_800.0)] == ["0 s", "119 s", "2 min", "2 h", "2 days"]


def test_roles_are_listed_in_one_way() -> None:
    assert normal_roles([" trainer", "stage", "stage", ""]) == ["stage", "trainer"]


def test_contributions_are_bounded_numbers() -> None:
    told = Contributed(1, 2, 3, 4, b"token")
    assert decode_contributed(encode(told)) == told
    for bad in (Contributed(-1, 0, 0, 0), Contributed(1 << 62, 0, 0, 0), Contributed(0, 0, 0, 1 << 40)):
        with pytest.raises(ProtocolViolation):
            decode_contributed(encode(bad))
    with pytest.raises(ProtocolViolation):
        decode_contributed(encode(Contributed(0, 0, 0, 0, bytes(TOKEN_BYTES + 1))))
