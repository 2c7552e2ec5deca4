"""`peerd generate`: generates text with an exported model and prints it token by token.

Terminal control characters in the model's output are printed as the replacement character.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from peerd.core.errors import ConfigError

if TYPE_CHECKING:
    from peerd.export.loaded_model import LoadedModel

LEAST_TEMPERATURE: Final = 0.001  # below it, probabilities may become NaN
LARGEST_TEMPERATURE: Final = 100.0


def generate(
    folder: Annotated[Path, typer.Option("--from", metavar="FOLDER", help="The folder of an exported model.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=LARGEST_TEMPERATURE, help="0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Sample from this many of the likeliest tokens; 0: from all.")
    ] = 40,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:N or mps.")] = "cpu",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "--config", metavar="FILE", help="The run file; needed only if your own code defines the model."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs, at the end.")] = False,
) -> None:
    """Continue a text with an exported model."""
    from peerd.export.loaded_model import SamplingOptions, write_text

    if 0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(f"--temperature {temperature:g}; allowed: 0, or {LEAST_TEMPERATURE} to 100")
    prompt = os.fsencode(prompt).decode("utf-8", "replace")
    style = SamplingOptions(temperature=temperature, top_k=top_k, seed=_seed(seed))
    loaded = load(folder, device, model)
    sees = _what_it_sees(loaded, prompt, tokens)
    if sees:
        typer.echo(f"peerd: {sees}", err=True)
    began, written = time.monotonic(), []
    pieces = write_text(loaded.model, loaded.vocab, prompt, tokens, style)
    try:
        for piece in pieces if as_json else _shown(prompt, pieces):
            written.append(piece)
    except KeyboardInterrupt:
        tokens = 0
    if as_json:
        seconds = time.monotonic() - began
        found = {"prompt": prompt, "text": "".join(written), "tokens": tokens, "seed": style.seed}
        found |= {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1), "note": sees}
        typer.echo(json.dumps(found, ensure_ascii=False))


def load(folder: Path, device: str, model: Path | None) -> LoadedModel:
    """Load the exported model in `folder` to `device`. Raises ConfigError if either cannot be used."""
    from peerd.export.loaded_model import load_export
    from peerd.model.devices import describe
    from peerd.run.config import load_run

    run = load_run(model).run if model is not None else None
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device!r} is unknown; allowed: cpu, cuda, cuda:N, mps")
    if device != "cpu":
        describe(device)
    return load_export(folder, device, run)


def _seed(given: int | None) -> int:
    if given is None:
        return secrets.randbelow(1 << 31)
    if not -(1 << 63) <= given < 1 << 63:
        raise ConfigError(f"--seed {given}; allowed: {-(1 << 63)} to {(1 << 63) - 1}")
    return given


def _what_it_sees(loaded: LoadedModel, prompt: str, count: int) -> str | None:
    """Note on the part of prompt and text that exceeds the model's context, or None if all of it fits."""
    context = loaded.model.context
    given = len(loaded.vocab.encode(prompt.encode("utf-8", "replace")))
    if given > context:
        return f"the prompt has {given} tokens; the model sees the last {context} (its context)"
    if max(given, 1) + count - 1 > context:
        half = max(1, context // 2)
        return f"the text exceeds the context: from there on the model sees the last {half} to {context} tokens"
    return None


def _shown(prompt: str, pieces: Iterator[str]) -> Iterator[str]:
    """Write the prompt, then each piece as it is generated, to the terminal; yields the pieces."""
    try:
        _write(prompt)
        for piece in pieces:
            _write(piece)
            yield piece
        _write("\n")
    except KeyboardInterrupt:
        _write("\n")
        raise
    except BrokenPipeError:  # the reader of the pipe has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(text: str) -> None:
    safe = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    sys.stdout.write(safe.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()
