"""Export of checkpoints to a folder: finds a complete set, gives its tensors plain names, checks and writes them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from peerd.codec.tensors import all_finite
from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError
from peerd.export.experts import ExportedExperts, SavedExpert, gather_experts
from peerd.export.folder import (
    CODE,
    EXPERTS_CODE,
    FORMAT,
    TOKENIZER,
    ExportConfig,
    gpt_of,
    need_fitting,
    refuse_other_content,
    shapes_of,
    write_export,
)
from peerd.export.gather import DEPTH, Choice, choose_run, choose_set, find_runs, load_set
from peerd.export.names import architecture, plainly_named
from peerd.run.runfile import RunFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export: the run and step, and the folder to write."""

    root: Path  # the folder to search
    out: Path
    run_name: str | None = None  # selects one of several runs
    settings: RunFile | None = None  # the run file, if the checkpoints have no record of it
    step: int | None = None  # None: the newest
    experts: Callable[[Path, str], Iterable[SavedExpert]] | None = None  # by folder and fingerprint


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: the config written, and its sources."""

    config: ExportConfig
    sources: list[Path]  # by stage
    notes: list[str]


def export(wish: ExportRequest) -> Exported:
    """Write the model of one run to a folder; ConfigError or PeerdError explains a failure in one sentence."""
    refuse_other_content(wish.out)
    runs, notes = find_runs(wish.root)
    found = choose_run(runs, wish.root, wish.run_name, wish.settings)
    choice = choose_set(found, wish.root, wish.step)
    run = choice.run
    tensors, sources, damaged = load_set(choice)
    plain, experts = plainly_named(run, tensors), None
    if run.experts is not None:
        saved = wish.experts(wish.root, found.fingerprint) if wish.experts is not None else ()
        gathered = gather_experts(run, saved, wish.root)
        plain, experts, notes = plain | gathered.tensors, gathered.described, [*notes, *gathered.notes]
    loss = known_loss(wish.root, run.run, choice.place.step, alone=len(runs) == 1)
    config = _config(choice, plain, loss, experts)
    if run.model.kind == "gpt":
        with torch.device("meta"):
            wanted = shapes_of(gpt_of(msgspec.to_builtins(config)))
        need_fitting({name: tuple(tensor.shape) for name, tensor in plain.items()}, wanted, str(sources[0].parent))
    wrong = [name for name, tensor in sorted(plain.items()) if not all_finite(tensor)]
    if wrong:
        notes.append(f"{wrong[0]} has values that are not finite: this model has diverged; try an earlier --step")
    tokenizer = None if run.model.vocab == "bytes" else Path(run.model.vocab)
    write_export(wish.out, config, plain, readme_of(config, wish.out), tokenizer)
    return Exported(config, sources, [*choice.notes, *notes, *damaged])


def _config(
    choice: Choice, tensors: Mapping[str, Tensor], loss: KnownLoss | None, experts: ExportedExperts | None
) -> ExportConfig:
    model = choice.run.model
    return ExportConfig(
        format=FORMAT,
        run=choice.run.run,
        step=choice.place.step,
        valid_loss=loss.loss if loss is not None else None,
        valid_step=loss.step if loss is not None else None,
        tokenizer="bytes" if model.vocab == "bytes" else TOKENIZER,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        experts=experts,
        **architecture(choice.run),
    )


def loss_line(config: ExportConfig) -> str:
    """The known validation loss as text."""
    if config.valid_loss is None:
        return "validation loss unknown"
    when = "" if config.valid_step == config.step else f" at step {config.valid_step}"
    return f"validation loss {config.valid_loss:.4f} nats per token{when}"


def readme_of(config: ExportConfig, out: Path) -> str:
    """The text of the folder's README.md."""
    head = f"""\
        # {config.run}, step {config.step}

        {config.parameters:,} parameters, {config.dtype}; {loss_line(config)}. Trained with peerd.

        """
    own = f"""\
        The layers are the run's own code, `{config.kind}`, which is not in this folder. `config.json` has the run's
        settings, which are the function's argument. In your own program:

        ```python
        layers = torch.nn.ModuleList(function(run))  # the list that {config.kind} returns
        model = torch.nn.ModuleDict({{"layers": layers}})
        safetensors.torch.load_model(model, "model.safetensors")
        ```

        With peerd, next to that code and the run file: `peerd generate --from {out.name} --model run.yaml "a prompt"`.
        """
    loop = f"""\
        The model was trained in users' own loops, and its code is not in this folder. `model.safetensors` has its
        parameters and buffers by their names in that code:

        ```python
        model.load_state_dict(safetensors.torch.load_file("{out.name}/model.safetensors"))
        ```
        """
    mixture = f" and `{EXPERTS_CODE}`" if config.experts is not None else ""
    gpt = f"""\
        * `model.safetensors`: the weights; `config.json`: their shape
        * `{CODE}`{mixture}: the model in plain PyTorch; needs torch and safetensors, but not peerd

        ```
        python {CODE} "a prompt"
        peerd generate --from {out.name} "a prompt"
        peerd evaluate --from {out.name} text.txt
        ```

        Tokens: {"bytes" if config.tokenizer == "bytes" else "those of `tokenizer.json` (pip install tokenizers)"}.
        """
    return textwrap.dedent(head) + textwrap.dedent({"gpt": gpt, "loop": loop}.get(config.kind, own))


