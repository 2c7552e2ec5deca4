"""The folder of an exported model: `model.safetensors`, `config.json`, `README.md`, `model.py` for a gpt,
`model_experts.py` for one with experts, and the tokenizer if there is one. It is written under a temporary name and
renamed, so it is never incomplete.

Reading trusts nothing: `config.json` is bounded and checked; names, shapes and dtypes are compared with the file's
header before a tensor is loaded; nothing is unpickled. Neither `model.py` nor any other code in the folder is run: the
layers are peerd's own copy. A fault raises ConfigError, which names the file.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from peerd.codec.tensors import all_finite, dtype_name
from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError, PeerdError
from peerd.export import standalone, standalone_experts
from peerd.export.experts import ExportedExperts, fault_of
from peerd.model.stage.partition import DTYPES

FORMAT: Final = "peerd-export-1"
CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
CODE: Final = "model.py"
EXPERTS_CODE: Final = "model_experts.py"  # model.py imports it by this name
TOKENIZER: Final = "tokenizer.json"
README: Final = "README.md"
_OURS: Final = frozenset({CONFIG, WEIGHTS, CODE, EXPERTS_CODE, TOKENIZER, README, "__pycache__"})
_CONFIG_BYTES: Final = 1 << 22  # includes the names of missing experts
_LAYERS: Final = 10_000  # the limit of a run file


class ExportConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of `config.json`: the model, and its origin."""

    format: str
    run: str
    step: int
    valid_loss: float | None = None  # nats per token, or None if unknown
    valid_step: int | None = None  # the step of `valid_loss`
    kind: str  # gpt, or module:function of a user's own model
    tokenizer: Literal["bytes", "tokenizer.json"]
    vocab_size: int
    separator: int | None  # the token between documents
    context: int
    dtype: Literal["float32", "float64"]
    parameters: int
    d_model: int = 0  # this and the next three fields: only for a gpt
    heads: int = 0
    d_feed: int = 0
    repeats: list[int] = []  # how often each block is applied
    experts: ExportedExperts | None = None  # only for a gpt with experts
    settings: dict[str, Any] = {}  # only for a user's own model: the argument of its function


