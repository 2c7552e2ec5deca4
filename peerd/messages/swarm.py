"""The messages by which stage peers and trainers make global steps together, and the bounds of each field.

One conductor (a peer of stage 0) keeps the ledger of the current step: which microbatches make up the batch, and which
peer holds each one's gradient in each stage. Trainers and stage peers report to it in `sync` calls, which return when
there is news. It closes the step with `prepare` calls (average inside each stage) and `commit` calls (step the
optimizer) to the stage peers. Every call may be repeated: microbatches, steps and attempts have ids. In a delayed run a
second ledger is open at the same time, that of the following step; its microbatches are `early`. A microbatch's `seq`
is unique for its trainer (session in the upper bits); the authenticated connection identifies the trainer. Senders keep
the bounds, too: longer lists are sent in parts (such as the members), or cut as the field's comment says.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from peerd.core.limits import (
    AVERAGE_PART_BYTES,
    FORESEEABLE_S,
    FRAME_ELEMENTS,
    KEPT_SETS,
    LAST_STEP,
    LINE_S_PER_BYTE,
    MEMBERS,
    MICROBATCHES,
    REDO_AT_ONCE,
    RPC_ROUND_DEADLINE_S,
    SAVED_TOLD,
    SEEN_POSITIONS,
    STAGES,
    WAITS_CHARS,
)
from peerd.messages.contributions import Rest
from peerd.messages.encoding import Message
from peerd.messages.microbatches import Mb as Mb
from peerd.messages.microbatches import Mbs as Mbs
from peerd.messages.microbatches import PeerText as PeerText
from peerd.messages.microbatches import Seq as Seq
from peerd.messages.microbatches import Seqs as Seqs

AddrText = Annotated[str, msgspec.Meta(max_length=512)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=LAST_STEP)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=STAGES)]
Term = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
ReportedWorkRate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # microbatches a second; neither NaN nor infinite
SecondsPerByte = Annotated[float, msgspec.Meta(ge=0, le=LINE_S_PER_BYTE)]
Foreseen = Annotated[float, msgspec.Meta(ge=0, le=FORESEEABLE_S)]  # seconds from now; neither NaN nor infinite
Moment = Annotated[float, msgspec.Meta(ge=0, le=1 << 40)]  # Unix time; neither NaN nor infinite
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Lineage = Annotated[bytes, msgspec.Meta(max_length=16)]
MAX_MICROBATCHES = MICROBATCHES  # of one step; bounds every list below
MAX_MEMBERS = MEMBERS
WaitsText = Annotated[str, msgspec.Meta(max_length=WAITS_CHARS)]
PostText = Annotated[str, msgspec.Meta(max_length=72)]  # a peer at a stage; see swarm/posts

Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The conductor's signed statement that it admitted these microbatches of one trainer; see messages/proof.

    Without microbatches, it lets the trainer evaluate.
    """

    term: Term
    step: StepNumber
    seqs: Seqs
    signature: Signature
    helped: bool = False  # the trainer has helped to make a step, so it is a member of the run


class GrantStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a grant's signature covers."""

    run: Fingerprint
    term: Term
    step: StepNumber
    trainer: PeerText
    seqs: Seqs
    helped: bool = False


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stage peer's signed statement that it holds a microbatch's gradient; valid until its session ends."""

    session: Seq
    signature: Signature


class ReceiptStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a receipt's signature covers."""

    run: Fingerprint
    session: Seq
    stage: StageNumber
    step: StepNumber
    mb: Mb


