"""Options that several commands of `peerd` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peerd.cli.grouped_help import LIMITS, WITH_LINK

RunFileOption = Annotated[Path | None, typer.Option("--model", "--config", metavar="FILE", help="The run file (YAML).")]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(metavar="ADDR", help="Peer to connect to first, instead of the run file's. Repeatable."),
]
Listen = Annotated[
    list[str] | None, typer.Option(metavar="ADDR", help="Address to listen on, instead of the run file's. Repeatable.")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDR", help="Address at which others reach this peer: a forwarded port, or a host name. Repeatable."
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for this peer's identity, checkpoints and events.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Device to compute on: cpu, cuda or cuda:N.")]
Seed = Annotated[int | None, typer.Option(help="Makes this peer's random choices repeatable.")]
LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warn or error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
UploadMbit = Annotated[
    float | None, typer.Option(metavar="MBIT", help="Limit on sending, in Mb/s.", rich_help_panel=LIMITS)
]
DownloadMbit = Annotated[
    float | None, typer.Option(metavar="MBIT", help="Limit on receiving, in Mb/s.", rich_help_panel=LIMITS)
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Compute on at most N processors.", rich_help_panel=LIMITS)
]
Nice = Annotated[
    int | None,
    typer.Option(
        metavar="0-19", help="Niceness; at 19 all other programs run first. [default: 10]", rich_help_panel=LIMITS
    ),
]
MemoryGb = Annotated[
    float | None,
    typer.Option(metavar="GB", help="Limit on memory: serve no stage that needs more.", rich_help_panel=LIMITS),
]
HoursOfDay = Annotated[
    str | None,
    typer.Option(
        "--hours", metavar="HH:MM-HH:MM", help="Hours of the day in which this peer takes part.", rich_help_panel=LIMITS
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PEER", help="Believe what this peer states about the run's current step, without proof. Repeatable."
    ),
]
DiskGb = Annotated[
    float | None, typer.Option(metavar="GB", help="Limit on disk space for checkpoints.", rich_help_panel=LIMITS)
]
Yes = Annotated[bool, typer.Option("--yes", help="Accept the run file without asking.", rich_help_panel=WITH_LINK)]
OwnText = Annotated[
    str | None, typer.Option(metavar="PATH", help="Your own text, if the run has none.", rich_help_panel=WITH_LINK)
]
OwnToken = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="Your token, or a file with it.", rich_help_panel=WITH_LINK),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Code that the run may execute. Repeatable.", rich_help_panel=WITH_LINK),
]
OwnTokenizer = Annotated[
    str | None, typer.Option(metavar="FILE", help="The run's tokenizer file.", rich_help_panel=WITH_LINK)
]
