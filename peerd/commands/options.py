"""Options that several commands of `peerd` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFileOption = Annotated[Path | None, typer.Option("--model", "--config", metavar="FILE", help="The run file (YAML).")]
Bootstrap = Annotated[
    list[str] | None, typer.Option(metavar="ADDR", help="A peer to start from, in place of the run file's. Repeatable.")
]
Listen = Annotated[
    list[str] | None, typer.Option(metavar="ADDR", help="Where to listen, in place of the run file's. Repeatable.")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(metavar="ADDR", help="Where others reach this peer: a published port, or a name. Repeatable."),
]
DataDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Identity, checkpoints and events of this peer.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="Where to compute: cpu, cuda or cuda:N.")]
Seed = Annotated[int | None, typer.Option(help="Makes this peer's random choices repeatable.")]
LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warn or error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
UploadMbit = Annotated[float | None, typer.Option(metavar="MBIT", help="Send no faster: Mb/s.")]
DownloadMbit = Annotated[float | None, typer.Option(metavar="MBIT", help="Receive no faster: Mb/s.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Keep no more processors busy than so many.")]
Nice = Annotated[int | None, typer.Option(metavar="0-19", help="Priority: 19 after all other programs. [default: 10]")]
MemoryGb = Annotated[float | None, typer.Option(metavar="GB", help="Take no stage that needs more memory.")]
HoursOfDay = Annotated[str | None, typer.Option("--hours", metavar="HH:MM-HH:MM", help="When it takes part.")]
Trust = Annotated[list[str] | None, typer.Option(metavar="PEER", help="Take its word on the run's step. Repeatable.")]
DiskGb = Annotated[float | None, typer.Option(metavar="GB", help="Keep no more checkpoints than fit.")]
