"""Starting values, input events and outputs of the conductor: plain values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field

from peerd.averaging.work_split import Split
from peerd.messages.swarm import Done, Mb, Position, Receipt

Verify = Callable[[str, int, int, Mb, Receipt], bool]  # (holder, stage, step, mb, receipt): has the holder signed it?


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorConfig:
    """Configuration of a conductor. `microbatches`: of one step; `total_steps`: 0 for no end. Times in seconds."""

    stages: int
    microbatches: int
    microbatch_samples: int = 1
    delayed: bool = False  # may microbatches be computed with the parameters before the last step?
    filled_at_once: bool = False  # may a batch be complete once it is open? Then steps wait for members that catch up
    total_steps: int = 0
    first_save: int = 1 << 53  # the first step after which peers write checkpoints
    gather_s: float = 1.5  # quiet time after the last new member before a new conductor decides
    gather_most_s: float = 10.0  # and when it decides in any case
    expect_s: float = 6.0  # how long it waits for members that are known to exist
    hearsay_s: float = 60.0  # how long a new run waits for peers known only from records: a record's lifetime
    broken_s: float = 4.0  # how long a stage may lack the current state before an older common position is searched
    # How long a stage's state may be missing before the run begins anew without it. `forsake_s`: this conductor saw it
    # disappear, or those that had it cannot be reached; `forsake_unseen_s`: they or others may still bring it;
    # `forsake_most_s`: the whole run is returning, or a reachable peer stores a checkpoint.
    forsake_s: float = math.inf
    forsake_unseen_s: float = math.inf
    forsake_most_s: float = math.inf
    fetch_s: float = 0.0  # time to fetch such a checkpoint, added to `forsake_most_s`; depends on its size
    lease_s: float = 30.0  # how long a full batch waits for an unfinished microbatch while other trainers are faster
    first_lease_s: float = 120.0  # how long a microbatch may stay unfinished if no other trainer shows the usual time
    retry_s: float = 0.2  # before a failed attempt is repeated; doubles up to 5 s
    own_pace: bool | None = None  # does each trainer compute at its own machine's pace? None: yes in a run of one stage
    group_size: int = 0  # largest averaging group; 0: chosen
    factors: bool = False  # gradients are sent as low-rank factors: a grid sums the first factors, then the second ones
    late_s: float = 10.0  # least time that half of a stage, with its sum ready, waits for the others
    work: tuple[float, ...] = ()  # relative cost of a microbatch in each stage; empty: all equal
    moves: bool = False  # may the conductor order peers to other stages?
    least_gain: float = 0.01  # share of the throughput that load-based moves must gain
    move_price_s: float = 20.0  # least price of a move, in seconds of its peer's work
    weighs: bool = False  # is each member's gradient weighed against what its line costs everybody?
    ban_s: float = 15.0  # length of the first ban of a member that held up steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a new conductor can rely on: its own post, and the members that its predecessor named as ready, by stage."""

    own: str = ""
    established: Mapping[str, int] = field(default_factory=dict)
    resting: Collection[str] = ()  # of these, the members that the predecessor named as resting
    seen: Collection[Position] = ()  # positions of the swarm that its own peer stepped to, or received from a conductor
    trusted: Collection[str] = ()  # peers that the user trusts
    cold: bool = False  # its knowledge is from before a restart: absent members may return with their states
    signers: Callable[[Position], Set[str]] | None = None  # peers that validly signed a commit to a position
    verify: Verify | None = None  # verifies a receipt; without it no receipt counts
    place_of: Callable[[str], str] | None = None  # where a peer connects from; by default each peer is a place


@dataclass(frozen=True, slots=True)
class MemberHello:
    """A stage peer's first report in a session, or a further one after it moved by itself."""

    peer: str
    stage: int
    session: int
    position: Position
    prepared: Position | None
    saved: tuple[Position, ...]
    held: frozenset[Mb]
    counted: frozenset[Mb]  # what it contributed to its last mean
    addrs: tuple[str, ...]
    early: frozenset[Mb] = frozenset()  # microbatches that it holds for the step after its own
    since: float = 0.0  # when it joined its stage, Unix time
    digest: bytes = b""  # of its last mean, prepared or applied
    seen: tuple[Position, ...] = ()  # positions of the swarm that it stepped to, or received from a conductor


