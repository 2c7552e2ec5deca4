"""The run file's sections as typed values, independent of how they are read from YAML.

A field with a unit has it in its name. `fingerprint` covers the sections that all peers of a run must share, and of
`access` the rule of admission; `limits` and the rest of `access` are local to each peer. `check` finds values that are
valid by type but make no sense.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

FINGERPRINT_SECTIONS = ("run", "seed", "model", "pipeline", "optimizer", "batch", "averaging", "data")
MOST_STALE = 32  # default of optimizer.most_stale, in steps
RANK = 4  # default of averaging.rank
RANKS = 128  # the largest rank: each column costs two passes over the gradient
SOURCES = 64  # the most data sources: each has a part of the shuffle buffer
CORPUS_BYTES = 96  # that a trainer publishes with the settings per source: its key and the digest of its text
LINE_DISK_GB = 50.0  # default limit for checkpoints of a run that was joined by a link
PUBLISHED_BYTES = 1536  # that a trainer publishes with the settings in addition: a token


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base class of the run file's sections; an unknown key is an error."""


class ModelSection(Section, frozen=True):
    """The model: its architecture, tokenizer and number formats."""

    kind: str = "gpt"  # "gpt", or module:function in a local file; "loop": in users' own programs, see `loop`
    vocab: str = "bytes"  # "bytes", or the path of a tokenizers JSON file
    d_model: int = 128
    heads: int = 4
    layers: int = 4  # over all stages together
    share_layers: bool = False  # all layers of a stage share their weights (ALBERT)
    context: int = 128  # tokens per sample
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["full", "bf16", "fp16"] = "full"  # of computation inside a stage; parameters have `dtype`
    # Buffers of a user's own model, such as batch norm's, after each step: the peers' mean, those of the peer with the
    # lowest id, or each peer's own. Newcomers always receive them.
    buffers: Literal["average", "first", "local"] = "average"
    kind_digest: str = ""  # SHA-256 of the function's source, in hex; empty: of the local file, if there is one
    vocab_digest: str = ""  # the same for the tokenizers file


class BoundarySection(Section, frozen=True):
    """Encoding of the tensors sent between stages."""

    # Code of activations and their gradients; auto: chosen for each tensor by its values and the line's speed.
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8", "int4", "nf4", "fp8-e4m3", "auto"] = "none"
    block: int = 0  # values that share a scale in the codes of 4 and 8 bits; 0: the code's default
    lossless: Literal["auto", "never", "always"] = "auto"  # zstandard on top; auto: if the line is slow enough


class PipelineSection(Section, frozen=True):
    """Division of the model into stages, and how microbatches pass through them."""

    stages: int = 1  # 1: no pipeline, every trainer has the whole model
    microbatch: int = 8  # samples
    handover: Literal["direct"] = "direct"  # each stage's peer sends to the next stage; older run files name it
    # When peers change stage during training: by the stages' throughput; by that and the measured network; never; or
    # by a plan, for the peers in it.
    placement: Literal["load", "network", "fixed", "plan"] = "load"
    plan: str = ""  # the placement file of `peerd plan --out`; its content is in the section `plan`
    boundary: BoundarySection = BoundarySection()


class PlanSection(Section, frozen=True):
    """A placement file with peer ids: the peers of each stage, and the peers of the next stage that each sends to.

    `follows`: for each stage but the last, pairs of an index into `stages[n]` and one into `stages[n + 1]`.
    """

    stages: list[list[str]]
    follows: list[list[list[int]]] = msgspec.field(default_factory=list)


class OptimizerSection(Section, frozen=True):
    """The optimizer and its schedule."""

    name: Literal["sgd", "adamw", "lamb", "lars"] = "adamw"
    lr: float = 1.0e-3
    warmup_steps: int = 0
    total_steps: int = 0  # global steps of the whole run; 0: no end, and no decay
    decay: Literal["none", "linear", "cosine"] = "none"
    final_lr_share: float = 0.1  # learning rate at total_steps, as a fraction of `lr`
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-8
    momentum: float = 0.0  # sgd and lars only
    trust: float = 1.0e-3  # lars only: trust coefficient, a tensor's step as a fraction of its norm at lr 1
    clip_norm: float = 0.0  # norm of one stage's gradient; 0: no clipping
    offload: bool = False  # moments and update on the CPU, even if the parameters are on a GPU
    delayed: bool = False  # compute the next step's gradients, with current parameters, while averaging this step's
    # For the trunk of a run with experts. asynchronous: microbatches start without a place in a batch and do not wait
    # for a step; their gradients enter the batch that is open when they are computed.
    trunk: Literal["synchronous", "asynchronous"] = "synchronous"
    most_stale: int = MOST_STALE  # asynchronous trunk only: the most steps from a microbatch's start to its batch

    @property
    def asynchronous(self) -> bool:
        """True if trainers of the trunk do not wait for its steps."""
        return self.trunk == "asynchronous"


