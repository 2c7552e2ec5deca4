"""`peerd export`: writes a run's model from its checkpoints into a folder that can be used without peerd.

This module has the options and prints the result. `export`, imported when the command runs, does the work.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerd.core.errors import ConfigError

if TYPE_CHECKING:
    from peerd.export.experts import SavedExpert
    from peerd.export.export import Exported


def export(
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder to write: a new one, or an earlier export.")
    ],
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR", help="A peer's data directory, or a folder that holds several."),
    ] = None,
    backbone: Annotated[
        Path | None,
        typer.Option("--backbone", metavar="DIR", help="Data directory of a backbone that keeps checkpoints."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run, if there are several.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Which step. [default: the newest]")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "--config",
            metavar="FILE",
            help="The run file; needed only if the checkpoints' folder has no record of its settings.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Write a run's trained model.

    Writes the weights (safetensors), the config and, for a gpt, a Python script that runs it with torch, without peerd.
    """
    from peerd.export import export as work
    from peerd.run.config import load_run

    if run_dir is not None and backbone is not None:
        raise ConfigError("RUN_DIR and --backbone are both given; pass only one of them")
    wish = work.ExportRequest(
        root=_root(run_dir, backbone),
        out=out,
        run_name=run,
        settings=load_run(model).run if model is not None else None,
        step=step,
        experts=saved_experts,
    )
    made = work.export(wish)
    if as_json:
        typer.echo(json.dumps(_plain(made, out), ensure_ascii=False))
    else:
        typer.echo(_told(made, out, work.loss_line(made.config)))


def _root(run_dir: Path | None, backbone: Path | None) -> Path:
    """Folder to search for checkpoints: of a backbone's data directory, the subfolder `backbone` if it exists."""
    if backbone is not None:
        return backbone / "backbone" if (backbone / "backbone").is_dir() else backbone
    from peerd.run.home import data_root

    return run_dir if run_dir is not None else data_root()


def saved_experts(root: Path, fingerprint: str) -> Iterator[SavedExpert]:
    """All checkpoints of a run's experts below `root`, kept by their own hosts, by other hosts or by a backbone."""
    from peerd.experts.calls.vault_disk import SUFFIX, VaultDisk
    from peerd.export.experts import SavedExpert
    from peerd.export.gather import folders_below

    for folder, _, files in folders_below(root):
        if any(name.endswith(SUFFIX) for name in files):
            disk = VaultDisk(folder)
            for pointer in disk.listed():
                if pointer.run.hex() == fingerprint:
                    yield SavedExpert(pointer.expert.uid, pointer.rank, folder, partial(disk.read, pointer))


def _plain(made: Exported, out: Path) -> dict[str, object]:
    config = made.config
    return {
        "out": str(out.resolve()),
        **{name: getattr(config, name) for name in ("run", "step", "valid_loss", "valid_step", "kind", "parameters")},
        "sources": [str(path) for path in made.sources],
        "notes": made.notes,
    }


def _told(made: Exported, out: Path, loss: str) -> str:
    config = made.config
    lines = [f"run {config.run}, step {config.step}; {loss}; {config.parameters:,} parameters"]
    lines += [f"  stage {stage} from {path}" for stage, path in enumerate(made.sources)]
    lines += [f"  {note}" for note in made.notes]
    lines.append(f"written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if config.kind == "gpt":
        lines += generate_hint(out)
    return "\n".join(lines)


def generate_hint(folder: Path) -> list[str]:
    """Lines that show the command to type next."""
    return [f'try: peerd generate --from {shlex.quote(str(folder))} "a prompt"']
