"""`peerd identity`: shows the peer ids of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from peerd.cli import options


def identity(
    model: options.RunFileOption = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run, instead of its file.")] = None,
    data_dir: options.DataDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Show this machine's peer ids.

    With --model, --run or --data-dir: the id that `peerd join` uses, created if missing.
    """
    from peerd.run import config, home

    name = run or (config.load_run(model).run.run if model is not None else None)
    if data_dir is not None or name is not None:
        place = home.make_private_dir(data_dir or home.run_data_dir(name or "", []))
        if not (place / home.IDENTITY_FILE).exists():
            with home.locked(place):
                home.load_identity(place)
        places = [place] if data_dir is not None else home.run_identities(name or "")
    else:
        places = home.known_identities()
    found = [{"peer_id": home.load_identity(place).peer_id.text, "data_dir": str(place)} for place in places]
    if as_json:
        typer.echo(
            json.dumps(
                found[0] if data_dir is not None or (len(found) == 1 and name is not None) else {"identities": found}
            )
        )
    elif not found:
        typer.echo(f"no identity yet under {home.data_root()}; one is created when a peer first starts")
    else:
        for entry in found:
            typer.echo(f"{entry['peer_id']}  {entry['data_dir']}")