def need_gpt_or_run(config: ExportConfig, run: RunFile | None, folder: Path) -> None:
    """Raises ConfigError if a user's own model is used without the run file that names its code on this machine."""
    if config.kind == "loop":
        raise ConfigError(f"{folder} is a model from users' own loops, whose code peerd does not have; load it there")
    if config.kind != "gpt" and run is None:
        raise ConfigError(
            f"{folder} is a user's own model ({config.kind[:100]}); add --model FILE with the run file, next to "
            "which its code is"
        )
    if run is not None and run.model.kind != config.kind:
        raise ConfigError(f"--model: the run file's model is {run.model.kind}, but {folder} is a {config.kind[:100]}")


class KnownLoss(NamedTuple):
    """Nats per token of the model after `step`."""

    step: int
    loss: float


def known_loss(root: Path, run: str, step: int, *, alone: bool) -> KnownLoss | None:
    """The last validation loss recorded below `root` up to `step`, or None if nothing is recorded.

    A backbone records such losses in its learning curve, a trainer in its events.
    `alone`: `root` contains no other run, so the event files, which do not name their run, may be read as well.
    """
    found = [*_of_curves(root, run), *(_of_events(root) if alone else ())]
    return max((loss for loss in found if loss.step <= step), default=None)


def _of_curves(root: Path, run: str) -> Iterator[KnownLoss]:
    name = "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in run)  # as the backbone writes it
    for line in _lines(root, f"{name}.jsonl", b'"valid_loss"'):
        yield from _read(line, "valid_step", "valid_loss")


def _of_events(root: Path) -> Iterator[KnownLoss]:
    for line in _lines(root, "events.jsonl", b'"trainer.evaluated"'):
        yield from _read(line, "step", "loss")


def _lines(root: Path, name: str, word: bytes) -> Iterator[dict[str, Any]]:
    """The readable JSON lines with `word`, from all files with this name."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        if len(Path(folder).parts) - len(root.parts) >= DEPTH - 1:
            folders.clear()
        if name not in names:
            continue
        try:
            with Path(folder, name).open("rb") as file:
                for line in file:
                    if word in line:
                        yield from_json(line, dict[str, Any])
        except (OSError, msgspec.DecodeError):
            continue  # the line is still being written


def _read(line: dict[str, Any], step_key: str, loss_key: str) -> Iterator[KnownLoss]:
    step, loss = line.get(step_key), line.get(loss_key)
    if isinstance(step, int) and isinstance(loss, float):
        yield KnownLoss(step, loss)
