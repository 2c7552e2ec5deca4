"""Token files: a peer's own token, the lists of revoked tokens that it stored, and the organizer's book of issued ones.

The book is an append-only file of JSON lines in `tokens/` of the organizer's data directory. Beside it is the signed
list of revoked tokens, as text that the organizer can pass on. A damaged line, as after a full disk, is an error and
never skipped, since it may be a revocation. Tokens are not secret; the organizer's identity key is. This module does
not use the network. Its async functions read and write files in threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from peerd.access.members import RunMembers
from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import REVOKED_BYTES, REVOKED_TOKENS, TOKEN_NAME_CHARS, TOKEN_ROLES
from peerd.messages.token import ID_BYTES, Revoked, Token, from_text, normal_roles, seal, to_text
from peerd.run.home import (
    IDENTITY_FILE,
    ORGANIZER_DIR,
    data_root,
    known_identities,
    load_identity,
    locked,
    make_private_dir,
    write_atomically,
)
from peerd.run.runfile import RunFile

TOKEN_FILE: Final = "access.token"  # in a peer's data directory, unless the run file names another
BOOK_DIR: Final = "tokens"  # in the organizer's data directory
ISSUED_FILE: Final = "issued.jsonl"
REVOKED_FILE: Final = "revoked.txt"
_DAY_S: Final = 86400
_TEXT_BYTES: Final = 4 * REVOKED_BYTES  # no valid file is longer
_ROLE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")

K = TypeVar("K", Token, Revoked)


# --- a peer's own papers -------------------------------------------------------------------------------------------


class CredentialFiles:
    """Token and revocation files of one peer in one run. `access.access_guard` reads them again periodically."""

    def __init__(self, run: RunFile, home: Path, own: PeerId) -> None:
        self._organizer = PeerId.parse(run.access.organizer)
        self._own = own
        self.token_path = Path(run.access.token).expanduser() if run.access.token else home / TOKEN_FILE
        self._kept = home / f"revoked-{self._organizer.text[-8:]}.txt"
        given = [Path(run.access.revoked).expanduser()] if run.access.revoked else []
        self._lists = [self._kept, *given, *([home / BOOK_DIR / REVOKED_FILE] if self.is_organizer else [])]

    @property
    def is_organizer(self) -> bool:
        """True if this is the organizer's own peer, which needs no token."""
        return self._own == self._organizer

    async def token(self) -> bytes:
        """Call `read_token` in a thread."""
        return await trio.to_thread.run_sync(self.read_token)

    async def revoked(self) -> list[bytes]:
        """Call `read_revoked` in a thread."""
        return await trio.to_thread.run_sync(self.read_revoked)

    async def keep(self, revoked: bytes) -> None:
        """Store the newest list of revoked tokens on disk, for later processes. Ignores disk errors."""
        text = to_text(Revoked, revoked).encode() + b"\n"
        with contextlib.suppress(OSError):
            await trio.to_thread.run_sync(write_atomically, self._kept, text)

    def read_token(self) -> bytes:
        """Read the sealed token; b"" for the organizer's peer. Raises ConfigError if it cannot be read."""
        return b"" if self.is_organizer else _read(Token, self.token_path)

    def read_revoked(self) -> list[bytes]:
        """Read all lists of revoked tokens, without those that cannot be read."""
        found = []
        for path in self._lists:
            with contextlib.suppress(ConfigError):
                found.append(_read(Revoked, path))
        return found


def own_papers(run: RunFile, roles: Sequence[str], home: Path, own: PeerId, now: float) -> CredentialFiles:
    """This peer's token files, after checking that they admit it in `roles`. ConfigError says what to do if not."""
    papers = CredentialFiles(run, home, own)
    organizer = PeerId.parse(run.access.organizer)
    if run.access.revoked:
        _read(Revoked, Path(run.access.revoked).expanduser())
    if papers.is_organizer:
        return papers
    wanted = normal_roles(roles)
    advice = _advice(run, wanted, own, papers.token_path)
    if not papers.token_path.exists():
        raise ConfigError(f"run {run.run} admits members by token, and there is none in {papers.token_path}; {advice}")
    roll = RunMembers(run.run, organizer, run.pipeline.stages)
    for data in papers.read_revoked():
        with contextlib.suppress(ProtocolViolation):
            roll.learn_revoked(data)
    found = roll.judge(own, papers.read_token(), now)
    if isinstance(found, str):
        raise ConfigError(f"no valid token for run {run.run} in {papers.token_path}: {found}; {advice}")
    for role in wanted:
        if found.lacks(frozenset({role})):
            raise ConfigError(f"the token in {papers.token_path} is not for the role {role}; {advice}")
    return papers


def _advice(run: RunFile, roles: Sequence[str], own: PeerId, path: Path) -> str:
    """How to get a token: the command to type if the organizer's identity is on this machine, else whom to ask."""
    organizer, first = PeerId.parse(run.access.organizer), data_root() / ORGANIZER_DIR
    for place in (first, *known_identities()):
        with contextlib.suppress(ConfigError):
            if (place / IDENTITY_FILE).exists() and load_identity(place).peer_id == organizer:
                names = f" --roles {','.join(roles)}" if roles else ""
                where = "" if place == first else f" --data-dir {shlex.quote(str(place))}"
                typed = f"peerd token issue --run {shlex.quote(run.run)} --peer {own}{names}{where}"
                return f"the organizer's identity is on this machine, so type: {typed} > {shlex.quote(str(path))}"
    asked = f" in the roles {', '.join(roles)}" if roles else ""
    return f"ask the organizer ({organizer}) for a token for peer {own}{asked}, and save it as {path}"


