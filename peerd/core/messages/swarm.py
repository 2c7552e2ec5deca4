"""The messages by which stage peers and trainers make global steps together, and what each field may hold.

One conductor (a peer of stage 0) keeps the ledger of the step under way: which microbatches make up the batch, and
which peer holds each one's gradient in each stage. Trainers and stage peers report to it by `sync` calls that wait for
news; it closes the step by `prepare` (average inside each stage) and `commit` (step the optimizer) calls to the stage
peers. Everything may be repeated: calls name microbatches, steps and attempts by id. In a delayed run a second ledger
is open meanwhile, that of the step after: its microbatches are `early`. A microbatch's `seq` is unique for its trainer
(session in the upper bits); the authenticated connection says which trainer that is. Senders keep these bounds, too:
what is longer is sent in parts (the list of members, for example), or cut by a rule that stands at the field.
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
from peerd.core.messages.contributions import Rest
from peerd.core.messages.encoding import Message
from peerd.core.messages.microbatches import Mb as Mb
from peerd.core.messages.microbatches import Mbs as Mbs
from peerd.core.messages.microbatches import PeerText as PeerText
from peerd.core.messages.microbatches import Seq as Seq
from peerd.core.messages.microbatches import Seqs as Seqs

AddrText = Annotated[str, msgspec.Meta(max_length=512)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=LAST_STEP)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=STAGES)]
Term = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
WorkRateTold = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # microbatches a second; neither NaN nor infinite
SecondsPerByte = Annotated[float, msgspec.Meta(ge=0, le=LINE_S_PER_BYTE)]
Foreseen = Annotated[float, msgspec.Meta(ge=0, le=FORESEEABLE_S)]  # seconds from now; neither NaN nor infinite
Moment = Annotated[float, msgspec.Meta(ge=0, le=1 << 40)]  # Unix time; neither NaN nor infinite
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Lineage = Annotated[bytes, msgspec.Meta(max_length=16)]
MAX_MICROBATCHES = MICROBATCHES  # of one step; bounds every list below
MAX_MEMBERS = MEMBERS
WaitsText = Annotated[str, msgspec.Meta(max_length=WAITS_CHARS)]
PostText = Annotated[str, msgspec.Meta(max_length=72)]  # a peer at a stage; see machine/swarm/posts

Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The conductor's signed word that it has admitted these microbatches of one trainer; see core/messages/proof.

    Without microbatches: that this trainer is the one that evaluates.
    """

    term: Term
    step: StepNumber
    seqs: Seqs
    signature: Signature
    helped: bool = False  # the trainer has helped to make a step: it is a member of the run


class GrantStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a grant signs."""

    run: Fingerprint
    term: Term
    step: StepNumber
    trainer: PeerText
    seqs: Seqs
    helped: bool = False


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stage peer's signed word that it holds a microbatch's gradient, as long as this session of its lasts."""

    session: Seq
    signature: Signature


class ReceiptStatement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content that a receipt signs."""

    run: Fingerprint
    session: Seq
    stage: StageNumber
    step: StepNumber
    mb: Mb


class Position(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """The position of a peer's parameters: the step, and the lineage of the commit that led there (differs after a
    split).
    """

    step: StepNumber
    lineage: Lineage


class MemberInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A living stage peer as the conductor knows it."""

    peer: PeerText
    stage: StageNumber
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    ready: bool  # holds the parameters of the current step and serves
    client: bool = False  # it can dial, and not be dialed
    since: Moment = 0.0  # when it joined its stage; 0 of a helper
    rate: WorkRateTold = 0.0  # microbatches a second, as far as batches bear it out; 0: not known
    helped: bool = False  # its peer has helped to make a step: it is a member of the run
    rests: bool = False  # it contributes no gradients for now, and makes no steps


