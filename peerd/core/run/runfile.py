"""The run file's sections as typed values: what one run is, apart from how it is read from YAML.

Every field has a unit in its name where it has one. `fingerprint` covers the sections that all peers of a run
must share, and of `access` who is let in; `limits` and the rest of `access` are each peer's own. Values that are
possible by type but senseless together are found by `check`.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

FINGERPRINT_SECTIONS = ("run", "seed", "model", "pipeline", "optimizer", "batch", "averaging", "data")
MOST_STALE = 32  # steps of an asynchronous trunk, unless the run file says otherwise
RANK = 4  # of gradients in powersgd, unless the run file says otherwise
RANKS = 128  # the most: each column costs two passes over the gradient
SOURCES = 64  # of data: each holds a part of the shuffle buffer
CORPUS_BYTES = 96  # that a trainer publishes with the settings for each source: its key and the digest of what it read
LINE_DISK_GB = 50.0  # of checkpoints of a run that was joined by a line, unless the user allows more
PUBLISHED_BYTES = 1536  # that it publishes with them besides: a token


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A section of the run file; an unknown key is an error."""


class ModelSection(Section, frozen=True):
    kind: str = "gpt"  # "gpt", or module:function in a local file; "loop": the users' own, see `loop`
    vocab: str = "bytes"  # "bytes", or the path of a tokenizers JSON file
    d_model: int = 128
    heads: int = 4
    layers: int = 4  # over all stages together
    share_layers: bool = False  # one layer's weights repeated inside a stage (ALBERT)
    context: int = 128  # tokens of one sample
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["full", "bf16", "fp16"] = "full"  # of computing inside a stage; what is kept has `dtype`
    # What becomes of buffers of a model of one's own, such as batch norm's, with each step: the peers' mean, those of
    # the peer with the lowest id, or each keeps its own. A newcomer gets them in any case.
    buffers: Literal["average", "first", "local"] = "average"
    kind_digest: str = ""  # SHA-256 of the function's source, in hex; empty: that of the file here, if there is one
    vocab_digest: str = ""  # the same of the tokenizers file


class BoundarySection(Section, frozen=True):
    # How activations and their gradients travel; auto: chosen tensor by tensor from the line and the values.
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8", "int4", "nf4", "fp8-e4m3", "auto"] = "none"
    block: int = 0  # values that share a scale in the codes of 4 and 8 bits; 0: the code's own
    lossless: Literal["auto", "never", "always"] = "auto"  # zstandard on top; auto: where the line is slow enough


class PipelineSection(Section, frozen=True):
    stages: int = 1  # 1: no pipeline, every trainer holds the whole model
    microbatch: int = 8  # samples
    # Who carries tensors from stage to stage: the stages' peers, each to the next one, or the trainer.
    handover: Literal["direct", "trainer"] = "direct"
    # What decides on the stage that a peer serves, while training goes on: what stages can do; that and the measured
    # network; nothing; or a plan, for the peers that it names.
    placement: Literal["load", "network", "fixed", "plan"] = "load"
    plan: str = ""  # the placement file of `peerd plan --out`; what it says is in the section `plan`
    boundary: BoundarySection = BoundarySection()


class PlanSection(Section, frozen=True):
    """Which peers serve which stage, and who of a stage hands on to whom of the next: a placement file with peer ids.

    `follows`: for each stage but the last, pairs of a place in `stages[n]` and one in `stages[n + 1]`.
    """

    stages: list[list[str]]
    follows: list[list[list[int]]] = msgspec.field(default_factory=list)


class OptimizerSection(Section, frozen=True):
    name: Literal["sgd", "adamw", "lamb", "lars"] = "adamw"
    lr: float = 1.0e-3
    warmup_steps: int = 0
    total_steps: int = 0  # global steps of the whole run; 0: no end, and no decay
    decay: Literal["none", "linear", "cosine"] = "none"
    final_lr_share: float = 0.1  # the learning rate at total_steps over `lr`
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-8
    momentum: float = 0.0  # sgd and lars only
    trust: float = 1.0e-3  # lars only: how far a tensor moves, as a share of its norm, at a learning rate of 1
    clip_norm: float = 0.0  # norm of one stage's gradient; 0: no clipping
    offload: bool = False  # moments and update on the CPU, wherever the parameters are
    delayed: bool = (
        False  # compute the next step's gradients, with the parameters of now, while this one's are averaged
    )
    # Of the trunk of a run with experts. asynchronous: microbatches neither need a place in a batch to begin nor wait
    # for a step; their gradients enter the batch that is open when they are computed.
    trunk: Literal["synchronous", "asynchronous"] = "synchronous"
    most_stale: int = MOST_STALE  # asynchronous trunk only: steps between a microbatch's beginning and its batch

    @property
    def asynchronous(self) -> bool:
        """True if trainers of the trunk do not wait for its steps."""
        return self.trunk == "asynchronous"


