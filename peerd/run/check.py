"""Validation of a run file beyond its types: values that are invalid, alone or in combination.

Each fault is a pair of a key's path and a message with the value found and the values allowed.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from peerd.codec.format.blockwise import BLOCKS, CODES
from peerd.core.clock import Hours
from peerd.core.ids import is_peer_text
from peerd.core.limits import (
    FRAME_BYTES,
    LAST_STEP,
    MICROBATCHES,
    POSTS,
    RECORD_VALUE_BYTES,
    RPC_MESSAGE_FRAME_BYTES,
    STAGES,
    STATE_TOTALS,
)
from peerd.run.check_experts import experts_faults, trunk_faults
from peerd.run.check_line import line_faults
from peerd.run.runfile import (
    CORPUS_BYTES,
    FINGERPRINT_SECTIONS,
    PUBLISHED_BYTES,
    RANK,
    RANKS,
    SOURCES,
    AccessSection,
    DataSection,
    LimitsSection,
    OptimizerSection,
    RunFile,
    SourceSection,
    shared_text,
    sources_of,
)
from peerd.run.stage_plan import plan_faults

_NO_DIGEST = "is not a SHA-256 in hex; allowed: 64 of 0-9 and a-f"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check(run: RunFile) -> list[tuple[str, str]]:
    """All invalid values as (path, message with what is wrong and what is allowed); empty if the run file is valid."""
    faults: list[tuple[str, str]] = []

    def need(ok: bool, path: str, message: str) -> None:
        if not ok:
            faults.append((path, message))

    m, p = run.model, run.pipeline
    need(0 < len(run.run) <= 64, "run", f"has {len(run.run)} characters; allowed: 1 to 64")
    named = not run.run or re.fullmatch(r"[A-Za-z0-9_-]([A-Za-z0-9 ._-]*[A-Za-z0-9_-])?", run.run) is not None
    allowed = "letters, digits, _ and -, and between them dots and spaces"  # the name becomes a part of paths
    need(named, "run", f"is {_shown(run.run)}; allowed: {allowed}")
    loop = m.kind == "loop" and run.loop is not None
    need(loop or m.kind == "gpt" or ":" in m.kind, "model.kind", f"is {m.kind!r}; allowed: gpt, or module:function")
    need(1 <= m.d_model <= 65536, "model.d_model", f"is {m.d_model}; allowed: 1 to 65536")
    if m.kind == "gpt":  # a user's own model may have other heads, or none
        divides = m.heads >= 1 and m.d_model % max(m.heads, 1) == 0
        need(divides, "model.heads", f"is {m.heads}; must divide d_model ({m.d_model})")
        even = m.heads < 1 or (m.d_model // m.heads) % 2 == 0
        need(even, "model.heads", "rotary positions need an even d_model / heads")
    need(1 <= m.layers <= 10_000, "model.layers", f"is {m.layers}; allowed: 1 to 10000")
    mixed = f"is {m.precision}, which is for float32, but model.dtype is {m.dtype}; allowed: full"
    need(m.precision == "full" or m.dtype == "float32", "model.precision", mixed)
    own = f"is {run.limits.precision}, which is for float32, but model.dtype is {m.dtype}; allowed: full"
    need(run.limits.precision in (None, "full") or m.dtype == "float32", "limits.precision", own)
    need(1 <= m.context <= 1 << 20, "model.context", f"is {m.context}; allowed: 1 to 1048576")
    if m.kind == "gpt":
        need(1 <= p.stages <= m.layers, "pipeline.stages", f"is {p.stages}; allowed: 1 to model.layers ({m.layers})")
    else:  # the number of layers is known only after the user's function has run
        need(1 <= p.stages <= STAGES, "pipeline.stages", f"is {p.stages}; allowed: 1 to {STAGES}")
    for name, digest in (("kind_digest", m.kind_digest), ("vocab_digest", m.vocab_digest)):
        need(not digest or _is_digest(digest), f"model.{name}", _NO_DIGEST)
    need(not m.kind_digest or m.kind != "gpt", "model.kind_digest", "is of a function's source, but model.kind is gpt")
    need(not m.vocab_digest or m.vocab != "bytes", "model.vocab_digest", "is of a file, but model.vocab is bytes")
    need(1 <= p.microbatch <= 65536, "pipeline.microbatch", f"is {p.microbatch}; allowed: 1 to 65536")
    for path, coded in (("pipeline.boundary", p.boundary), ("averaging", run.averaging)):
        faults += _coding_faults(path, coded.code, coded.block, m.dtype)
    rank, code = run.averaging.rank, run.averaging.code
    need(1 <= rank <= RANKS, "averaging.rank", f"is {rank}; allowed: 1 to {RANKS}")
    need(rank == RANK or code == "powersgd", "averaging.rank", f"is {rank}, but {code} has no rank; leave it out")
    target = run.batch.target_samples
    whole = target >= 1 and p.microbatch >= 1 and target % p.microbatch == 0
    need(whole, "batch.target_samples", f"is {target}; must be a multiple of pipeline.microbatch ({p.microbatch})")
    faults += _optimizer_faults(run.optimizer)
    faults += trunk_faults(run)
    faults += _access_faults(run.access)
    part, patience_s = run.averaging.part_bytes, run.averaging.sender_timeout_s
    need(1024 <= part <= 4 << 20, "averaging.part_bytes", f"is {part}; allowed: 1024 to 4194304")
    size = run.averaging.group_size
    need(patience_s > 0, "averaging.sender_timeout_s", f"is {patience_s}; must be above 0")
    need(size == 0 or size >= 3, "averaging.group_size", f"is {size}; allowed: 0 (chosen), or 3 and more")
    faults += _data_faults(run.data)
    faults += experts_faults(run) + plan_faults(run) + _loop_faults(run)
    evaluate, checkpoint = run.evaluate, run.checkpoint
    need(evaluate.every_steps >= 0, "evaluate.every_steps", f"is {evaluate.every_steps}; must not be negative")
    need(1 <= evaluate.samples <= 1 << 20, "evaluate.samples", f"is {evaluate.samples}; allowed: 1 to 1048576")
    need(checkpoint.every_steps >= 0, "checkpoint.every_steps", f"is {checkpoint.every_steps}; must not be negative")
    need(checkpoint.keep >= 1, "checkpoint.keep", f"is {checkpoint.keep}; must be at least 1")
    return (faults or _size_faults(run)) + _limits_faults(run) + line_faults(run)


def _size_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of valid values that together make messages too large. Expects a run file without other faults."""
    faults: list[tuple[str, str]] = []
    m, p, steps = run.model, run.pipeline, run.optimizer.total_steps
    if p.stages > STAGES:
        faults.append(("pipeline.stages", f"is {p.stages}; allowed: 1 to {STAGES}"))
    microbatches = run.batch.target_samples // p.microbatch
    if microbatches > MICROBATCHES:
        message = f"makes {microbatches} microbatches of pipeline.microbatch ({p.microbatch}); allowed: up to"
        faults.append(("batch.target_samples", f"{message} {MICROBATCHES}"))
    if m.kind == "gpt" and p.stages > 1:  # the size of a user's own activations is known only once the model is built
        nbytes = p.microbatch * m.context * m.d_model * (8 if m.dtype == "float64" else 4)
        most = RPC_MESSAGE_FRAME_BYTES // 2 if p.boundary.code in ("none", "auto") else FRAME_BYTES
        if nbytes > most:
            message = f"is {p.microbatch}, which makes {nbytes} bytes of activations between stages; allowed: up to"
            faults.append(("pipeline.microbatch", f"{message} {most}"))
    if steps > LAST_STEP:
        faults.append(("optimizer.total_steps", f"is {steps}; allowed: 0 (no end) to {LAST_STEP}"))
    if not -(1 << 63) <= run.seed < 1 << 63:
        faults.append(("seed", f"is {run.seed}; allowed: {-(1 << 63)} to {(1 << 63) - 1}"))
    shared = len(shared_text(run)) + PUBLISHED_BYTES + CORPUS_BYTES * len(sources_of(run.data))
    if shared > RECORD_VALUE_BYTES:
        tree = msgspec.to_builtins(run)
        longest = max(FINGERPRINT_SECTIONS, key=lambda name: len(msgspec.json.encode(tree[name])))
        message = f"is too long: the settings that peers share take {shared} bytes; allowed: up to {RECORD_VALUE_BYTES}"
        faults.append((longest, message))
    return faults