class MemberNews(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of the conductor's list of members between two versions; see machine/conductor/member_list."""

    since: Version  # the list that these are changes to; 0: an empty one
    version: Version  # what it is with these changes
    changed: Annotated[list[MemberInfo], msgspec.Meta(max_length=MAX_MEMBERS)]
    gone: Annotated[list[PostText], msgspec.Meta(max_length=MAX_MEMBERS)]
    more: bool  # there are further changes, for the next answer


Mode = Literal["node", "client", "aux"]  # sends a vector and sums a share; only sends; only sums


class LineInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's own figures of its line, and its part in averaging; rates of 0: unknown."""

    mode: Mode = "node"
    up_bytes_per_s: Rate = 0.0
    down_bytes_per_s: Rate = 0.0
    elements: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of the vector that it brings; 0: none
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""  # of that vector
    further: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of the vector that it brings right after that
    up_measured: bool = False  # the rate is what was seen to pass: the line may carry more
    down_measured: bool = False


class PostLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A post's own figures of its work in the last minute or so."""

    rate: WorkRateTold = 0.0  # microbatches a second of a device that is never idle; 0: not known yet
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share of the time in which it computed
    queue: Annotated[float, msgspec.Meta(ge=0, le=MICROBATCHES)] = 0.0  # microbatches that waited, the mean
    movable: bool = False  # it would serve another stage, if the conductor says so


class MemberSync(Message, frozen=True):
    """A stage peer's report to the conductor; the answer waits until something changed."""

    run: Fingerprint
    session: Seq
    stage: StageNumber
    position: Position
    prepared: Position | None  # where a commit would lead, when an average lies ready
    # Checkpoints it could return to: those it has recalled from a backbone, and the newest of the others.
    saved: Annotated[list[Position], msgspec.Meta(max_length=SAVED_TOLD)]
    held: Mbs | None  # None: as reported before
    counted: Mbs  # what it contributed to the last mean it has; only together with `held`
    addrs: Annotated[list[AddrText], msgspec.Meta(max_length=16)]
    since: Moment  # when it joined the stage
    term: Term  # the highest it has seen
    seen: Version  # of the answer it had
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]
    line: LineInfo | None = None  # None: as said before, or nothing known; mode "aux": a helper, not a member
    early: Mbs = msgspec.field(default_factory=Mbs)  # held for the step after; only together with `held`
    digest: Digest = b""  # of the last mean it has, as in Prepared; only together with `held`
    listed: Version = 0  # of the list of members that it has
    load: PostLoad | None = None  # None: as said before, or nothing known
    # Positions of the swarm, the newest last, that it took part in or was told of; only together with `held`.
    witnessed: Annotated[list[Position], msgspec.Meta(max_length=SEEN_POSITIONS)] = msgspec.field(default_factory=list)


class Forecast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Seconds until the batch under way is whole, and until the step that it makes is done."""

    whole_in_s: Foreseen
    step_in_s: Foreseen


class MemberAnswer(Message, frozen=True):
    term: Term
    current: Position | None  # where members should stand; None while they are on their way
    complete: bool  # every stage has a ready peer
    waits_for: WaitsText
    resend: bool  # the conductor does not know this session: say what you hold
    version: int
    members: MemberNews | None  # None: the list that it has is the newest
    forecast: Forecast | None = None  # of the step under way; None: nobody knows
    lost: bool = False  # there is no position that every stage can reach: what others keep is needed
    # While `lost`: positions with proof, the newest first; a checkpoint of one that a backbone keeps is wanted.
    wanted: Annotated[list[Position], msgspec.Meta(max_length=KEPT_SETS)] = msgspec.field(default_factory=list)
    apart: bool = False  # the position in the report is unknown here: it may be of another part of the run
    rests: Rest | None = None  # it contributes no gradients for now, and makes no steps
    spared: bool = False  # its gradient of this step is in a sum: others of its stage take what is still to be done


class ListMembers(Message, frozen=True):
    """A question of a peer that is about to choose a stage: which members does the conductor know?"""

    run: Fingerprint
    listed: Version = 0  # of the list that it has


class MembersListed(Message, frozen=True):
    """The conductor's list, as in MemberAnswer, and the stages of which a member has a state beyond the start."""

    members: MemberNews | None
    held: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)]
    # Microbatches a second that the peers of each stage can do, as the conductor believes; empty: not known.
    capacity: Annotated[list[WorkRateTold], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)


class WhichPosts(Message, frozen=True):
    """A question which stages of a run a peer serves at this moment: its records may be of an earlier life."""

    run: Fingerprint