class Position(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """The position of a peer's parameters: the step, and the lineage of the commit that made it.

    After a network split, two positions of the same step have different lineages.
    """

    step: StepNumber
    lineage: Lineage


class MemberInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A live stage peer in the conductor's list of members."""

    peer: PeerText
    stage: StageNumber
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    ready: bool  # has the parameters of the current step, and serves
    client: bool = False  # it can dial, but not be dialed
    since: Moment = 0.0  # when it joined its stage; 0 for a helper
    rate: ReportedWorkRate = 0.0  # microbatches/s, as reported and confirmed by past batches; 0: unknown
    helped: bool = False  # it has helped to make a step, so it is a member of the run
    rests: bool = False  # it currently contributes no gradients and makes no steps


class MemberNews(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of the conductor's list of members between two versions; see swarm/steps/member_list."""

    since: Version  # of the list before these changes; 0: the empty list
    version: Version  # of the list after these changes
    changed: Annotated[list[MemberInfo], msgspec.Meta(max_length=MAX_MEMBERS)]
    gone: Annotated[list[PostText], msgspec.Meta(max_length=MAX_MEMBERS)]
    more: bool  # there are further changes, for the next answer


Mode = Literal["node", "client", "aux"]  # sends a vector and sums a share; only sends; only sums


class LineInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's own bandwidth figures and its role in averaging; a rate of 0 is unknown."""

    mode: Mode = "node"
    up_bytes_per_s: Rate = 0.0
    down_bytes_per_s: Rate = 0.0
    elements: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of the vector that it averages; 0: none
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""  # of that vector
    further: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of a second vector, right after the first
    up_measured: bool = False  # the rate was observed in transfers: the line may carry more
    down_measured: bool = False


class PostLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A post's own figures of its load during about the last minute."""

    rate: ReportedWorkRate = 0.0  # microbatches/s of its device if it were never idle; 0: not known yet
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # fraction of time spent computing
    queue: Annotated[float, msgspec.Meta(ge=0, le=MICROBATCHES)] = 0.0  # mean number of waiting microbatches
    movable: bool = False  # it can move to another stage at the conductor's order


class MemberSync(Message, frozen=True):
    """A stage peer's report to the conductor, which answers when something has changed."""

    run: Fingerprint
    session: Seq
    stage: StageNumber
    position: Position
    prepared: Position | None  # the position after a commit, if an average is ready
    # Checkpoints it could return to: those it has fetched from a backbone, and the newest of its own.
    saved: Annotated[list[Position], msgspec.Meta(max_length=SAVED_TOLD)]
    held: Mbs | None  # None: unchanged since the last report
    counted: Mbs  # its microbatches in its last mean; only together with `held`
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    since: Moment  # when it joined the stage
    term: Term  # the highest it has seen
    seen: Version  # of the last answer
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]
    line: LineInfo | None = None  # None: unchanged or unknown; mode "aux": a helper, not a member
    early: Mbs = msgspec.field(default_factory=Mbs)  # held for the following step; only together with `held`
    digest: Digest = b""  # of its last mean, as in Prepared; only together with `held`
    listed: Version = 0  # of its list of members
    load: PostLoad | None = None  # None: unchanged or unknown
    # Positions of the swarm, newest last, that it took part in or learned of; only together with `held`.
    witnessed: Annotated[list[Position], msgspec.Meta(max_length=SEEN_POSITIONS)] = msgspec.field(default_factory=list)


class Forecast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Predicted seconds until the current batch is complete, and until its step is done."""

    whole_in_s: Foreseen
    step_in_s: Foreseen


class MemberAnswer(Message, frozen=True):
    """The conductor's answer to a stage peer's report."""

    term: Term
    current: Position | None  # that members should have; None while they move between positions
    complete: bool  # the run has made all its steps
    waits_for: WaitsText
    resend: bool  # the conductor does not know this session, so the next report must include `held`
    version: int
    members: MemberNews | None  # None: the member's list is the newest
    forecast: Forecast | None = None  # of the current step, or None if unknown
    lost: bool = False  # no position is available in every stage: checkpoints of others are needed
    # While `lost`: proven positions, newest first; the member should fetch a backbone's checkpoint of one of them.
    wanted: Annotated[list[Position], msgspec.Meta(max_length=KEPT_SETS)] = msgspec.field(default_factory=list)
    apart: bool = False  # the conductor does not know the reported position: it may be of another part of the run
    rests: Rest | None = None  # if set, the member contributes no gradients and makes no steps for now
    spared: bool = False  # its gradient of this step is in a sum, so other peers compute the remaining microbatches


class ListMembers(Message, frozen=True):
    """A request for the conductor's list of members, by a peer that is about to choose a stage."""

    run: Fingerprint
    listed: Version = 0  # of the list that the caller has


class MembersListed(Message, frozen=True):
    """The conductor's list, as in MemberAnswer; `held` are the stages of which a member has a state after step 0."""

    members: MemberNews | None
    held: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)]
    # Estimated microbatches/s of all peers of each stage together; empty: unknown.
    capacity: Annotated[list[ReportedWorkRate], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)


