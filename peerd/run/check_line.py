"""The allow-list of values that a stranger may set for a volunteer, in a run file from a join link `peerd://...`.

Every key of the schema has one rule: choices are harmless, numbers have bounds, texts have a format, and a value that
names code, files or hosts must have been allowed by the user of this machine (`LineSection`). A key without a rule must
keep its default, and fails a test. Rules check the decoded values that the program will use, so that every key that the
program reads has been checked.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from peerd.core.limits import LAST_STEP, SAVED_TOLD
from peerd.run.public_ip import host_fault
from peerd.run.runfile import DataSection, LineSection, RunFile, SourceSection

LINE_BYTES: Final = 4 << 30  # of memory for samples, and for activations between two layers
ALLOW_CODE: Final = "--allow-code"
_SAMPLE_BYTES: Final = 128  # of an array, besides its tokens
_TOKEN_BYTES: Final = 4
_BLOCKS: Final = 2  # shuffled blocks of samples in memory: one in use, one being read
_FEW: Final = 32  # the most numbers in a list


class Between(NamedTuple):
    """Rule for a number, or for each number in a list; the bounds are inclusive."""

    least: float
    most: float


class Rule(enum.Enum):
    """Rule for a key that is not a number."""

    CHOICE = "one of a few words, or a boolean: the type bounds it"
    OWN = "set by each user; never in a published run file"
    NAME = "`check` allows a few characters only"
    DIGEST = "SHA-256 in hex, or a word"
    PEER = "a peer id, without an address"
    FIELD = "the name of a field in a document"
    SHOWN = "text that is only compared and shown; `check` allows printable characters only"
    CODE = "built in, or a function of a file that the user allowed"
    TOKENIZER = "bytes, or the user's own file"
    PLAN = "peer ids and indices, which `check` bounds"
    DATA = "stdlib, https to a public address, the user's own text, or a function of a file that the user allowed"


_COUNT: Final = Between(0, LAST_STEP)
_SCALE: Final = Between(0, 1e9)
_SIZE: Final = Between(0, 1 << 20)
_SECONDS: Final = Between(0, 86_400)
_LAYOUT: Final = Between(0, 64 << 20)  # bytes of names and shapes: of a million tensors

_SOURCE: Final[dict[str, Between | Rule]] = {
    "path": Rule.DATA,
    "kind": Rule.CHOICE,
    "field": Rule.FIELD,
    "digest": Rule.DIGEST,
}
_SCHEDULE: Final[dict[str, Between | Rule]] = {
    **{"name": Rule.CHOICE, "decay": Rule.CHOICE},
    **dict.fromkeys(("lr", "final_lr_share", "weight_decay", "momentum", "beta1", "beta2", "eps", "clip_norm"), _SCALE),
}
_SECTIONS: Final[dict[str, dict[str, Between | Rule]]] = {
    "": {
        "run": Rule.NAME,
        "seed": Between(-(1 << 63), (1 << 63) - 1),
        "bootstrap": Rule.OWN,
        "listen": Rule.OWN,
        "announce": Rule.OWN,
    },
    "model": {
        **{"kind": Rule.CODE, "vocab": Rule.TOKENIZER, "kind_digest": Rule.DIGEST, "vocab_digest": Rule.DIGEST},
        **dict.fromkeys(("share_layers", "dtype", "precision", "buffers"), Rule.CHOICE),
        **dict.fromkeys(("d_model", "heads", "layers", "context"), _SIZE),
    },
    "pipeline": {
        "stages": _SIZE,
        "microbatch": _SIZE,
        "handover": Rule.CHOICE,
        "placement": Rule.CHOICE,
        "plan": Rule.OWN,
    },
    "plan": {"stages": Rule.PLAN, "follows": Rule.PLAN},
    "pipeline.boundary": {"code": Rule.CHOICE, "block": _SIZE, "lossless": Rule.CHOICE},
    "optimizer": {
        **_SCHEDULE,
        **{"warmup_steps": _COUNT, "total_steps": _COUNT, "trust": _SCALE},
        **{"offload": Rule.CHOICE, "delayed": Rule.CHOICE, "trunk": Rule.CHOICE, "most_stale": _COUNT},
    },
    "batch": {"target_samples": _COUNT},
    "averaging": {
        **{"code": Rule.CHOICE, "block": _SIZE, "rank": _SIZE, "part_bytes": Between(1024, 4 << 20)},
        **{"sender_timeout_s": Between(0, 3600), "group_size": _SIZE},
        "contributors": Rule.CHOICE,
    },
    "data": {
        **_SOURCE,
        **{"shuffle_buffer": Between(1, 10_000_000), "holdout": Between(0, 1), "strict": Rule.CHOICE},
    },
    "data.sources[]": {**_SOURCE, "weight": _SCALE},
    "evaluate": {"every_steps": _COUNT, "samples": _SIZE},
    "checkpoint": {"every_steps": _COUNT, "keep": Between(1, SAVED_TOLD)},
    "experts": {
        **{"block": Rule.CODE, "block_digest": Rule.DIGEST, "dtype": Rule.CHOICE, "code": Rule.CHOICE},
        **dict.fromkeys(("hidden", "heads", "layers", "grid", "input", "output", "top_k", "k_min", "max_batch"), _SIZE),
        **dict.fromkeys(("timeout_s", "grace_s", "announce_s", "checkpoint_s"), _SECONDS),
        **{"most_stale": Between(-1, LAST_STEP), "balance": _SCALE, "copies": Between(0, 16)},
        "checkpoint_updates": _COUNT,
    },
    "loop": {"model": Rule.SHOWN, "optimizer": Rule.SHOWN, "layout": Rule.DIGEST, "layout_bytes": _LAYOUT},
    "experts.optimizer": {**_SCHEDULE, "warmup_updates": _COUNT, "total_updates": _COUNT},
    "limits": dict.fromkeys(
        (
            *("microbatches_in_flight", "stage", "data_cache_mb", "keep_totals", "activations_mb"),
            *("recompute", "offload", "upload_mbit"),
            *("download_mbit", "relay", "threads", "nice", "memory_gb", "experts", "hours", "disk_gb", "trust"),
            "precision",
        ),
        Rule.OWN,
    ),
    "access": {"allow": Rule.CHOICE, "organizer": Rule.PEER, "token": Rule.OWN, "revoked": Rule.OWN},
    "line": {"link": Rule.OWN, "data": Rule.OWN, "tokenizer": Rule.OWN},
    "line.code[]": {"path": Rule.OWN, "digest": Rule.OWN},
}
LINE_RULES: Final[dict[str, Between | Rule]] = {
    f"{section}.{key}" if section else key: rule for section, rules in _SECTIONS.items() for key, rule in rules.items()
}


class _Leaf(NamedTuple):
    path: str  # for messages: data.sources[3].path
    key: str  # in LINE_RULES: data.sources[].path
    value: Any
    default: Any
    section: msgspec.Struct


def line_faults(run: RunFile) -> list[tuple[str, str]]:
    """Values that a run file from a join link may not have, as (key, message); empty for the user's own run file."""
    if run.line is None:
        return []
    faults = [(leaf.path, fault) for leaf in _leaves(run, "", "") if (fault := _fault(leaf, run.line)) is not None]
    return faults or _memory_faults(run)


