"""Joining by a join link: fetches the run file, checks it, shows it, asks the user, and saves it in the data directory.

The network cannot make this machine run code, read files or connect to private addresses: the volunteer must allow each
with an option. The received bytes are decoded to a typed run file. That value is checked, shown and written as
run.yaml, and the program reads nothing else. Its section `line` records the source, so that later readers apply the
same checks. If the published run file changes later, the user sees the difference and is asked again.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Final

import trio
import typer
from msgspec import structs

from peerd.core.errors import ConfigError, PeerdError, ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.daemon.control.guest import JoinRequest
from peerd.log import clean
from peerd.messages.run_link import JoinLink, RunFileAnswer, is_local, plain_tree, shared_run
from peerd.messages.token import Token, from_text, signed_by
from peerd.role.peer_stack import peer_stack
from peerd.role.run_offer import fetch_file
from peerd.run.check import check
from peerd.run.check_line import function_file
from peerd.run.config import RUN_FILE
from peerd.run.contents import allowed_code, with_digests
from peerd.run.home import make_private_dir, write_atomically
from peerd.run.runfile import LineSection, RunFile, sources_of
from peerd.run.typed_yaml import parse_yaml, to_yaml
from peerd.wire.clock import RealClock
from peerd.wire.tcp.tcp_transport import TcpTransport

FILE: Final = "run.yaml"
TOKEN_FILE: Final = "access.token"
FETCH_S: Final = 15.0
_FAULTS: Final = 5  # faults that one message lists


def fetch(link: JoinLink) -> RunFile:
    """Fetch the published run file from the backbone.

    Raises PeerdError if the backbone sends none, and ConfigError if it is invalid or not for the run of the link.
    """

    async def ask() -> RunFileAnswer:
        clock = RealClock()
        stack = peer_stack(
            Keypair.generate(clock.secure_bytes), clock, [TcpTransport()]
        )  # does not reveal this peer's identity
        return await fetch_file(stack, link, FETCH_S)

    try:
        told = trio.run(ask)
    except* (RemoteError, trio.TooSlowError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        why = clean(str(first)) or f"no answer within {FETCH_S:.0f} s"
        raise PeerdError(f"no run file from the backbone {link.host}:{link.port}: {why}") from None
    try:
        return shared_run(told, link.run)
    except ProtocolViolation as error:
        raise ConfigError(f"the backbone {link.host}:{link.port} cannot be joined: {clean(str(error))}") from None


def default_roles(run: RunFile) -> list[str]:
    """The role that a run needs most: `aux` for users' own loops, `expert`, `stage` for a pipeline, else `trainer`."""
    if run.loop is not None:
        return ["aux"]
    if run.experts is not None:
        return ["expert"]
    return ["trainer"] if run.pipeline.stages == 1 else ["stage"]


def accept(run: RunFile, link: JoinLink, roles: list[str], wish: JoinRequest) -> RunFile:
    """The run file to use: the published one with the user's paths and allowed code. ConfigError says what to type."""
    run = _with_data(run, roles, wish)
    if wish.tokenizer is not None and run.model.vocab != "bytes":
        run = structs.replace(run, model=structs.replace(run.model, vocab=wish.tokenizer))
    named = {function_file(name) for name in _functions(run)}
    code = [allowed_code(file) for file in dict.fromkeys(wish.allow_code) if file in named]
    line = LineSection(link=link.text, data=wish.data or "", tokenizer=wish.tokenizer or "", code=code)
    run = structs.replace(run, line=line)
    faults = [f"{key} {message}" for key, message in check(run)]
    if faults:
        more = f" (and {len(faults) - _FAULTS} more)" if len(faults) > _FAULTS else ""
        raise ConfigError(f"the run file of {clean(link.run)}: {'; '.join(faults[:_FAULTS])}{more}")
    return with_digests(run)


def _with_data(run: RunFile, roles: list[str], wish: JoinRequest) -> RunFile:
    """The run file with the user's own text. Without any, paths of the publisher's files are replaced by ""."""
    data, sources = run.data, [source for _, source in sources_of(run.data)]
    foreign = [source.path for source in sources if source.kind != "dataset" and is_local(source.path)]
    if len(sources) > 1 and (wish.data is not None or (foreign and "trainer" in roles)):
        raise ConfigError("data.sources has several sources with files of their own: write a run file, for --model")
    if wish.data is None and foreign and "trainer" in roles:
        raise ConfigError(f"data.path is {foreign[0]!r:.200}: the run trains on files; add --data PATH with yours")
    if wish.data is None and not foreign:
        return run
    path = wish.data or ""
    if not data.sources:
        return structs.replace(run, data=structs.replace(data, path=path))
    kept = [structs.replace(one, path=path) if path or one.path in foreign else one for one in sources]
    return structs.replace(run, data=structs.replace(data, sources=kept))