class WhichPosts(Message, frozen=True):
    """A request for the stages of a run that a peer serves now. Its DHT records may be from before a restart."""

    run: Fingerprint


class PostsHeld(Message, frozen=True):
    """The stages that the answering peer serves."""

    stages: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)]


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A microbatch of the calling trainer, and the holder of its gradient in each stage ("" if there is none)."""

    seq: Seq
    holders: Annotated[list[PeerText], msgspec.Meta(max_length=STAGES)]
    # The holders' receipts, in the same order; None, or a shorter list: no receipt.
    receipts: Annotated[list[Receipt | None], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)


class TrainerSync(Message, frozen=True):
    """A trainer's report to the conductor, which answers when something has changed for the trainer."""

    run: Fingerprint
    term: Term  # the highest it has seen
    step: StepNumber  # the step these microbatches belong to
    open: Seqs  # begun or requested, in the trainer's order of preference
    done: Annotated[list[Done], msgspec.Meta(max_length=MAX_MICROBATCHES)]  # finished since the last answer
    seen: Version  # of the last answer
    seen_members: Version  # of its list of members
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]
    early: Seqs = msgspec.field(default_factory=Seqs)  # of `open` and `done`, those begun for the following step
    # Microbatches that it cannot compute: it was asked to repeat them and no longer has them, or gradients not finite.
    unknown: Seqs = msgspec.field(default_factory=Seqs)


class Redo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An order to repeat a microbatch on one stage, which has lost its gradient."""

    seq: Seq
    stage: StageNumber


class TrainerAnswer(Message, frozen=True):
    """The conductor's answer to a trainer's report."""

    term: Term
    step: StepNumber
    taken: bool  # False: the trainer must report `done` again later
    admitted: Seqs  # all of this trainer's microbatches that count towards `step`
    redo: Annotated[list[Redo], msgspec.Meta(max_length=REDO_AT_ONCE)]  # the first; others follow when these are done
    counted: Seqs | None  # this trainer's microbatches in the batch of the reported step, or None if unknown
    evaluate: Grant | None  # for the trainer that evaluates, to send to stage peers; None for all others
    complete: bool  # the run has made all its steps
    waits_for: WaitsText
    version: int
    members: MemberNews | None  # as in MemberAnswer
    forecast: Forecast | None = None  # as in MemberAnswer
    early: Seqs = msgspec.field(default_factory=Seqs)  # like `admitted`, for the following step of a delayed run
    counted_early: Seqs | None = msgspec.field(default_factory=Seqs)  # like `counted`, for the step after that one
    grant: Grant | None = None  # of `admitted`, to send to stage peers, or None if nothing is admitted
    grant_early: Grant | None = None  # of `early`


AttemptName = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Party(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One peer of an averaging round and the share of the vector that it sums."""

    peer: PeerText
    mode: Mode
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Prepare(Message, frozen=True):
    """An order to sum the gradients of `step` in one group of a stage; the answer is sent when the sum is ready.

    A member sends the gradient of its own microbatches, or the sum of an earlier order.
    """

    run: Fingerprint
    term: Term
    step: StepNumber
    attempt: AttemptName
    lineage: Lineage  # of the step after the commit
    # Peers of the stage that average: senders, in the order of the sum, followed by `listeners`.
    group: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)]
    assigned: Mbs  # this member's microbatches in the sum; its own gradient includes no others
    samples: Annotated[int, msgspec.Meta(ge=1)]  # of the whole batch
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=RPC_ROUND_DEADLINE_S)]
    # All peers of the round, helpers included, in the order of their shares; empty: the group, in equal shares.
    split: Annotated[list[Party], msgspec.Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    part_bytes: Annotated[int, msgspec.Meta(ge=0, le=AVERAGE_PART_BYTES)] = 0  # at most; 0: as in the run file
    elements: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of the vectors, for helpers
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""  # of the vectors, for helpers
    further: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # elements of a second sum; 0: none
    s_per_byte: SecondsPerByte = 0.0  # a round's time over the vector's bytes, for pacing; 0: some line is unknown
    stage: StageNumber = 0  # the peer may serve or help several
    # Members of the group that send nothing and receive the sum.
    listeners: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    copy: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)] = 0  # index of this group among those with the same sum,
    copies: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] = 1  # and their number
    # The attempt whose sum this member sends, or keeps if it is a listener. If None, it sends its own gradient.
    brings: AttemptName | None = None
    last: bool = True  # the result is the sum of the whole batch; else a later order continues with it
    second: bool = False  # of PowerSGD: the member sends its second factors, computed from the sum that it has
    leads: bool = True  # it contributes the buffers that only one member of the stage may contribute


