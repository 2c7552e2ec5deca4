"""`peerd plan`: plans which device serves which stage, and reports what a run needs of devices and links.

This module has the options, and calls the readers, the search and the reports. Works without torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from peerd.core.errors import ConfigError
from peerd.model.shapes.model_size import StageSize, stage_sizes
from peerd.run.runfile import RunFile

TERA: Final = 1e12
DEFAULT_TFLOPS: Final = 10.0
SECONDS: Final = 86_400


def plan(
    links: Annotated[
        Path | None, typer.Argument(metavar="[LINKS]", help="The links file: devices, and the network between them.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "--config", metavar="FILE", help="The run file whose stages are to be placed."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="The current placement: start there, and count the cost of moves."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="N", help="Seconds to search.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Makes the search repeatable.")] = 0,
    cost: Annotated[
        Literal["steady", "latency"],
        typer.Option(help="Minimize the time per step of a full pipeline (steady), or of one pass (latency)."),
    ] = "steady",
    horizon: Annotated[
        int,
        typer.Option(min=1, metavar="STEPS", help="With --from: number of steps over which moving costs are spread."),
    ] = 1000,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the placement to this file.")] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOPS",
            help="Without LINKS: assumed speed of the devices, in TFLOP/s. [default: 10]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Plan which device serves which stage."""
    if links is None:
        _tell_sizes(model, before or out, DEFAULT_TFLOPS if speed is None else speed, as_json)
        return
    if speed is not None:
        raise ConfigError("--speed is for a plan without LINKS; devices of a links file have speed_tflops")
    if not 0 < seconds <= SECONDS:
        raise ConfigError(f"--seconds is {seconds:g}; allowed: above 0 to {SECONDS:,}")
    from peerd.cli.plan import placement_file, plan_report, plan_search
    from peerd.placement.cost import CostKind

    run = _placeable(model) if model is not None else None
    found = plan_search.find(plan_search.PlanRequest(links, run, before, CostKind(cost), seconds, seed, horizon))
    if out is not None:
        head = f"peerd plan {links}: a step takes {found.cost.total_s:.4g} s ({cost})"
        placement_file.save_placement(out, found.problem, found.placement, head)
    if as_json:
        typer.echo(json.dumps(plan_report.plan_object(found), ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    console.print(plan_report.plan_view(found, console.width, coloured=coloured), crop=False)
    if out is not None:
        typer.echo(f"written to {out}")


def _tell_sizes(model: Path | None, other: Path | None, speed: float, as_json: bool) -> None:
    """Print the report on a run's stages, computed from the run file only."""
    from peerd.cli.plan import size_report

    if model is None:
        raise ConfigError("nothing to plan; pass LINKS.yaml (such as configs/links.yaml), --model RUN.yaml, or both")
    if other is not None:
        raise ConfigError("--from and --out need a links file: peerd plan LINKS.yaml --model RUN.yaml")
    if not 0 < speed < math.inf:
        raise ConfigError(f"--speed is {speed:g}; allowed: a number above 0, in TFLOP/s")
    run = _run(model)
    sizes = _sizes(run) if run.model.kind == "gpt" else []
    if as_json:
        typer.echo(json.dumps(size_report.size_object(run, sizes, speed * TERA), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(size_report.size_view(run, sizes, speed * TERA), crop=False)


def _placeable(path: Path) -> tuple[Path, RunFile, list[StageSize]]:
    """Load a run whose stages have known sizes. Raises ConfigError for a model of the user's own."""
    run = _run(path)
    if run.model.kind != "gpt":
        known = "add a `workload:` to the links file, and leave out --model"
        raise ConfigError(f"{path}: only the code of {run.model.kind} knows the sizes of its stages; {known}")
    return path, run, _sizes(run)


def _run(path: Path) -> RunFile:
    from peerd.run.config import load_run

    return load_run(path, with_plan=False).run  # its plan may not exist yet


def _sizes(run: RunFile) -> list[StageSize]:
    from peerd.data.tokenizer import load_vocabulary

    return stage_sizes(run, load_vocabulary(run.model.vocab).size)
