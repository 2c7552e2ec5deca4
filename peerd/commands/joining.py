"""Joining by one line: fetch the run file, show it, ask, and keep it in the data directory.

The network never names code that runs here, nor files of this machine that are read: each takes a flag of the
volunteer's. What was agreed to is kept as run.yaml; another one later is shown as the difference, and asked about anew.
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio
import typer
import yaml

from peerd.core.errors import ConfigError, PeerdError, RemoteError
from peerd.core.keys import Keypair
from peerd.core.messages.run_link import JoinLink, RunFileTold, is_local, shared_tree
from peerd.core.messages.token import Token, from_text
from peerd.home import make_private_dir, write_atomically
from peerd.log import clean
from peerd.net.clock import RealClock
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.service.peer_stack import peer_stack
from peerd.service.run_offer import fetch_file

FILE: Final = "run.yaml"
TOKEN_FILE: Final = "access.token"
FETCH_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class JoinWish:
    """The volunteer's options beside the line."""

    yes: bool = False
    data: str | None = None
    token: str | None = None
    allow_code: tuple[str, ...] = ()


def fetch(link: JoinLink) -> dict[str, Any]:
    """The run file's tree from the backbone; PeerdError when there is none to be had, or it may not be used."""

    async def ask() -> RunFileTold:
        clock = RealClock()
        stack = peer_stack(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()])  # nobody learns who asks
        return await fetch_file(stack, link, FETCH_S)

    try:
        return shared_tree(trio.run(ask), link.run)
    except* (RemoteError, trio.TooSlowError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        why = clean(str(first)) or f"no answer within {FETCH_S:.0f} s"
        raise PeerdError(f"no run file from the backbone {link.host}:{link.port}: {why}") from None


def default_roles(tree: dict[str, Any]) -> list[str]:
    """The role that a run needs most: hosts of experts, stages of a pipeline, else replicas."""
    if _part(tree, "experts"):
        return ["expert"]
    return ["trainer"] if _part(tree, "pipeline").get("stages", 1) == 1 else ["stage"]


def check_local(tree: dict[str, Any], roles: list[str], wish: JoinWish) -> None:
    """Refuse code, and files of this machine, that the volunteer has not named; ConfigError says what to type."""
    model, data = _part(tree, "model"), _part(tree, "data")
    given = data.get("sources")
    sources = [one for one in (given if isinstance(given, list) else [data]) if isinstance(one, dict)]
    code = [("model.kind", str(model.get("kind", "gpt")))]
    if ":" in (block := str(_part(tree, "experts").get("block", ""))):
        code.append(("experts.block", block))
    code += [("data.path", str(one.get("path", ""))) for one in sources if one.get("kind") == "dataset"]
    for key, name in code:
        file = name.partition(":")[0]
        file = file if file.endswith(".py") else file.replace(".", "/") + ".py"
        if name != "gpt" and not (file in wish.allow_code and Path(file).is_file()):
            name, file = clean(name), clean(file)
            raise ConfigError(
                f"the run needs code of your own: {key} is {name}, and code never comes over the network; get {file} "
                f"from somebody whom you trust, read it, lay it into this folder, and add --allow-code {file}"
            )
    vocab = str(model.get("vocab", "bytes"))
    if vocab != "bytes" and (vocab in ("", "..") or set(vocab) & set("/\\:") or not Path(vocab).is_file()):
        raise ConfigError(f"the run needs its tokenizer: lay the organizer's {clean(vocab)} into this folder")
    local = [one for one in sources if one.get("kind") != "dataset" and is_local(str(one.get("path", "stdlib")))]
    if local and "trainer" in roles and (wish.data is None or len(sources) > 1):
        path = clean(str(local[0]["path"]))
        if len(sources) > 1:
            raise ConfigError(f"the run trains on several sources, {path} among them: write a run file, for --model")
        raise ConfigError(f"the run trains on files ({path}): say where yours are, --data PATH")


def _part(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A section; empty where it is none, which the check of the whole file names."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def agree(tree: dict[str, Any], link: JoinLink, place: Path, wish: JoinWish) -> Path:
    """Show the run and ask, unless it was agreed to before; the file in which it is kept."""
    file = make_private_dir(place) / FILE
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)
    known = file.read_text("utf-8") if file.exists() else None
    if known != text:
        typer.echo(_told(tree, link) if known is None else f"the run file of {link.run} has changed:", err=True)
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


def _told(tree: dict[str, Any], link: JoinLink) -> str:
    organizer = _part(tree, "access").get("organizer")
    signed = f"signed by its organizer {organizer}" if organizer else "signed by nobody: it is the backbone's word"
    return f"run {link.run}, from {link.host}:{link.port} ({link.peer}), {signed}:"


def _ask() -> None:
    if not sys.stdin.isatty():
        raise ConfigError("nobody is there to agree to this run file: read it, and add --yes to the line")
    if not typer.confirm("Take part in it?", default=False, err=True):
        raise PeerdError("not joined")


def _keep_token(given: str, path: Path) -> None:
    """Save a token, given as text or as a file, for its peer."""
    text = given
    try:
        if not given.startswith("peerd-token-"):
            text = Path(given).expanduser().read_text("ascii")
        from_text(Token, text)
    except (OSError, UnicodeDecodeError, RemoteError) as error:
        raise ConfigError(f"--token: neither a token nor a file with one: {error}") from error
    write_atomically(path, text.strip().encode() + b"\n")
    os.chmod(path, 0o600)
