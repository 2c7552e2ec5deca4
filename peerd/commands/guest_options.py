"""Options of `peerd join` for a volunteer's own machine: limits, and whom it trusts (`control/guest.GuestFlags`)."""

from __future__ import annotations

from typing import Annotated

import typer

UploadMbit = Annotated[float | None, typer.Option(metavar="MBIT", help="Send no faster: Mb/s.")]
DownloadMbit = Annotated[float | None, typer.Option(metavar="MBIT", help="Receive no faster: Mb/s.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Keep no more processors busy than so many.")]
Nice = Annotated[int | None, typer.Option(metavar="0-19", help="Priority: 19 after all other programs. [default: 10]")]
MemoryGb = Annotated[float | None, typer.Option(metavar="GB", help="Take no stage that needs more memory.")]
Trust = Annotated[list[str] | None, typer.Option(metavar="PEER", help="Take its word on the run's step. Repeatable.")]
DiskGb = Annotated[float | None, typer.Option(metavar="GB", help="Keep no more checkpoints than fit.")]
HoursOfDay = Annotated[str | None, typer.Option("--hours", metavar="HH:MM-HH:MM", help="When it takes part.")]