def own_keys(run: RunFile) -> list[str]:
    """Keys that are set in a published run file, although each user sets them locally."""
    return [leaf.path for leaf in _leaves(run, "", "") if _rule(leaf) is Rule.OWN and leaf.value != leaf.default]


def function_file(function: str) -> str:
    """The file path of the module in `module:function`, relative, with / between folders."""
    module = function.partition(":")[0]
    return module if module.endswith(".py") else module.replace(".", "/") + ".py"


def _leaves(section: msgspec.Struct, path: str, key: str) -> Iterator[_Leaf]:
    """Yield every key that has a value, in sections and in lists of sections."""
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        at, name = f"{path}{field.name}", f"{key}{field.name}"
        if isinstance(value, msgspec.Struct):
            yield from _leaves(value, f"{at}.", f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, msgspec.Struct) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{at}[{index}].", f"{name}[].")
        elif value is not None:
            yield _Leaf(at, name, value, _default(field), section)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _rule(leaf: _Leaf) -> Between | Rule | None:
    return LINE_RULES.get(leaf.key)


def _fault(leaf: _Leaf, line: LineSection) -> str | None:
    rule = _rule(leaf)
    if rule is None:
        return None if leaf.value == leaf.default else f"is {leaf.value!r:.200}; a join link allows {leaf.default!r}"
    if isinstance(rule, Between):
        numbers = leaf.value if isinstance(leaf.value, list) else [leaf.value]
        if len(numbers) <= _FEW and all(rule.least <= number <= rule.most for number in numbers):
            return None
        return f"is {leaf.value!r:.200}; allowed by a join link: {rule.least:g} to {rule.most:g}"
    if rule is Rule.CODE:
        built_in = ("gpt",) if leaf.key == "model.kind" else ("ffn", "ffn1", "transformer")
        if leaf.value in built_in or (leaf.key, leaf.value) == ("model.kind", "loop"):  # `loop` names no code
            return None
        return _code_fault(leaf.value, line, f"{', '.join(built_in)}, or ")
    if rule is Rule.TOKENIZER:
        if leaf.value == "bytes" or (line.tokenizer and leaf.value == line.tokenizer):
            return None
        advice = "get the organizer's file, and add --tokenizer FILE"
        return f"is {leaf.value!r:.200}: the run needs its tokenizer; {advice}"
    if rule is Rule.DATA:
        return _data_fault(leaf.section, line)
    if rule is Rule.FIELD and not (len(leaf.value) <= 256 and leaf.value.isprintable()):
        return f"is {leaf.value!r:.200}; allowed: up to 256 printable characters"
    return None  # the type or `check` bounds it