class BatchSection(Section, frozen=True):
    """The batch of one global step."""

    target_samples: int = 32  # samples of one global step over the whole swarm


class AveragingSection(Section, frozen=True):
    """Averaging of gradients among the peers of a stage."""

    # Code of gradients as sent; the error of a lossy code is added to the next gradients (error feedback).
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8", "int4", "nf4", "fp8-e4m3", "powersgd"] = "none"
    block: int = 0  # as in pipeline.boundary
    rank: int = RANK  # of powersgd: columns of the two factors of each matrix
    part_bytes: int = 4 << 20  # largest part of a vector, before it is coded; small vectors have smaller parts
    sender_timeout_s: float = 10.0  # a member that is silent for longer is dropped from the round
    group_size: int = 0  # most peers per group: larger stages average in several rounds; 0: chosen automatically
    # Who contributes gradients: `chosen` excludes peers whose lines or devices would delay all others.
    contributors: Literal["chosen", "all"] = "chosen"


class ExpertOptimizerSection(Section, frozen=True):
    """The optimizer of each expert. The schedule counts the expert's own updates."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    warmup_updates: int = 0
    total_updates: int = 0  # 0: no end, and no decay
    decay: Literal["none", "linear", "cosine"] = "none"
    final_lr_share: float = 0.1  # learning rate at total_updates, as a fraction of `lr`
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    beta1: float = 0.9  # adamw only, as the next two
    beta2: float = 0.95
    eps: float = 1.0e-8
    clip_norm: float = 1.0  # norm of the gradient of one update; 0: no clipping


class ExpertsSection(Section, frozen=True):
    """Layers of experts that are hosted by other peers (Learning@home)."""

    # ffn: D - hidden - hidden - D with layer norm and ReLU; ffn1: D - hidden - D; transformer: attention and
    # feed-forward over [B, L, D]; or module:function of a local file.
    block: str = "ffn"
    block_digest: str = ""  # SHA-256 of that function's source, in hex; empty: of the local file, if there is one
    hidden: int = 0  # units of a block's hidden layers; 0: four times D
    heads: int = 4  # of a transformer block
    layers: int = 0  # layers of experts; 0: model.layers
    grid: list[int] = msgspec.field(default_factory=lambda: [16, 16])  # size of one layer's grid in each dimension
    input: list[int] = msgspec.field(default_factory=list)  # shape of one sample; empty: by block and model
    output: list[int] = msgspec.field(default_factory=list)  # empty: the same as the input
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the samples that are sent
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8"] = "none"  # of samples and their gradients as sent
    top_k: int = 4  # experts per sample
    k_min: int = 1  # a sample with fewer answers is an error
    timeout_s: float = 10.0  # for all calls of one forward, or of one backward
    grace_s: float = 0.25  # for the remaining answers, once every sample has k_min
    most_stale: int = -1  # most updates of an expert between a forward and its backward; -1: unlimited
    max_batch: int = 4096  # most samples in one job of an expert
    balance: float = 0.01  # weight of the load-balancing loss
    optimizer: ExpertOptimizerSection = ExpertOptimizerSection()
    announce_s: float = 10.0  # interval of a host's announcements
    checkpoint_updates: int = 100  # of one expert, between two checkpoints
    checkpoint_s: float = 30.0  # the longest time between an update and a checkpoint with it
    copies: int = 2  # holders of each checkpoint besides the expert's host


class LoopSection(Section, frozen=True):
    """A run of users' own training loops (`peerd.AveragingOptimizer`), which define model, data and optimizer.

    `AveragingOptimizer.write_run_file` writes this section, for helpers and backbones; it is not written by hand.
    """

    model: str  # parameters and buffers: names, shapes and dtypes
    optimizer: str  # its class and settings, and the schedule
    layout: str  # SHA-256 of the names, dtypes and shapes in a state, in hex; see messages/state
    layout_bytes: int  # length of the text with this digest


class SourceSection(Section, frozen=True):
    """One source of training data."""

    path: str  # glob of files; "stdlib": the sources of Python's standard library; http(s)://: a folder with an index
    # dataset: the path is module:function of a local file that returns a torch IterableDataset.
    kind: Literal["text", "jsonl", "parquet", "dataset"] = "text"
    field: str = "text"  # the field of a JSONL line, or the column of a Parquet file
    # SHA-256 of the index under an http(s) path, or of the local text, in hex; any: each trainer has its own text;
    # empty: the server is trusted, and trainers compare their texts.
    digest: str = ""
    weight: float = 1.0  # its fraction of the samples is this over the sum of all weights


class DataSection(Section, frozen=True):
    """The training data: one source, or a weighted mixture of several."""

    kind: Literal["text", "jsonl", "parquet", "dataset"] = "text"  # this and the next three: for a single source
    path: str = "stdlib"
    field: str = "text"
    digest: str = ""
    sources: list[SourceSection] = msgspec.field(default_factory=list)  # or several, mixed by weight
    shuffle_buffer: int = 10_000  # samples, over all sources
    holdout: float = 0.02  # fraction of each source that is kept for validation
    strict: bool = False  # a row of JSONL or Parquet without text is an error; else such rows are skipped


def sources_of(data: DataSection) -> list[tuple[str, SourceSection]]:
    """Each source, with the path of its section in the run file."""
    if data.sources:
        return [(f"data.sources[{index}]", source) for index, source in enumerate(data.sources)]
    return [("data", SourceSection(kind=data.kind, path=data.path, field=data.field, digest=data.digest))]


class EvaluateSection(Section, frozen=True):
    """Validation during training."""

    every_steps: int = 20  # 0: never
    samples: int = 64


class CheckpointSection(Section, frozen=True):
    """Checkpoints of each stage."""

    every_steps: int = 50  # 0: only at the end
    keep: int = 3


BYTES_PER_MBIT: Final = 125_000  # each second


class LimitsSection(Section, frozen=True):
    """This peer's own limits and choices, which other peers need not share."""

    microbatches_in_flight: int = 0  # of one trainer; 0: enough to keep all stages busy, by measurement
    stage: int | list[int] | None = None  # the stages to serve or help; default: the stage that needs a peer most
    data_cache_mb: int = 10_240  # MiB of disk for files fetched over http(s)
    keep_totals: int = 64  # summed gradients of the last steps kept for newcomers, in at most the state's memory
    activations_mb: int = 0  # MiB of microbatches' tensors that a stage holds; 0: half of the free memory
    recompute: bool | None = None  # recompute layers in the backward; default: if activations do not fit
    offload: bool = False  # parameters, sums and moments in main memory; on the device one layer at a time
    upload_mbit: float = 0.0  # upload limit in Mb/s, which also sets this peer's share of averaging; 0: no limit
    download_mbit: float = 0.0  # download limit in Mb/s; 0: no limit
    relay: bool | None = None  # relay connections between peers that cannot reach each other; default: on backbones
    threads: int = 0  # CPUs that this process may use, and threads of one computation; 0: no limit
    nice: int | None = None  # niceness of the process; default: 10 for peers that join, 0 for backbones
    memory_gb: float = 0.0  # of this process, 10^9 bytes, and of its GPU memory; 0: no limit
    experts: int = 0  # that this peer hosts at most; 0: as many as its memory holds
    # Peer ids, besides those of `bootstrap`, whose statements on the run's positions need no further evidence.
    trust: list[str] = msgspec.field(default_factory=list)
    hours: str = ""  # of the day, by this machine's clock: 22:00-08:00, several with commas; empty: always
    disk_gb: float = 0.0  # of checkpoints, 10^9 bytes; 0: no limit, or LINE_DISK_GB for a run file from a join link
    precision: Literal["full", "bf16", "fp16"] | None = None  # of this peer's computation; default: model.precision

    @property
    def stages(self) -> list[int]:
        """The value of `stage` as a list, empty for none."""
        return self.stage if isinstance(self.stage, list) else [] if self.stage is None else [self.stage]