def write_export(
    out: Path, config: ExportConfig, tensors: Mapping[str, Tensor], readme: str, tokenizer: Path | None
) -> None:
    """Write the folder, replacing an earlier export; raises PeerdError if it cannot be written."""
    refuse_other_content(out)
    out = out.resolve()
    aside = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            _fill(aside, config, tensors, readme, tokenizer)
            _move(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise PeerdError(f"{error.filename or out}: {error.strerror or error}{_room(out, error)}") from error
    except safetensors.SafetensorError as error:
        raise PeerdError(f"{aside / WEIGHTS} can't be written: {error}{_room(out)}") from error


def refuse_other_content(out: Path) -> None:
    """Raise ConfigError unless `out` is missing, empty, or an earlier export."""
    try:
        names = {path.name for path in out.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; give a new folder") from error
    if out.resolve() == Path.cwd():
        raise ConfigError(f"--out {out} is the current folder; give another, which will be created")
    if not names:
        return
    others = sorted(names - _OURS)
    if others or CONFIG not in names:
        held = others[0] if others else min(names)
        raise ConfigError(f"--out {out} contains something else ({held}); give a new or an empty folder")
    read_config(out)


def _fill(
    folder: Path, config: ExportConfig, tensors: Mapping[str, Tensor], readme: str, tokenizer: Path | None
) -> None:
    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    safetensors.torch.save_file(ordered, folder / WEIGHTS, {"format": "pt"})
    if config.kind == "gpt":
        shutil.copyfile(standalone.__file__, folder / CODE)
    if config.experts is not None:
        shutil.copyfile(standalone_experts.__file__, folder / EXPERTS_CODE)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / TOKENIZER)
    (folder / README).write_text(readme, "utf-8")
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _move(aside: Path, out: Path) -> None:
    """Rename `aside` to `out`. An earlier export is moved away first, and restored if that fails."""
    earlier = aside.with_suffix(".old")
    if out.exists():
        os.replace(out, earlier)
    try:
        os.replace(aside, out)
    except OSError:
        if earlier.exists():
            os.replace(earlier, out)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _room(path: Path, error: OSError | None = None) -> str:
    if error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    there = next((folder for folder in path.parents if folder.is_dir()), None)
    return f" ({shutil.disk_usage(there).free / 1e6:.1f} MB free)" if there is not None else ""


def read_config(folder: Path) -> ExportConfig:
    """Read and check the `config.json` of an export."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; peerd export --out FOLDER creates one")
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_BYTES)
        config = from_json(raw, ExportConfig)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not an exported model: it has no {CONFIG}; peerd export creates one") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} does not describe an exported model: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if config.format != FORMAT:
        raise ConfigError(f"{path} has format {config.format[:40]!r}; this peerd reads {FORMAT}")
    if wrong := _fault(config):
        raise ConfigError(f"{path}: {wrong}")
    return config


def _fault(c: ExportConfig) -> str | None:
    """The first invalid value, in words, or None."""
    rules = [
        (1 <= c.context <= 1 << 20, f"context is {c.context}; allowed: 1 to {1 << 20}"),
        (1 <= c.vocab_size <= 1 << 24, f"vocab_size is {c.vocab_size}; allowed: 1 to {1 << 24}"),
        (c.separator is None or 0 <= c.separator < c.vocab_size, "separator is not in the vocabulary"),
        (c.tokenizer != "bytes" or c.vocab_size == 256, f"vocab_size is {c.vocab_size}, but the tokens are bytes"),
    ]
    if c.kind == "gpt":
        wide = 1 <= c.heads <= c.d_model <= 65536 and c.d_model % c.heads == 0 and (c.d_model // c.heads) % 2 == 0
        layers = len(c.repeats) >= 1 and min(c.repeats) >= 1 and sum(c.repeats) <= _LAYERS
        rules += [
            (wide, f"d_model {c.d_model} and heads {c.heads} do not fit"),
            (1 <= c.d_feed <= 1 << 20, f"d_feed is {c.d_feed}; allowed: 1 to {1 << 20}"),
            (bool(layers), f"repeats are not 1 to {_LAYERS} layers"),
        ]
    wrong = next((message for ok, message in rules if not ok), None)
    if wrong is None and c.experts is not None:
        return fault_of(c.experts, len(c.repeats)) if c.kind == "gpt" else f"a {c.kind[:100]} cannot have experts"
    return wrong


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the model's state dict."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def need_fitting(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ConfigError with the first tensor in which two sets of names and shapes differ."""
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            here = f"has shape {list(given[name])}" if name in given else "is missing"
            there = f"shape {list(wanted[name])}" if name in wanted else "no such parameter"
            raise ConfigError(f"{where} does not fit the model: {name[:100]} {here}; the model has {there}")


def load_weights(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    dtype: str,
    buffers: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Load the folder's tensors, after comparing the names and shapes in the file's header.

    `buffers` may be missing, and may have any dtype.
    """
    path = folder / WEIGHTS
    try:
        with safetensors.safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            there = {name: shape for name, shape in (buffers or {}).items() if name in slices}
            given = {name: tuple(one.get_shape()) for name, one in slices.items()}
            need_fitting(given, {**wanted, **there}, str(path))
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; export the model again") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {error}; export the model again") from error
    for name, tensor in tensors.items():
        if name in wanted and tensor.dtype != DTYPES[dtype]:
            raise ConfigError(f"{path}: {name} is {dtype_name(tensor.dtype)}, but {CONFIG} says {dtype}")
        if not all_finite(tensor):
            raise ConfigError(f"{path}: {name} has values that are not finite: this model has diverged")
    return tensors


def gpt_of(config: dict[str, Any]) -> standalone.GPT:
    """The model that a `config.json` describes, from peerd's own copies of the code."""
    return standalone.GPT(config, standalone_experts.ExpertsLayer)


def load_gpt(folder: Path, config: ExportConfig) -> standalone.GPT:
    """Load the model of an export whose kind is gpt."""
    with torch.device("meta"):
        model = gpt_of(msgspec.to_builtins(config))
    tensors = load_weights(folder, shapes_of(model), config.dtype)
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