def _functions(run: RunFile) -> list[str]:
    """Functions that a run file names, each as `module:function`."""
    named = [run.model.kind, *([run.experts.block] if run.experts is not None else [])]
    named += [source.path for _, source in sources_of(run.data) if source.kind == "dataset"]
    return [name for name in named if ":" in name]


def check_organizer(run: RunFile, place: Path, wish: JoinRequest) -> None:
    """Raise ConfigError if the run file is not signed by the organizer who issued the user's token, or who signed it
    when this run was joined before.

    Otherwise a signature is required only if the run file names an organizer, so a backbone could leave both out.
    """
    organizer, before = run.access.organizer, _organizer_before(place / FILE)
    if before and organizer != before:
        raise ConfigError(
            f"access.organizer is {organizer or 'empty'}; allowed: {before}, who signed this run file when it was "
            f"joined before (to join another run of this name, remove {place / FILE})"
        )
    token = _token_of(place / TOKEN_FILE, wish)
    if token is None:
        return
    if not organizer:
        raise ConfigError(
            "access.organizer is missing, and the run file is not signed; allowed with a token (--token): a run file "
            "that is signed by the organizer who issued it"
        )
    if not signed_by(PeerId.parse(organizer), Token, token):
        raise ConfigError(f"access.organizer is {organizer}; allowed with your token: the organizer who issued it")


def _organizer_before(file: Path) -> str:
    """The organizer that the stored run file names, or "" if it names none or does not exist."""
    if not file.exists():
        return ""
    access = parse_yaml(file, RUN_FILE)[0].get("access")
    return str(access.get("organizer") or "") if isinstance(access, dict) else ""


def agree(run: RunFile, link: JoinLink, place: Path, wish: JoinRequest) -> Path:
    """Show the run file and ask the user, unless they agreed to it before. Returns the path at which it is stored."""
    file = make_private_dir(place) / FILE
    check_organizer(run, place, wish)
    text = to_yaml(plain_tree(run))
    known = file.read_text("utf-8") if file.exists() else None
    if known != text:
        typer.echo(_told(run, link) if known is None else f"the run file of {link.run} has changed:", err=True)
        lines = text.splitlines()
        shown = (
            lines
            if known is None
            else list(difflib.unified_diff(known.splitlines(), lines, "before", "now", "", "", 1))
        )
        typer.echo("\n".join(f"  {line}" for line in shown), err=True)
        if not wish.yes:
            _ask()
        write_atomically(file, text.encode())
    if wish.token is not None:
        _keep_token(wish.token, place / TOKEN_FILE)
    return file


def _told(run: RunFile, link: JoinLink) -> str:
    organizer = run.access.organizer
    signed = f"signed by its organizer {organizer}" if organizer else "not signed: only the backbone vouches for it"
    return f"run {link.run}, from {link.host}:{link.port} ({link.peer}), {signed}:"


def _ask() -> None:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask you about this run file: read it, and add --yes to the command")
    if not typer.confirm("Take part in it?", default=False, err=True):
        raise PeerdError("not joined")


def _token_of(kept: Path, wish: JoinRequest) -> bytes | None:
    """The user's sealed token: the one of --token, else the one stored by an earlier join. None if there is neither."""
    if wish.token is not None:
        return from_text(Token, _token_text(wish.token))
    try:
        return from_text(Token, kept.read_text("ascii"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, RemoteError) as error:
        raise ConfigError(f"{kept} has no valid token: {error}; pass one with --token") from error


def _token_text(given: str) -> str:
    """The text of the token that the user passed: either itself or the path of a file with it."""
    text = given
    try:
        if not given.startswith("peerd-token-"):
            text = Path(given).expanduser().read_text("ascii")
        from_text(Token, text)
    except (OSError, UnicodeDecodeError, RemoteError) as error:
        raise ConfigError(f"--token: neither a token nor a file with one: {error}") from error
    return text


def _keep_token(given: str, path: Path) -> None:
    """Write the token that the user passed, as text or as a file, to `path`, readable by the user only."""
    write_atomically(path, _token_text(given).strip().encode() + b"\n")
    os.chmod(path, 0o600)