def _code_fault(function: str, line: LineSection, otherwise: str) -> str | None:
    file = function_file(function)
    if re.fullmatch(r"[^\s:]+:[^\s:]+", function) and any(one.path == file for one in line.code):
        return None
    return (
        f"is {function!r:.200}: code of the run, which is never sent over the network; allowed: {otherwise}a file "
        f"that you allow: get {file!r:.200} from somebody whom you trust, read it, put it into this folder, and add "
        f"{ALLOW_CODE} FILE"
    )


def _data_fault(source: msgspec.Struct, line: LineSection) -> str | None:
    assert isinstance(source, DataSection | SourceSection)
    path = source.path
    if source.kind == "dataset":
        return _code_fault(path, line, "")
    if path in ("stdlib", "") or (line.data and path == line.data):
        return None
    if not path.startswith("https://"):
        where = "an address without https" if path.startswith("http://") else "a path on some machine"
        return f"is {path!r:.200}: {where}; allowed: stdlib, https://, or your own text: add --data PATH"
    try:
        fault = host_fault(urlsplit(path).hostname or "")
    except ValueError as error:
        fault = f"no address ({error})"
    if fault is not None:
        allowed = "a host of the public internet, or your own text: add --data PATH"
        return f"is {path!r:.200}: {fault}; allowed: {allowed}"
    return None


def _memory_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of values that together need too much memory, as (key, message)."""
    sample = _TOKEN_BYTES * (run.model.context + 1) + _SAMPLE_BYTES
    activation = run.model.context * run.model.d_model * (8 if run.model.dtype == "float64" else 4)
    amounts = (
        ("data.shuffle_buffer", run.data.shuffle_buffer, _BLOCKS * sample),
        ("evaluate.samples", run.evaluate.samples, 4 * sample),  # as read from the stream, and as sent
        ("pipeline.microbatch", run.pipeline.microbatch, max(activation, 4 * sample)),
    )
    return [
        (key, f"is {count}, which takes {count * each} bytes of memory; allowed by a join link: up to {LINE_BYTES}")
        for key, count, each in amounts
        if count * each > LINE_BYTES
    ]