@dataclass(frozen=True, slots=True)
class MemberGone:
    peer: str


@dataclass(frozen=True, slots=True)
class TrainerReport:
    peer: str
    step: int
    open: tuple[int, ...]
    done: tuple[Done, ...]
    early: tuple[int, ...] = ()  # of `open` and `done`, those begun for the step after `step`
    unknown: tuple[int, ...] = ()  # to be repeated, but no longer known to the trainer, or without a finite gradient


@dataclass(frozen=True, slots=True)
class TrainerGone:
    peer: str


@dataclass(frozen=True, slots=True)
class PrepareEnded:
    """A member's answer to SendPrepare. If `ok` is False and all lists are empty, it could not be reached."""

    peer: str
    attempt: bytes
    ok: bool
    missing: tuple[Mb, ...] = ()
    lost: tuple[str, ...] = ()
    digest: bytes = b""  # of its sum
    refused: tuple[Mb, ...] = ()  # microbatches that it holds but that cannot be summed
    declines: bool = False  # it rejected the order, as a member does that follows another conductor
    absent: bool = False  # it does not have the sum that it should contribute


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A member's answer to SendMove; `position` is None if it failed. A `slow` member may still arrive."""

    peer: str
    position: Position | None
    slow: bool = False


@dataclass(frozen=True, slots=True)
class TransferRefused:
    """A member refuses to move to another stage, or cannot be asked."""

    peer: str


Event = MemberHello | MemberGone | TrainerReport | TrainerGone | PrepareEnded | MoveEnded | TransferRefused


@dataclass(frozen=True, slots=True)
class SendPrepare:
    """Order to take part in an attempt to sum the gradients of one group.

    A member contributes its own microbatches (`assigned`), or the sum that it has from the attempt `brings`.
    """

    peer: str
    attempt: bytes
    lineage: bytes
    group: tuple[str, ...]  # senders, in the order of the sum, then listeners
    assigned: tuple[Mb, ...]  # its own microbatches in the resulting sum, in any order
    split: Split | None = None  # None: the group in equal shares
    most_s: float = 0.0  # time limit for the transfers of the attempt
    listeners: tuple[str, ...] = ()  # members of the group that receive the sum and contribute nothing
    copy: int = 0  # index of this group, from 0, among those that make the same sum,
    copies: int = 1  # and the number of those
    brings: bytes = b""  # attempt from which it has the sum that it contributes, or, if it listens, stores
    last: bool = True  # the result is the sum of the whole batch, for the step
    second: bool = False  # low-rank factors: it computes second factors from the sum that it has, and contributes these
    leads: bool = True  # it contributes the leader's part: shared buffers, which one member of a stage contributes

    @property
    def takes_part(self) -> bool:
        """True if the receiver contributes or sums. A new split of the work may leave a helper without a share."""
        return self.split is None or any(party.peer == self.peer for party in self.split.parties)

    @property
    def summers(self) -> frozenset[str]:
        """Peers that sum a share."""
        if self.split is None:
            return frozenset(self.group)
        return frozenset(party.peer for party in self.split.parties if party.share > 0)


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    attempt: bytes


@dataclass(frozen=True, slots=True)
class SendMove:
    """Order to commit (the member has prepared `target`) or to restore (it has saved `target`)."""

    peer: str
    target: Position
    commit: bool


@dataclass(frozen=True, slots=True)
class SendTransfer:
    """Order to serve another stage. `why`: reason for the log."""

    peer: str
    target: int
    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Order to check whether a member that is reported unreachable can be reached; if not, it is gone."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note:
    """Text for the log; `warning`: something was lost."""

    text: str
    warning: bool = False


Output = SendPrepare | CancelAttempt | SendMove | SendTransfer | Probe | Note