class BatchSection(Section, frozen=True):
    target_samples: int = 32  # samples of one global step over the whole swarm


class AveragingSection(Section, frozen=True):
    # How gradients travel; what a lossy code takes from them is added to the next ones (error feedback).
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8", "int4", "nf4", "fp8-e4m3", "powersgd"] = "none"
    block: int = 0  # as in pipeline.boundary
    rank: int = RANK  # of powersgd: columns of the two factors of each matrix
    part_bytes: int = 4 << 20  # the most that one piece has before it is coded; small vectors have smaller ones
    sender_timeout_s: float = 10.0  # a member that is silent for longer leaves the round
    group_size: int = 0  # peers of one group at most: larger stages average in several rounds; 0: chosen
    # Who contributes gradients: `chosen` leaves out those whose lines or devices would hold everybody up.
    contributors: Literal["chosen", "all"] = "chosen"


class ExpertOptimizerSection(Section, frozen=True):
    """Optimizer of each expert by itself; its schedule counts that expert's own updates."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    warmup_updates: int = 0
    total_updates: int = 0  # 0: no end, and no decay
    decay: Literal["none", "linear", "cosine"] = "none"
    final_lr_share: float = 0.1  # the learning rate at total_updates over `lr`
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    beta1: float = 0.9  # adamw only, as the next two
    beta2: float = 0.95
    eps: float = 1.0e-8
    clip_norm: float = 1.0  # norm of the gradient of one update; 0: no clipping


class ExpertsSection(Section, frozen=True):
    """Layers of experts that live on other peers (Learning@home)."""

    # ffn: D - hidden - hidden - D with layer norm and ReLU; ffn1: D - hidden - D; transformer: attention and
    # feed-forward over [B, L, D]; or module:function of a local file.
    block: str = "ffn"
    block_digest: str = ""  # SHA-256 of that function's source, in hex; empty: that of the file here, if there is one
    hidden: int = 0  # units of a block's hidden layers; 0: four times D
    heads: int = 4  # of a transformer block
    layers: int = 0  # layers of experts; 0: as many as the model has (model.layers)
    grid: list[int] = msgspec.field(default_factory=lambda: [16, 16])  # experts of one layer, by coordinate
    input: list[int] = msgspec.field(default_factory=list)  # shape of one sample; empty: by block and model
    output: list[int] = msgspec.field(default_factory=list)  # empty: as the input
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the samples that travel
    code: Literal["none", "bf16", "fp16", "dynamic8", "int8"] = "none"  # how they travel, and their gradients
    top_k: int = 4  # experts of one sample
    k_min: int = 1  # of these, answers without which a sample is an error
    timeout_s: float = 10.0  # for all the calls of one forward, or of one backward
    grace_s: float = 0.25  # for the rest, once every sample has k_min answers
    most_stale: int = -1  # updates of an expert between a forward and its backward; more is refused; -1: any number
    max_batch: int = 4096  # samples that one job of an expert takes at most
    balance: float = 0.01  # weight of the load-balancing loss
    optimizer: ExpertOptimizerSection = ExpertOptimizerSection()
    announce_s: float = 10.0  # between two announcements of a host
    checkpoint_updates: int = 100  # of one expert, between two of its checkpoints
    checkpoint_s: float = 30.0  # and the longest time that an update stays without one
    copies: int = 2  # holders of each checkpoint besides the expert's own host


class LoopSection(Section, frozen=True):
    """A run of users' own loops (`peerd.AveragingOptimizer`): model, data and optimizer are theirs, and not named here.

    `AveragingOptimizer.write_run_file` writes it, for helpers and backbones; nobody writes it by hand.
    """

    model: str  # parameters and buffers: names, shapes and dtypes
    optimizer: str  # its class and settings, and the schedule
    layout: str  # SHA-256 of the names, dtypes and shapes in a state, in hex; see core/messages/state
    layout_bytes: int  # of these as text


class SourceSection(Section, frozen=True):
    path: str  # glob of files; "stdlib": the sources of Python's standard library; http(s)://: a folder with an index
    # dataset: the path is module:function of a local file, which gives a torch IterableDataset.
    kind: Literal["text", "jsonl", "parquet", "dataset"] = "text"
    field: str = "text"  # the field of a JSONL line, or the column of a Parquet file
    # SHA-256 of the index under an http(s) path, or of the text here, in hex; any: trainers read texts of their own;
    # empty: the server is believed, and trainers compare what they read.
    digest: str = ""
    weight: float = 1.0  # share of the samples, over the sum of all weights


class DataSection(Section, frozen=True):
    kind: Literal["text", "jsonl", "parquet", "dataset"] = "text"  # this and the next three: of the only source
    path: str = "stdlib"
    field: str = "text"
    digest: str = ""
    sources: list[SourceSection] = msgspec.field(default_factory=list)  # or several, mixed by weight
    shuffle_buffer: int = 10_000  # samples, over all sources
    holdout: float = 0.02  # share of each source kept for validation
    strict: bool = False  # a row of JSONL or Parquet without text is an error; else such rows are left out


def sources_of(data: DataSection) -> list[tuple[str, SourceSection]]:
    """Each source with the path of its keys in the run file."""
    if data.sources:
        return [(f"data.sources[{index}]", source) for index, source in enumerate(data.sources)]
    return [("data", SourceSection(kind=data.kind, path=data.path, field=data.field, digest=data.digest))]


class EvaluateSection(Section, frozen=True):
    every_steps: int = 20  # 0: never
    samples: int = 64


class CheckpointSection(Section, frozen=True):
    every_steps: int = 50  # 0: only at the end
    keep: int = 3


BYTES_PER_MBIT: Final = 125_000  # each second


class LimitsSection(Section, frozen=True):
    microbatches_in_flight: int = 0  # of one trainer; 0: as many as fill all stages, by measurement
    stage: int | list[int] | None = None  # the stages to serve, or help; none: the one that needs a peer most
    data_cache_mb: int = 10_240  # MiB of disk for files fetched over http(s)
    keep_totals: int = 64  # summed gradients of the last steps kept for newcomers, in no more memory than the state's
    activations_mb: int = 0  # MiB of microbatches' tensors that a stage keeps or has under way; 0: half of what is free
    recompute: bool | None = None  # compute layers again in a backward; by default if memory for activations is short
    offload: bool = False  # parameters, sums and moments in the machine's memory; on the device a layer at a time
    upload_mbit: float = 0.0  # what this peer may send, Mb/s: its share of averaging follows it; 0: no limit
    download_mbit: float = 0.0  # what it may receive
    relay: bool | None = None  # carry connections between peers that cannot reach each other; none: backbones do
    threads: int = 0  # processors that this process may keep busy, and threads of one computation; 0: no limit
    nice: int | None = None  # priority of the process, as of `nice`; none: 10 where it joins, 0 where it is a backbone
    memory_gb: float = 0.0  # of this process, 10^9 bytes; on a GPU, of that too; 0: no limit
    experts: int = 0  # that this peer hosts at most; 0: as many as its memory holds
    # Peer ids, beside those of `bootstrap`, whose word on the run's positions this peer takes without further evidence.
    trust: list[str] = msgspec.field(default_factory=list)
    hours: str = ""  # of the day, by this machine's clock: 22:00-08:00, several with commas; empty: always
    disk_gb: float = 0.0  # of checkpoints, 10^9 bytes; 0: no limit, or LINE_DISK_GB where the run file came by a line
    precision: Literal["full", "bf16", "fp16"] | None = None  # in which this peer computes; default: model.precision

    @property
    def stages(self) -> list[int]:
        """The stages that `stage` names, in its order; empty: none."""
        return self.stage if isinstance(self.stage, list) else [] if self.stage is None else [self.stage]


class AccessSection(Section, frozen=True):
    allow: Literal["open", "tokens"] = "open"  # which peers may take part: all, or those with a token of the organizer
    organizer: str = ""  # the peer id whose signature makes a token
    token: str = ""  # file with this peer's token; without it access.token in the data directory
    revoked: str = ""  # file with a list of revoked tokens, besides those that come over the network


class AllowedCode(Section, frozen=True):
    """A Python file that the user allowed, as it was then."""

    path: str
    digest: str  # SHA-256 of its source and of the local files that it imports, in hex


class LineSection(Section, frozen=True):
    """Origin of a run file that came by a line `peerd://...`, and what the user of this machine allowed it to name.

    `peerd join` writes this section; a published run file never has it. `check_line` holds a run file with it to
    what a stranger may set.
    """

    link: str
    data: str = ""  # the user's own text (--data), as data.path has it
    tokenizer: str = ""  # the user's own tokenizers file (--tokenizer), as model.vocab has it
    code: list[AllowedCode] = msgspec.field(default_factory=list)  # --allow-code


class RunFile(Section, frozen=True):
    """One run, as an organizer writes it."""

    run: str
    seed: int = 0
    bootstrap: list[str] = msgspec.field(default_factory=list)
    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"])
    announce: list[str] = msgspec.field(default_factory=list)  # where others reach this peer: a published port, a name
    model: ModelSection = ModelSection()
    pipeline: PipelineSection = PipelineSection()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchSection = BatchSection()
    averaging: AveragingSection = AveragingSection()
    data: DataSection = DataSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    experts: ExpertsSection | None = None  # a run without them has none
    loop: LoopSection | None = None  # of a run of users' own loops
    limits: LimitsSection = LimitsSection()
    access: AccessSection = AccessSection()
    plan: PlanSection | None = None  # read from pipeline.plan; published with the run file
    line: LineSection | None = None  # a run file of the user's own has none

    @property
    def precision(self) -> Literal["full", "bf16", "fp16"]:
        """The precision of this peer's computing (DeDLOC, section 4.1); others of its stage may use another."""
        return self.limits.precision or self.model.precision


