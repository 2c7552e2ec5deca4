"""Tokens: what an organizer signs to let a peer into a run, and the list of revoked ones.

A token names one peer by its key, so it is no secret: whoever copies it cannot use it. It says for which run, under
what name, for which roles and until when. A revocation list has a number that only grows: an older list never
replaces a newer one. Both are signed over a domain tag and their bytes, and have exactly one encoding. Whether a
token counts now is `fault`'s business; whose connection it came over, the caller's.

On the wire: the organizer's signature, 64 bytes, then the body in msgpack. As text, for files and for copying: a word
that says what it is, and base64url; white space in it means nothing.

A hostile peer may send: anything shorter or longer, bodies that are no token, other encodings of a genuine one,
unprintable names, another's token, an expired one, one of another run, one that nobody or someone else signed, an old
list. `unseal` raises ProtocolViolation for the first three; `fault`, the signature and the list's number settle the
rest.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Annotated, Final, TypeVar

import msgspec

from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.ids import Key, PeerId
from peerd.core.keys import SIGNATURE_BYTES, verify
from peerd.core.limits import REVOKED_BYTES, REVOKED_TOKENS, TOKEN_BYTES, TOKEN_NAME_CHARS, TOKEN_ROLES
from peerd.core.messages.encoding import Message, decode, encode
from peerd.core.record import Signer

NO_TOKEN: Final = "no valid token"  # how every refusal for want of one begins: the caller then shows its own again
ID_BYTES: Final = 8
_MAX_S: Final = 1 << 38  # the year 10680: no calendar function fails on it

Seconds = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_S)]  # Unix time
TokenId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
TokenData = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]  # a sealed token, or nothing
RevokedData = Annotated[bytes, msgspec.Meta(max_length=REVOKED_BYTES)]  # a sealed list, or nothing


class Token(Message, frozen=True):
    """The organizer's statement: this peer may take part in this run, in these roles, until then."""

    id: TokenId
    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # of the peer that may use it
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=TOKEN_NAME_CHARS)]  # for people; may be empty
    roles: Annotated[list[Word], msgspec.Meta(min_length=1, max_length=TOKEN_ROLES)]
    issued: Seconds
    expires: Seconds

    @property
    def peer(self) -> PeerId:
        return PeerId.from_public_key(self.public_key)


class Revoked(Message, frozen=True):
    """The tokens of one organizer that count no more, apart from those that expired anyway."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # grows with each change
    ids: Annotated[list[TokenId], msgspec.Meta(max_length=REVOKED_TOKENS)]


S = TypeVar("S", bound=Token | Revoked)
_DOMAINS: Final[dict[type, bytes]] = {Token: b"peerd token 1\0", Revoked: b"peerd revoked tokens 1\0"}
_WORDS: Final[dict[type, str]] = {Token: "peerd-token-", Revoked: "peerd-revoked-"}
_SIZES: Final[dict[type, int]] = {Token: TOKEN_BYTES, Revoked: REVOKED_BYTES}


def seal(body: Token | Revoked, organizer: Signer) -> bytes:
    """`body` with the organizer's signature, as it travels. ConfigError when it cannot be one."""
    content = encode(body)
    try:
        signed = organizer.sign(_DOMAINS[type(body)] + content) + content
        unseal(type(body), signed)
    except ProtocolViolation as error:
        raise ConfigError(str(error)) from None
    return signed


def unseal(kind: type[S], data: bytes) -> S:
    """The content of a sealed message; ProtocolViolation when it has not that form. Does not check the signature: see
    `signed_by`.
    """
    if not SIGNATURE_BYTES < len(data) <= _SIZES[kind]:
        raise ProtocolViolation(f"a {kind.__name__} of {len(data)} bytes; allowed: up to {_SIZES[kind]}")
    body: S = decode(kind, data[SIGNATURE_BYTES:])
    if encode(body) != data[SIGNATURE_BYTES:]:
        raise ProtocolViolation(f"a {kind.__name__} in another encoding than ours")
    if isinstance(body, Token):
        texts = (body.run, body.name, *body.roles)
        if not all(text.isprintable() for text in texts):
            raise ProtocolViolation("a token whose texts cannot be shown")
        if body.roles != sorted(set(body.roles)):
            raise ProtocolViolation("a token whose roles are out of order")
    elif body.ids != sorted(set(body.ids)):
        raise ProtocolViolation("a list of revoked tokens that is out of order")
    return body


def signed_by(organizer: PeerId, kind: type[Token] | type[Revoked], data: bytes) -> bool:
    """True when `organizer` sealed this."""
    return verify(organizer, _DOMAINS[kind] + data[SIGNATURE_BYTES:], data[:SIGNATURE_BYTES])


def fault(token: Token, run: str, holder: PeerId, now: float) -> str | None:
    """Why the token does not count for `holder` at corrected Unix time `now`; None when only its signature is open."""
    if token.public_key != holder.public_key:
        return f"the token shown is that of peer {token.peer.short}"
    if token.run != run:
        return f"the token shown is for run {token.run}"
    if now >= token.expires:
        return f"the token shown expired {age(now - token.expires)} ago"
    return None


def age(seconds: float) -> str:
    """A span of time as people say it: `45 s`, `3 h`, `12 days`."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def to_text(kind: type[Token] | type[Revoked], data: bytes) -> str:
    """Sealed bytes as one line of text."""
    return _WORDS[kind] + base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(kind: type[Token] | type[Revoked], text: str) -> bytes:
    """The sealed bytes that a text stands for, well formed; ProtocolViolation otherwise. Not yet their signature."""
    word = _WORDS[kind]
    if len(text) > 4 * _SIZES[kind]:
        raise ProtocolViolation(f"a text of {len(text)} characters is too long")
    packed = "".join(text.split())
    if not packed.startswith(word):
        raise ProtocolViolation(f"a text that does not begin with {word}")
    packed = packed.removeprefix(word)
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolViolation(f"not base64url: {error}") from None
    unseal(kind, data)
    if to_text(kind, data) != word + packed:
        raise ProtocolViolation("a text in another encoding than ours")
    return data


def normal_roles(roles: Iterable[str]) -> list[str]:
    """Names of roles as a token lists them."""
    return sorted({role.strip() for role in roles} - {""})


def revoked_key(run: str) -> Key:
    """DHT key under which the organizer of a run publishes the list of revoked tokens."""
    return Key.of(f"{run}/revoked")