def _coding_faults(path: str, code: str, block: int, dtype: str) -> list[tuple[str, str]]:
    faults = []
    if block != 0 and block not in BLOCKS:
        allowed = f"0 (the code's own), or a power of two from {BLOCKS[0]} to {BLOCKS[-1]}"
        faults.append((f"{path}.block", f"is {block}; allowed: {allowed}"))
    elif block != 0 and code not in (*CODES, "auto"):
        faults.append((f"{path}.block", f"is {block}, but {code} has no blocks; allowed: 0"))
    if code in CODES and dtype != "float32":
        message = f"is {code}, which is for float32, but model.dtype is {dtype}; allowed: none, bf16, fp16"
        faults.append((f"{path}.code", message + (", auto" if path == "pipeline.boundary" else "")))
    return faults


def _loop_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of the section loop: a run of users' own loops has one stage and no experts."""
    loop = run.loop
    if loop is None:
        return []
    faults = [
        (f"loop.{key}", "allowed: printable text")
        for key in ("model", "optimizer")
        if not (text := getattr(loop, key)) or not text.isprintable()
    ]
    if not _is_digest(loop.layout):
        faults.append(("loop.layout", _NO_DIGEST))
    if not 0 < loop.layout_bytes <= FRAME_BYTES:
        faults.append(("loop.layout_bytes", f"is {loop.layout_bytes}; allowed: 1 to {FRAME_BYTES}"))
    if run.model.kind != "loop":
        faults.append(("model.kind", f"is {run.model.kind!r}, but the run has a section loop; allowed: loop"))
    if run.pipeline.stages != 1:
        faults.append(("pipeline.stages", f"is {run.pipeline.stages}; allowed with a section loop: 1"))
    if run.experts is not None:
        faults.append(("experts", "is given beside loop; allowed: one or the other"))
    return faults