class PostsHeld(Message, frozen=True):
    """The stages that the answering peer serves."""

    stages: Annotated[list[StageNumber], msgspec.Meta(max_length=STAGES)]


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A microbatch of the calling trainer and the holders of its gradient, stage by stage ("" where there is none)."""

    seq: Seq
    holders: Annotated[list[PeerText], msgspec.Meta(max_length=STAGES)]
    # What the holders signed, in the same order; shorter, or None at a place: nothing to show.
    receipts: Annotated[list[Receipt | None], msgspec.Meta(max_length=STAGES)] = msgspec.field(default_factory=list)


class TrainerSync(Message, frozen=True):
    """A trainer's report; the answer waits until something changed for it."""

    run: Fingerprint
    term: Term  # the highest it has seen
    step: StepNumber  # the step these microbatches belong to
    open: Seqs  # begun or wished for, in the trainer's order of preference
    done: Annotated[list[Done], msgspec.Meta(max_length=MAX_MICROBATCHES)]  # news since the last answer
    seen: Version  # of the view it has
    seen_members: Version  # of the list of members that it has
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]
    early: Seqs = msgspec.field(default_factory=Seqs)  # of `open` and `done`, those begun for the step after
    # It cannot do these: it was told to repeat them and has them no more, or they have no finite gradient.
    unknown: Seqs = msgspec.field(default_factory=Seqs)


class Redo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A microbatch whose gradient a stage has lost: repeat it on that stage alone."""

    seq: Seq
    stage: StageNumber


class TrainerAnswer(Message, frozen=True):
    term: Term
    step: StepNumber
    taken: bool  # False: report `done` again later
    admitted: Seqs  # all of this trainer's microbatches that count towards `step`
    redo: Annotated[list[Redo], msgspec.Meta(max_length=REDO_AT_ONCE)]  # the first; others when these are done
    counted: Seqs | None  # those of this trainer in the batch of the step it reported on; None: not known
    evaluate: Grant | None  # for the one trainer that evaluates, to be shown to stage peers; None: it is another one
    complete: bool  # the run has made all its steps
    waits_for: WaitsText
    version: int
    members: MemberNews | None  # as in MemberAnswer
    forecast: Forecast | None = None  # as in MemberAnswer
    early: Seqs = msgspec.field(default_factory=Seqs)  # as `admitted`, for the step after; only in a delayed run
    counted_early: Seqs | None = msgspec.field(default_factory=Seqs)  # as `counted`, of the step after that one
    grant: Grant | None = None  # of `admitted`, to be shown to stage peers; None: nothing is admitted
    grant_early: Grant | None = None  # of `early`


AttemptName = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Party(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One peer of an averaging round and the share of the vector that it sums."""

    peer: PeerText
    mode: Mode
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Prepare(Message, frozen=True):
    """Take part in one group's sum of a stage's gradients of `step`; the answer comes when the sum lies ready.

    A member brings the gradient of its own microbatches, or a sum that an earlier order gave it.
    """

    run: Fingerprint
    term: Term
    step: StepNumber
    attempt: AttemptName
    lineage: Lineage  # of the step after the commit
    # Peers of the stage that average: those that bring something, in the order of the sum, and then `listeners`.
    group: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)]
    assigned: Mbs  # this member's own in the sum; what it brings of its own holds nothing else
    samples: Annotated[int, msgspec.Meta(ge=1)]  # of the whole batch
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=RPC_ROUND_DEADLINE_S)]
    # Everyone in the round in the order of the cut, the group and helpers; empty: the group in equal shares.
    split: Annotated[list[Party], msgspec.Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    part_bytes: Annotated[int, msgspec.Meta(ge=0, le=AVERAGE_PART_BYTES)] = 0  # at most; 0: as the run file says
    elements: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of the vectors, for helpers
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""  # likewise
    further: Annotated[int, msgspec.Meta(ge=0, le=FRAME_ELEMENTS)] = 0  # of a second sum; 0: there is none
    s_per_byte: SecondsPerByte = 0.0  # a round's time over the vector's bytes; 0: a line is not stated
    stage: StageNumber = 0  # which of the stages that the peer serves or helps
    # These of the group bring nothing and take the sum.
    listeners: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)] = msgspec.field(default_factory=list)
    copy: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)] = 0  # which of the groups that make the same sum, from 0,
    copies: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] = 1  # and how many of them there are
    # The order that gave the sum that this member brings, or keeps if it listens; without one it brings its own.
    brings: AttemptName | None = None
    last: bool = True  # the result is the sum of the batch, for the step; else a later order has it brought
    second: bool = False  # of gradients in factors: it brings its second factors, made with the sum that it has
    leads: bool = True  # it brings what only one member of the stage may bring