class AccessSection(Section, frozen=True):
    """Which peers may take part in the run, and this peer's credentials."""

    allow: Literal["open", "tokens"] = "open"  # which peers may take part: all, or those with a token of the organizer
    organizer: str = ""  # peer id of the organizer, who signs the tokens
    token: str = ""  # file with this peer's token; empty: access.token in the data directory
    revoked: str = ""  # file with a list of revoked tokens, in addition to lists from the network


class AllowedCode(Section, frozen=True):
    """A Python file that the user allowed, with its content at that time."""

    path: str
    digest: str  # SHA-256 of its source and of the local files that it imports, in hex


class LineSection(Section, frozen=True):
    """Origin of a run file that came by a join link, and the code and files that this machine's user allowed.

    `peerd join` writes this section; a published run file never has it. If it is present, `check_line` allows only
    values that a stranger may set.
    """

    link: str
    data: str = ""  # the user's own text (--data), as in data.path
    tokenizer: str = ""  # the user's own tokenizers file (--tokenizer), as in model.vocab
    code: list[AllowedCode] = msgspec.field(default_factory=list)  # --allow-code


class RunFile(Section, frozen=True):
    """A whole run file."""

    run: str
    seed: int = 0
    bootstrap: list[str] = msgspec.field(default_factory=list)
    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"])
    announce: list[str] = msgspec.field(default_factory=list)  # addresses for other peers, such as a forwarded port
    model: ModelSection = ModelSection()
    pipeline: PipelineSection = PipelineSection()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchSection = BatchSection()
    averaging: AveragingSection = AveragingSection()
    data: DataSection = DataSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    experts: ExpertsSection | None = None  # None: a run without experts
    loop: LoopSection | None = None  # only for runs of users' own loops
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()
    plan: PlanSection | None = None  # read from pipeline.plan; published with the run file
    line: LineSection | None = None  # only in run files from a join link

    @property
    def precision(self) -> Literal["full", "bf16", "fp16"]:
        """The precision of this peer's computation (DeDLOC, section 4.1); other peers of the stage may use another."""
        return self.limits.precision or self.model.precision


