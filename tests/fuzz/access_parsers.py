"""The parsers of tokens and of lists of revoked ones, for the fuzz tests: see `parsers`."""

from __future__ import annotations

from peerd.access.members import RunMembers
from peerd.core.limits import REVOKED_TOKENS
from peerd.messages.token import Revoked, Token, fault, from_text, seal, signed_by, to_text, unseal
from tests.fuzz.parsers import KEYS, OTHER, PARSERS, Corpus, parser

__all__ = ["PARSERS"]


def _tokens() -> Corpus:
    plain = Token(b"12345678", OTHER.peer_id.public_key, "tiny", "Ann", ["stage", "trainer"], 1, 1 << 33)
    bare = Token(bytes(8), KEYS.peer_id.public_key, "r", "", ["aux"], 0, 0)
    return [seal(plain, KEYS), seal(bare, KEYS)]


@parser("token", _tokens)
def _token(data: bytes) -> None:
    token = unseal(Token, data)
    assert token.run.isprintable()
    assert from_text(Token, to_text(Token, data)) == data  # one text only
    fault(token, "tiny", OTHER.peer_id, 1.8e9)
    if len(data) % 16 == 0:
        signed_by(KEYS.peer_id, Token, data)


def _revoked() -> Corpus:
    return [seal(Revoked(number, [bytes([n]) * 8 for n in range(count)]), KEYS) for number, count in ((0, 0), (9, 40))]


@parser("list of revoked tokens", _revoked)
def _revoked_list(data: bytes) -> None:
    ids = unseal(Revoked, data).ids
    assert len(ids) == len(set(ids)) <= REVOKED_TOKENS


def _shown_tokens() -> Corpus:
    return [bytes([index]) + data for index, data in enumerate([*_tokens(), *_revoked()])]


@parser("tokens shown to a roll", _shown_tokens, share=0.3)
def _shown(data: bytes) -> None:
    roll = RunMembers("tiny", KEYS.peer_id, 2)
    if data[:1] < b"\2":
        why = roll.admit(OTHER.peer_id, data[1:], 1.8e9)
        assert why is None or (why.isprintable() and len(why) <= 200)
        assert len(roll) == (1 if why else 2)
    elif roll.learn_revoked(data[1:]):
        assert data[1:] in _revoked()


@parser("token text", lambda: [to_text(Token, data).encode() for data in _tokens()], share=0.3)
def _token_text(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    assert to_text(Token, from_text(Token, text)) == "".join(text.split())