class Prepared(Message, frozen=True):
    ok: bool
    missing: Mbs  # assigned, but not held here
    lost: Annotated[list[PeerText], msgspec.Meta(max_length=MAX_MEMBERS)]  # members that failed this one
    digest: Digest = b""  # SHA-256 of the mean that lies ready, as bytes in the order of the vector; "" of a helper
    refused: Mbs = msgspec.field(default_factory=Mbs)  # assigned, held, and of values that cannot be summed
    absent: bool = False  # the sum that it is to bring is not here


class Commit(Message, frozen=True):
    run: Fingerprint
    term: Term
    target: Position
    stage: StageNumber  # as in Prepare


class Restore(Message, frozen=True):
    """Return to a saved position: the swarm has no common newer one."""

    run: Fingerprint
    term: Term
    target: Position
    stage: StageNumber  # as in Prepare


class Relocate(Message, frozen=True):
    """Serve stage `target` in place of `stage`. The answer, empty, says that the peer will try; else it refuses."""

    run: Fingerprint
    term: Term
    stage: StageNumber  # as in Prepare
    target: StageNumber
    why: WaitsText  # for the log


class Moved(Message, frozen=True):
    """The answer to commit and restore: where the member stands now."""

    position: Position
    digest: Digest = b""  # of a commit: of the mean that it stepped with,
    signature: Signature = b""  # and its signature of that; see core/messages/commits


class Conducts(Message, frozen=True):
    """A conductor's answer that it is one: the term it acts in, and the position of its members (None: unknown)."""

    term: Term
    current: Position | None = None


class Leave(Message, frozen=True):
    """A peer says goodbye, so that nobody waits for it: at one stage, or (None) as a trainer."""

    run: Fingerprint
    stage: StageNumber | None = None


class WhoConducts(Message, frozen=True):
    """A question whether a peer conducts a run."""

    run: Fingerprint


class StageForward(Message, frozen=True):
    """Input as the call's first frame; `step` None: an evaluation, at whatever step the stage is."""

    run: Fingerprint
    stage: StageNumber
    step: StepNumber | None
    line_bytes_per_s: Rate = 0.0  # the slowest line that the answer has to pass, as the caller knows; 0: unknown
    seq: Seq = 0  # the microbatch; of no meaning in an evaluation
    grant: Grant | None = None  # by which the conductor admitted `seq` to `step`, or lets the caller evaluate


class StageLoss(Message, frozen=True):
    """Inputs and targets as frames: the mean loss of the samples, at the last stage. Part of an evaluation."""

    run: Fingerprint
    stage: StageNumber
    grant: Grant | None = None  # by which the conductor lets the caller evaluate


class StageBackward(Message, frozen=True):
    """Inputs, then output gradients (targets at the last stage), as frames. Counts once per (step, seq).

    In a delayed run `step`, here and in StageForward, may be the one after the stage's.
    """

    run: Fingerprint
    stage: StageNumber
    step: StepNumber
    seq: Seq
    line_bytes_per_s: Rate = 0.0  # as in StageForward
    grant: Grant | None = None  # by which the conductor admitted `seq` to `step`


class StageAnswer(Message, frozen=True):
    """The output, or the input's gradient, as the answer's frame (none in the first stage's backward)."""

    loss_sum: float = 0.0  # over samples; the last stage's backward and loss
    service_s: float = 0.0  # seconds of computing, for routing
    arrival_bytes_per_s: Rate = 0.0  # how fast the caller's frames arrive here; 0: unknown
    receipt: Receipt | None = None  # of a backward: for the caller to show to the conductor


class AverageAlive(Message, frozen=True):
    """The answer of a member that takes part in a round's attempt; `coming`: it is still in the sum before this."""

    coming: bool = False
    idle_s: Annotated[float, msgspec.Meta(ge=0, le=RPC_ROUND_DEADLINE_S)] = 0.0  # since bytes of others came or left


class AverageKey(Message, frozen=True):
    """One part of one averaging round, as the call's frame; the answer's frame is the sum of all members'."""

    attempt: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    part: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