def precision_text(run: RunFile) -> str | None:
    """This peer's precision as text, with the run's if they differ; None if both are full."""
    own, shared = run.precision, run.model.precision
    if own != shared:
        return f"{own} (limits.precision; the run's is {shared})"
    return None if own == "full" else own


def unused_precision(run: RunFile, *, hosts_experts: bool = False) -> str | None:
    """A sentence that says that limits.precision has no effect here; None if it has an effect, or is not set."""
    if run.limits.precision is None:
        return None
    told = f"limits.precision ({run.limits.precision}) has no effect"
    if hosts_experts:
        own = "float32" if run.experts is None else run.experts.dtype
        return f"{told} on hosted experts: they compute in the run's experts.dtype, {own}"
    return f"{told} on a user's own loop: it computes as its program says" if run.loop is not None else None


def disk_bytes(run: RunFile) -> int | None:
    """Bytes of disk that the checkpoints of this peer may take; None if there is no limit."""
    allowed_gb = run.limits.disk_gb or (0.0 if run.line is None else LINE_DISK_GB)
    return int(allowed_gb * 1e9) if allowed_gb else None


def shared_text(run: RunFile) -> bytes:
    """The settings that all peers of a run share, as canonical JSON.

    Paths of the tokenizer and the data are local and not included; digests identify their contents.
    """
    tree = msgspec.to_builtins(run)
    shared = {name: tree[name] for name in FINGERPRINT_SECTIONS}
    if run.model.vocab != "bytes":
        shared["model"]["vocab"] = "file"
    if run.averaging.contributors == "chosen":  # the fingerprint is that of versions without this key
        del shared["averaging"]["contributors"]
    if run.pipeline.stages == 1:  # has no effect
        del shared["pipeline"]["handover"]
        del shared["pipeline"]["placement"]
    del shared["pipeline"]["plan"]
    if run.plan is not None:
        shared["pipeline"]["plan"] = hashlib.sha256(msgspec.json.encode(run.plan)).hexdigest()
    if not run.optimizer.asynchronous:  # the fingerprint is that of versions without these keys
        del shared["optimizer"]["trunk"]
        del shared["optimizer"]["most_stale"]
    for section in (shared["data"], *shared["data"]["sources"]):
        del section["path"]
    del shared["data"]["strict"]  # does not change the samples
    if "experts" in tree and tree["experts"] is not None:  # else the fingerprint is that of versions without experts
        shared["experts"] = tree["experts"]
    if run.loop is not None:  # the same for loops
        shared["loop"] = tree["loop"]
    if run.access.allow != "open":  # the same for tokens
        shared["access"] = {"allow": run.access.allow, "organizer": run.access.organizer}
    return msgspec.json.encode(shared, order="sorted")


def fingerprint(run: RunFile) -> bytes:
    """16 bytes that differ if any shared setting differs: a truncated SHA-256 of `shared_text`."""
    return hashlib.sha256(shared_text(run)).digest()[:16]
