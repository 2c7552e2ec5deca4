"""`peerd evaluate`: loss and perplexity of an exported model on a file of text.

The figures go to stdout. Progress goes to stderr if that is a terminal.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from peerd.cli.generate import load
from peerd.core.errors import ConfigError

if TYPE_CHECKING:
    from peerd.export.evaluation import Evaluation

_PERIOD_S: Final = 0.5


def evaluate(
    folder: Annotated[Path, typer.Option("--from", metavar="FOLDER", help="The folder of an exported model.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text file, or a .jsonl or .parquet file with a field `text`.")
    ],
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:N or mps.")] = "cpu",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "--config", metavar="FILE", help="The run file; needed only if your own code defines the model."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Evaluate an exported model on a text.

    Prints loss and perplexity per token, and bits per byte.
    """
    from peerd.export.evaluation import evaluate as measure

    if not file.is_file():
        what = "is a folder; give one file" if file.is_dir() else "there is no such file"
        raise ConfigError(f"{file}: {what}")
    loaded = load(folder, device, model)
    progress = _Progress(file)
    found = measure(loaded, file, progress.show)
    progress.end()
    if as_json:
        figures = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        counts = {"tokens": found.tokens, "bytes": found.text_bytes, "context": loaded.model.context}
        typer.echo(json.dumps({**figures, **counts, "batch": found.batch, "step": loaded.config.step}))
        return
    typer.echo(
        f"loss           {found.loss:.4f} nats per token\n"
        f"perplexity     {found.perplexity:,.2f} per token\n"
        f"bits per byte  {found.bits_per_byte:.4f}\n"
        f"over           {found.tokens:,} tokens of {file} ({found.text_bytes:,} bytes), windows of "
        f"{loaded.model.context} tokens, {found.batch} at a time"
    )


class _Progress:
    """Progress of an evaluation, as one line on the terminal."""

    def __init__(self, file: Path) -> None:
        self._size = file.stat().st_size
        self._text = file.suffix.lower() not in (".parquet", ".jsonl")
        self._shown_at = time.monotonic()
        self._shown = False

    def show(self, so_far: Evaluation) -> None:
        """Print the progress, at most every half second."""
        if not sys.stderr.isatty() or time.monotonic() - self._shown_at < _PERIOD_S:
            return
        self._shown_at, self._shown = time.monotonic(), True
        share = f" ({so_far.text_bytes / self._size:.0%})" if self._text and self._size else ""
        sys.stderr.write(f"\r{so_far.tokens:,} tokens{share}, loss {so_far.loss:.4f}\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        """Erase the progress line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
