"""Tokens, by which an organizer admits a peer to a run, and the list of revoked tokens.

A token contains one peer's public key, so it need not be secret: a copy is useless to other peers. It also has the run,
a name, the allowed roles and the expiry. A revocation list has a number that only grows, so that an older list never
replaces a newer one. Both are signed over a domain tag and their bytes, and have exactly one encoding. `fault` decides
whether a token is valid now; the caller checks that it came over the holder's own connection.

On the wire: the organizer's signature, 64 bytes, then the body in msgpack. As text, for files and for copying: a prefix
that names the type, then base64url; white space is ignored.

A hostile peer may send: data of a wrong length, invalid bodies, other encodings of a genuine token, unprintable names;
another peer's token, an expired one, one of another run, one with an invalid signature, an old list. `unseal` raises
ProtocolViolation for the former; `fault`, `signed_by` and the list's number detect the latter.
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
from peerd.core.record import Signer
from peerd.messages.encoding import Message, decode, encode

NO_TOKEN: Final = "no valid token"  # begins every refusal for lack of a token
ID_BYTES: Final = 8
_MAX_S: Final = 1 << 38  # the year 10680, valid for calendar functions

Seconds = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_S)]  # Unix time
TokenId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
TokenData = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]  # a sealed token, or nothing
RevokedData = Annotated[bytes, msgspec.Meta(max_length=REVOKED_BYTES)]  # a sealed list, or nothing


class Token(Message, frozen=True):
    """The organizer's permission for one peer to take part in a run, in these roles, until `expires`."""

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
    """The revoked tokens of one organizer, without those that have expired."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # increases with each change
    ids: Annotated[list[TokenId], msgspec.Meta(max_length=REVOKED_TOKENS)]


S = TypeVar("S", bound=Token | Revoked)
_DOMAINS: Final[dict[type, bytes]] = {Token: b"peerd token 1\0", Revoked: b"peerd revoked tokens 1\0"}
_WORDS: Final[dict[type, str]] = {Token: "peerd-token-", Revoked: "peerd-revoked-"}
_SIZES: Final[dict[type, int]] = {Token: TOKEN_BYTES, Revoked: REVOKED_BYTES}


def seal(body: Token | Revoked, organizer: Signer) -> bytes:
    """Encode and sign `body` as the organizer. Raises ConfigError if the content is invalid."""
    content = encode(body)
    try:
        signed = organizer.sign(_DOMAINS[type(body)] + content) + content
        unseal(type(body), signed)
    except ProtocolViolation as error:
        raise ConfigError(str(error)) from None
    return signed


def unseal(kind: type[S], data: bytes) -> S:
    """Decode a sealed token or list. Raises ProtocolViolation. Does not verify the signature: see `signed_by`."""
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
    """True if the signature in `data` is the organizer's."""
    return verify(organizer, _DOMAINS[kind] + data[SIGNATURE_BYTES:], data[:SIGNATURE_BYTES])


def fault(token: Token, run: str, holder: PeerId, now: float) -> str | None:
    """Reason why the token is invalid for `holder` at corrected Unix time `now`, or None if it is valid.

    Does not verify the signature.
    """
    if token.public_key != holder.public_key:
        return f"the token shown is that of peer {token.peer.short}"
    if token.run != run:
        return f"the token shown is for run {token.run}"
    if now >= token.expires:
        return f"the token shown expired {age(now - token.expires)} ago"
    return None


def age(seconds: float) -> str:
    """A duration as text for people: `45 s`, `3 h`, `12 days`."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def to_text(kind: type[Token] | type[Revoked], data: bytes) -> str:
    """Encode sealed bytes as one line of text."""
    return _WORDS[kind] + base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(kind: type[Token] | type[Revoked], text: str) -> bytes:
    """Decode text into sealed bytes. Raises ProtocolViolation if malformed. Does not verify the signature."""
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
    """Role names in a token's form: stripped, sorted, without duplicates."""
    return sorted({role.strip() for role in roles} - {""})


def revoked_key(run: str) -> Key:
    """DHT key under which the organizer of a run publishes the list of revoked tokens."""
    return Key.of(f"{run}/revoked")