class Prepared(Message, frozen=True):
    """The answer to Prepare: whether the sum is ready, else why not."""

    ok: bool
    missing: Mbs  # assigned, but not held here
    lost: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)]  # group members that failed this one
    digest: Digest = b""  # SHA-256 of the prepared mean, as bytes in the order of the vector; "" of a helper
    refused: Mbs = msgspec.field(default_factory=Mbs)  # assigned and held, but their values cannot be summed
    absent: bool = False  # the sum that it should send is not here


class Commit(Message, frozen=True):
    """An order to step the optimizer with the prepared mean, to position `target`."""

    run: Fingerprint
    term: Term
    target: Position
    stage: StageNumber  # as in Prepare


class Restore(Message, frozen=True):
    """An order to return to the checkpoint of `target`, the newest position that the swarm has in common."""

    run: Fingerprint
    term: Term
    target: Position
    stage: StageNumber  # as in Prepare


class Relocate(Message, frozen=True):
    """An order to serve stage `target` instead of `stage`. An empty answer means that the peer will try."""

    run: Fingerprint
    term: Term
    stage: StageNumber  # as in Prepare
    target: StageNumber
    why: WaitsText  # for the log


class Moved(Message, frozen=True):
    """The answer to commit and restore: the member's new position."""

    position: Position
    digest: Digest = b""  # of a commit: of the mean that it stepped with,
    signature: Signature = b""  # and its signature of the commit; see messages/commits


class Conducts(Message, frozen=True):
    """A conductor's answer to WhoConducts: its term, and the position of its members, or None if unknown."""

    term: Term
    current: Position | None = None


class Leave(Message, frozen=True):
    """Notice that the sender leaves: the given stage, or, if None, as a trainer. Nobody then waits for it."""

    run: Fingerprint
    stage: StageNumber | None = None


class WhoConducts(Message, frozen=True):
    """A request to a peer to report whether it conducts a run."""

    run: Fingerprint


class StageForward(Message, frozen=True):
    """A forward call in an evaluation, at the stage's current step; its frame is the input."""

    run: Fingerprint
    stage: StageNumber
    step: None = None  # unused, like `seq`: both keep the message's layout
    line_bytes_per_s: Rate = 0.0  # the slowest known connection on the answer's path; 0: unknown
    seq: Seq = 0
    grant: Grant | None = None  # the conductor's, which lets the caller evaluate


class StageLoss(Message, frozen=True):
    """A call to the last stage in an evaluation: compute the samples' mean loss. Frames: inputs, targets."""

    run: Fingerprint
    stage: StageNumber
    grant: Grant | None = None  # the conductor's, which lets the caller evaluate


class StageAnswer(Message, frozen=True):
    """Answer to StageForward, whose frame is the output, and to StageLoss."""

    loss_sum: float = 0.0  # over samples; of a loss
    service_s: float = 0.0  # seconds of computing, for routing
    arrival_bytes_per_s: Rate = 0.0  # rate at which the caller's frames arrive here; 0: unknown
    receipt: None = None  # unused: keeps the message's layout


class AverageAlive(Message, frozen=True):
    """The answer of a member that takes part in an averaging attempt. `coming`: it is still busy with another sum."""

    coming: bool = False
    idle_s: Annotated[float, msgspec.Meta(ge=0, le=RPC_ROUND_DEADLINE_S)] = 0.0  # since it last sent or received bytes


class AverageKey(Message, frozen=True):
    """One part of a vector in an averaging round, as the call's frame; the answer's frame is the sum of all members'
    parts.
    """

    attempt: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    part: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