def _access_faults(access: AccessSection) -> list[tuple[str, str]]:
    if access.allow == "tokens":
        if is_peer_text(access.organizer):
            return []
        found = access.organizer or "empty"
        return [("access.organizer", f"is {found}; with allow: tokens it must be the organizer's peer id, 12D3KooW...")]
    idle = [name for name in ("organizer", "token", "revoked") if getattr(access, name)]
    return [(f"access.{name}", "has no effect without allow: tokens") for name in idle]


_LIMIT_RANGES: Final = {
    "microbatches_in_flight": (0, 4096, "0 (chosen) to 4096"),
    "data_cache_mb": (1, 1 << 30, f"1 to {1 << 30}"),
    "keep_totals": (0, STATE_TOTALS, f"0 to {STATE_TOTALS}"),
    "activations_mb": (0, 1 << 30, f"0 (half of what is free) to {1 << 30}"),
    "upload_mbit": (0, 1_000_000, "0 (no limit) to 1000000"),
    "download_mbit": (0, 1_000_000, "0 (no limit) to 1000000"),
    "threads": (0, 1024, "0 (no limit) to 1024"),
    "nice": (0, 19, "0 (as other programs) to 19 (after all others)"),
    "memory_gb": (0, 1_000_000, "0 (no limit) to 1000000"),
    "experts": (0, 1_000_000, "0 (as many as memory holds) to 1000000"),
    "disk_gb": (0, 1_000_000, "0 (no limit of one's own) to 1000000"),
}


def limits_faults(limits: LimitsSection) -> list[tuple[str, str]]:
    """Faults of a volunteer's own limits, as (key, message)."""
    faults = []
    for key, (least, most, allowed) in _LIMIT_RANGES.items():
        value = getattr(limits, key)
        if value is not None and not least <= value <= most:
            faults.append((key, f"is {value}; allowed: {allowed}"))
    if strange := [peer for peer in limits.trust if not is_peer_text(peer)]:
        faults.append(("trust", f"names {strange[0]!r}; allowed: peer ids such as 12D3KooW..."))
    if limits.hours:
        try:
            Hours.parse(limits.hours)
        except ValueError as error:
            faults.append(("hours", str(error)))
    return faults


def _limits_faults(run: RunFile) -> list[tuple[str, str]]:
    own = [(f"limits.{key}", message) for key, message in limits_faults(run.limits)]
    return _posts_faults(run.limits, run.pipeline.stages) + own + _offload_faults(run)


def _offload_faults(run: RunFile) -> list[tuple[str, str]]:
    """Faults of `limits.offload`, which needs a model that is a list of layers, and recomputation."""
    if not run.limits.offload:
        return []
    faults = []
    if run.experts is not None:
        message = "is true, but a run with experts computes its trunk in parts of layers; allowed: false"
        faults.append(("limits.offload", message))
    if run.model.kind == "loop":
        message = "is true, but the model is one piece, in the users' own loops; allowed: false"
        faults.append(("limits.offload", message))
    if run.limits.recompute is False:
        message = "is false, but with limits.offload layers are computed again; allowed: true, or leave it out"
        faults.append(("limits.recompute", message))
    return faults


