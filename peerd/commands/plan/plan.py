"""`peerd plan`: which device should serve which stage, and what a run asks of devices and lines.

Flags, and in what order things are read, searched and shown. Works without torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peerd.core.errors import ConfigError
from peerd.core.model.model_size import StageSize, stage_sizes
from peerd.core.run.runfile import RunFile

if TYPE_CHECKING:
    from rich.console import RenderableType

TERA = 1e12


def plan(
    model: Annotated[
        Path | None,
        typer.Option("--model", "--config", metavar="FILE", help="The run file whose stages are to be placed."),
    ] = None,
    speed: Annotated[
        float,
        typer.Option("--speed", metavar="TFLOPS", help="Of a device, 10^12 operations a second: which line it needs."),
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Plan the network: what each stage of a run asks of a device and of its line."""
    from peerd.commands.plan import size_report

    if not 0 < speed < math.inf:
        raise ConfigError(f"--speed is {speed:g}; allowed: a number above 0, in TFLOP/s")
    if model is None:
        raise ConfigError("say what to plan: --model RUN.yaml")
    run = _run(model)
    sizes = _sizes(run) if run.model.kind == "gpt" else []
    show(size_report.size_object(run, sizes, speed * TERA), size_report.size_view(run, sizes, speed * TERA), as_json)


def _run(path: Path) -> RunFile:
    from peerd.config import load_run

    return load_run(path).run


def _sizes(run: RunFile) -> list[StageSize]:
    from peerd.compute.tokenizer import load_vocabulary

    return stage_sizes(run, load_vocabulary(run.model.vocab).size)


def show(plain: dict[str, Any], view: RenderableType, as_json: bool) -> None:
    """One of the two."""
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(plain, ensure_ascii=False))
    else:
        Console().print(view, crop=False)