def precision_text(run: RunFile) -> str | None:
    """The precision that a stage is computed in here, with the run's where that is another; None for plain full."""
    own, shared = run.precision, run.model.precision
    if own != shared:
        return f"{own} (limits.precision; the run's is {shared})"
    return None if own == "full" else own


def unused_precision(run: RunFile, *, hosts_experts: bool = False) -> str | None:
    """The sentence that limits.precision has no effect here, or None if it has, or is not set."""
    if run.limits.precision is None:
        return None
    told = f"limits.precision ({run.limits.precision}) has no effect"
    if hosts_experts:
        own = "float32" if run.experts is None else run.experts.dtype
        return f"{told} on hosted experts: they compute in the run's experts.dtype, {own}"
    return f"{told} on a user's own loop: it computes as its program says" if run.loop is not None else None


def disk_bytes(run: RunFile) -> int | None:
    """Bytes of disk that the checkpoints of this peer may take; None: no limit."""
    allowed_gb = run.limits.disk_gb or (0.0 if run.line is None else LINE_DISK_GB)
    return int(allowed_gb * 1e9) if allowed_gb else None


def shared_text(run: RunFile) -> bytes:
    """The settings that all peers of a run share, as canonical JSON.

    Where a peer keeps its tokenizer and its text is its own matter: digests of their contents stand for them.
    """
    tree = msgspec.to_builtins(run)
    shared = {name: tree[name] for name in FINGERPRINT_SECTIONS}
    if run.model.vocab != "bytes":
        shared["model"]["vocab"] = "file"
    if run.averaging.contributors == "chosen":  # such runs keep the fingerprint that they had
        del shared["averaging"]["contributors"]
    if run.pipeline.stages == 1:  # nothing is handed over
        del shared["pipeline"]["handover"]
        del shared["pipeline"]["placement"]
    del shared["pipeline"]["plan"]
    if run.plan is not None:
        shared["pipeline"]["plan"] = hashlib.sha256(msgspec.json.encode(run.plan)).hexdigest()
    if not run.optimizer.asynchronous:  # other runs keep the fingerprint that they had before there was a choice
        del shared["optimizer"]["trunk"]
        del shared["optimizer"]["most_stale"]
    for section in (shared["data"], *shared["data"]["sources"]):
        del section["path"]
    del shared["data"]["strict"]  # the samples are the same
    if "experts" in tree and tree["experts"] is not None:  # runs without experts keep the fingerprint that they had
        shared["experts"] = tree["experts"]
    if run.loop is not None:  # likewise
        shared["loop"] = tree["loop"]
    if run.access.allow != "open":  # an open run's fingerprint is that of the time before there were tokens
        shared["access"] = {"allow": run.access.allow, "organizer": run.access.organizer}
    return msgspec.json.encode(shared, order="sorted")


def fingerprint(run: RunFile) -> bytes:
    """16 bytes that differ when any shared setting differs."""
    return hashlib.sha256(shared_text(run)).digest()[:16]