def _read(kind: type[K], path: Path) -> bytes:
    what = "token" if kind is Token else "list of revoked tokens"
    try:
        with path.open("rb") as file:
            raw = file.read(_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the {what} {path} can't be read: {error.strerror or error}") from error
    try:
        return from_text(kind, raw.decode("ascii"))
    except (UnicodeDecodeError, ProtocolViolation) as error:
        why = "not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path} has no valid {what}: {why}; copy the whole text again") from error


# --- the organizer's book ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """Contents of a token to issue: run, peer, owner's name, roles, and days until it expires."""

    run: str
    peer: str
    name: str
    roles: Sequence[str]
    days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedToken:
    """One token in the book. Times are in Unix seconds; `revoked` is None if the token was not revoked."""

    id: str
    run: str
    peer: str
    name: str
    roles: list[str]
    issued: int
    expires: int
    revoked: int | None = None

    def state(self, now: float) -> str:
        return "revoked" if self.revoked is not None else "expired" if now >= self.expires else "valid"


class TokenBook:
    """The tokens that one organizer issued and revoked."""

    def __init__(self, data_dir: Path, organizer: Keypair) -> None:
        self.folder = make_private_dir(data_dir / BOOK_DIR)
        self.organizer = organizer.peer_id
        self._keypair = organizer
        self._path = self.folder / ISSUED_FILE

    def entries(self) -> list[IssuedToken]:
        """All issued tokens, in the order in which they were issued."""
        return list(self._read()[0].values())

    def issue(self, grant: TokenGrant, now: float) -> str:
        """Issue a token, and add it to the book. Returns it as text. Raises ConfigError if the grant is invalid."""
        token = _token(grant, os.urandom(ID_BYTES), int(now))
        text = to_text(Token, seal(token, self._keypair))
        entry = IssuedToken(
            id=token.id.hex(),
            run=token.run,
            peer=token.peer.text,
            name=token.name,
            roles=token.roles,
            issued=token.issued,
            expires=token.expires,
        )
        with locked(self.folder):
            self._read()  # raises if the book is damaged, before anything is added
            self._append({key: value for key, value in asdict(entry).items() if key != "revoked"})
        return text

    def revoke(self, wanted: str, now: float) -> IssuedToken:
        """Revoke a token, given its id or the beginning of it. Does nothing if it is revoked already."""
        with locked(self.folder):
            entries, number = self._read()
            matching = [entry for entry in entries.values() if wanted and entry.id.startswith(wanted.lower())]
            if len(matching) != 1:
                why = "several tokens begin with it" if matching else "there is no such token"
                raise ConfigError(f"{wanted!r}: {why} in {self._path}; `peerd token list` shows them")
            entry = matching[0]
            if entry.revoked is None:
                live = [e for e in entries.values() if e.state(now) == "revoked" and e.expires > now]
                if len(live) >= REVOKED_TOKENS:
                    raise ConfigError(f"{REVOKED_TOKENS} revoked tokens have not expired; the list cannot hold more")
                entry = entries[entry.id] = replace(entry, revoked=int(now))
                self._append({"revoke": entry.id, "at": entry.revoked})
                number += 1
            self._publish(entries, number, now)
        return entry

    def _publish(self, entries: dict[str, IssuedToken], number: int, now: float) -> None:
        ids = sorted(bytes.fromhex(e.id) for e in entries.values() if e.revoked is not None and e.expires > now)
        text = to_text(Revoked, seal(Revoked(number, ids), self._keypair))
        write_atomically(self.folder / REVOKED_FILE, text.encode() + b"\n", mode=0o644)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self._path} can't be written: {error.strerror or error}") from error

    def _read(self) -> tuple[dict[str, IssuedToken], int]:
        """The tokens by id, and the number of revocations, which is also the number of the newest list."""
        entries: dict[str, IssuedToken] = {}
        number = 0
        try:
            lines = self._path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return entries, number
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} can't be read: {error}") from error
        for at, line in enumerate(lines, 1):
            try:
                told = json.loads(line)
                if "revoke" in told:
                    entries[told["revoke"]] = replace(entries[told["revoke"]], revoked=int(told["at"]))
                    number += 1
                else:
                    entries[told["id"]] = IssuedToken(**told)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{self._path}, line {at}: damaged; repair or remove this line") from error
        return entries, number


def _token(grant: TokenGrant, token_id: bytes, now: int) -> Token:
    try:
        peer = PeerId.parse(grant.peer)
    except ValueError as error:
        raise ConfigError(
            f"--peer {grant.peer!r} is not a peer id; that peer shows its id with `peerd identity`"
        ) from error
    if not 0 < len(grant.run) <= 64 or not grant.run.isprintable():
        raise ConfigError("--run: allowed are 1 to 64 printable characters, as in the run file")
    if len(grant.name) > TOKEN_NAME_CHARS or not grant.name.isprintable():
        raise ConfigError(f"--name: allowed are up to {TOKEN_NAME_CHARS} printable characters")
    roles = normal_roles(grant.roles)
    wrong = next((role for role in roles if not _ROLE.fullmatch(role)), None)
    if wrong is not None or not roles:
        raise ConfigError(f"--roles: {wrong or ''!r} is not a role; separate names with commas, as in stage,trainer")
    if len(roles) > TOKEN_ROLES:
        raise ConfigError(f"--roles has {len(roles)} roles; allowed: up to {TOKEN_ROLES}")
    return Token(token_id, peer.public_key, grant.run, grant.name, roles, now, now + grant.days * _DAY_S)
