"""`peerd token`: commands of a run's organizer to issue and revoke tokens, and to sign a run file.

The organizer is an identity in a data directory, created there at the first use. Its key signs. Tokens go to stdout,
so that they can be piped, and instructions to stderr.
"""

from __future__ import annotations

import difflib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:  # imports other than typer wait until a command runs
    from peerd.access.token_files import IssuedToken, TokenBook

LONGEST_DAYS: Final = 3650

app = typer.Typer(help="Issue and revoke tokens for invited peers.", no_args_is_help=True, rich_markup_mode=None)

Organizer = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Folder of the organizer's identity and list of tokens."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]


@app.command()
def issue(
    run: Annotated[str, typer.Option(metavar="NAME", help="The run that the token is for.")],
    peer: Annotated[str, typer.Option(metavar="ID", help="The peer that may use it: 12D3KooW...")],
    roles: Annotated[
        str, typer.Option(metavar="NAMES", help="Roles that it may have, separated by commas: names, or module:Class.")
    ] = "stage,trainer",
    name: Annotated[str, typer.Option(metavar="TEXT", help="Name of its owner, for the leaderboard.")] = "",
    days: Annotated[int, typer.Option(min=1, max=LONGEST_DAYS, help="Days until it expires.")] = 30,
    data_dir: Organizer = None,
) -> None:
    """Sign a token for one peer, and print it."""
    from peerd.access.token_files import TOKEN_FILE, TokenGrant
    from peerd.messages.token import Token, from_text, unseal

    _, book = _book(data_dir)
    grant = TokenGrant(run=run, peer=peer, name=name, roles=_role_names(roles), days=days)
    text = book.issue(grant, time.time())
    token = unseal(Token, from_text(Token, text))
    typer.echo(text)
    typer.echo(
        f"token {token.id.hex()} for {token.name or 'a peer'} ({token.peer}), valid until {_day(token.expires)}\n"
        f"that peer saves it as {TOKEN_FILE} in its data directory; the run file must contain:\n"
        f"access:\n  allow: tokens\n  organizer: {book.organizer}",
        err=True,
    )


@app.command(name="list")
def list_tokens(data_dir: Organizer = None, as_json: AsJson = False) -> None:
    """Show the tokens that were issued."""
    place, book = _book(data_dir)
    now = time.time()
    entries = book.entries()
    if as_json:
        tokens = [asdict(entry) | {"state": entry.state(now)} for entry in entries]
        typer.echo(json.dumps({"organizer": book.organizer.text, "tokens": tokens}, ensure_ascii=False))
    elif not entries:
        typer.echo(f"no tokens were issued from {place}")
    for entry in [] if as_json else entries:
        typer.echo(_line(entry, now))


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Id from `peerd token list`, or its first characters.")],
    data_dir: Organizer = None,
) -> None:
    """Revoke a token. Its peer is refused as soon as the others receive the revocation."""
    from peerd.access.token_files import REVOKED_FILE

    place, book = _book(data_dir)
    entry = book.revoke(token, time.time())
    typer.echo(f"revoked {entry.id}: {entry.name or 'no name'} ({entry.peer}), run {entry.run}")
    typer.echo(
        f"a peer that runs with --data-dir {place} sends the revocation to the others within a minute; without such "
        f"a peer, give them {book.folder / REVOKED_FILE} and set access.revoked in their run files to its path",
        err=True,
    )


def _role_names(text: str) -> list[str]:
    """Names of the roles for a token. `text` has names of installed roles, and `module:Class`, whose name is loaded."""
    from peerd.core.errors import ConfigError
    from peerd.daemon import registry
    from peerd.log import clean

    known, found = registry.names(), []
    for given in filter(None, (part.strip() for part in text.split(","))):
        if ":" not in given and given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
            own = "; a role of your own is given as module:Class, from the folder with its file"
            raise ConfigError(f"--roles: {clean(given)!r} is not an installed role; {hint}{'' if near else own}")
        found.append(registry.load(given).name if ":" in given else given)
    return found


@app.command()
def sign(
    file: Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The run file (YAML) to sign.")],
    data_dir: Organizer = None,
) -> None:
    """Sign a run file, so that any backbone can offer it.

    Other people's backbones need the signature to send the run file to newcomers.
    """
    from peerd.core.errors import ConfigError
    from peerd.messages.run_link import DOMAIN, shared_file
    from peerd.run.config import load_run
    from peerd.run.home import load_identity

    run = load_run(file).run
    place, book = _book(data_dir)
    if run.access.organizer != book.organizer.text:
        raise ConfigError(f"{file} names another organizer than {book.organizer}, whose key is in {place}")
    typer.echo(load_identity(place).sign(DOMAIN + shared_file(run)).hex())
    typer.echo("save it as run.signature in the data directory of a backbone with the same run file", err=True)


def _book(data_dir: Path | None) -> tuple[Path, TokenBook]:
    from peerd.access.token_files import TokenBook
    from peerd.run.home import ORGANIZER_DIR, data_root, load_identity, make_private_dir

    place = make_private_dir(data_dir or data_root() / ORGANIZER_DIR)
    return place, TokenBook(place, load_identity(place))


def _line(entry: IssuedToken, now: float) -> str:
    shown = f"{entry.id}  {entry.state(now):7}  until {_day(entry.expires)}  run {entry.run}  {entry.peer}"
    return "  ".join(part for part in (shown, ",".join(entry.roles), entry.name) if part)


def _day(unix: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