def _posts_faults(limits: LimitsSection, stages: int) -> list[tuple[str, str]]:
    told, named = limits.stage, limits.stages
    listed = isinstance(told, list)
    once = len(set(named)) == len(named) and (not listed or 0 < len(named) <= POSTS)
    if once and all(0 <= stage < stages for stage in named):
        return []
    several = f", or a list of 1 to {POSTS} of them, each once" if listed else ""
    return [("limits.stage", f"is {told}; allowed: 0 to pipeline.stages - 1 ({stages - 1}){several}")]


def _optimizer_faults(o: OptimizerSection) -> list[tuple[str, str]]:
    share = "allowed: 0 up to (not including) 1"
    rules = [
        (o.lr > 0, "lr", "must be above 0"),
        (o.warmup_steps >= 0, "warmup_steps", "must not be negative"),
        (o.total_steps >= 0, "total_steps", "must not be negative"),
        (0 <= o.final_lr_share <= 1, "final_lr_share", "allowed: 0 to 1"),
        (o.weight_decay >= 0, "weight_decay", "must not be negative"),
        (0 <= o.beta1 < 1, "beta1", share),
        (0 <= o.beta2 < 1, "beta2", share),
        (o.eps > 0, "eps", "must be above 0"),
        (0 <= o.momentum < 1, "momentum", share),
        (o.trust > 0, "trust", "must be above 0"),
        (o.clip_norm >= 0, "clip_norm", "must not be negative"),
    ]
    faults = [(f"optimizer.{key}", f"is {getattr(o, key)}; {message}") for ok, key, message in rules if not ok]
    if o.decay != "none" and o.total_steps <= o.warmup_steps:
        faults.append(("optimizer.decay", "needs total_steps above warmup_steps"))
    return faults


def _data_faults(data: DataSection) -> list[tuple[str, str]]:
    faults = []
    if not 1 <= data.shuffle_buffer <= 10_000_000:
        faults.append(("data.shuffle_buffer", f"is {data.shuffle_buffer}; allowed: 1 to 10000000"))
    if not 0 <= data.holdout < 1:
        faults.append(("data.holdout", f"is {data.holdout}; allowed: 0 up to (not including) 1"))
    if data.sources and msgspec.structs.replace(data, sources=[]) != DataSection(
        shuffle_buffer=data.shuffle_buffer, holdout=data.holdout, strict=data.strict
    ):
        faults.append(("data.sources", "is given beside data.kind, path, field or digest; allowed: one or the other"))
    if len(data.sources) > SOURCES:
        faults.append(("data.sources", f"has {len(data.sources)} sources; allowed: up to {SOURCES}"))
    for where, source in sources_of(data):
        faults += [(f"{where}.{key}", message) for key, message in _source_faults(source)]
    return faults


def _source_faults(source: SourceSection) -> list[tuple[str, str]]:
    faults = []
    if not 1e-6 <= source.weight <= 1e6:
        faults.append(("weight", f"is {source.weight}; allowed: 0.000001 to 1000000"))
    if source.digest not in ("", "any") and not _is_digest(source.digest):
        faults.append(("digest", f"{_NO_DIGEST}, or any: every trainer has its own text"))
    if source.kind == "dataset":
        if not re.fullmatch(r"[^:]+:[^:]+", source.path):
            faults.append(("path", f"is {source.path!r}; allowed with kind dataset: module:function of a local file"))
    elif source.path.startswith(("http://", "https://")):
        faults += _address_faults(source)
    elif source.path == "stdlib" and source.digest:
        faults.append(("digest", "is given, but each version of Python has its own standard library; leave it out"))
    return faults


def _is_digest(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def _address_faults(source: SourceSection) -> list[tuple[str, str]]:
    try:
        url = urlsplit(source.path)
        host, user, _ = url.hostname, url.username, url.port
    except ValueError as error:
        return [("path", f"is {source.path!r}; not an address: {error}")]
    if not host or user is not None or url.query or url.fragment or not source.path.isprintable():
        return [("path", f"is {source.path!r}; allowed: https://host/folder, without a user, a query or a fragment")]
    if url.scheme == "http" and source.digest in ("", "any") and host not in ("localhost", "127.0.0.1", "::1"):
        return [("digest", "is missing, but http data can be changed on its way here; allowed: a digest, or https")]
    return []
