"""Starting values, events (what it hears) and outputs (what it wants done) of the conductor: values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field

from peerd.core.messages.swarm import Done, Mb, Position, Receipt
from peerd.machine.averaging.work_split import Split

Verify = Callable[[str, int, int, Mb, Receipt], bool]  # holder, stage, step, microbatch: has it signed this?


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorConfig:
    """`microbatches` of one step; `total_steps` 0: no end. The rest: seconds of patience."""

    stages: int
    microbatches: int
    microbatch_samples: int = 1
    delayed: bool = False  # may microbatches be computed with the parameters before the last step?
    filled_at_once: bool = False  # may a batch be whole once it is open? Then steps wait for members that catch up
    total_steps: int = 0
    first_save: int = 1 << 53  # the first step after which peers write checkpoints
    gather_s: float = 1.5  # quiet time after the last new member before a new conductor decides
    gather_most_s: float = 10.0  # and when it decides, however many come
    expect_s: float = 6.0  # how long it waits for members that are known to exist
    hearsay_s: float = 60.0  # how long a new run waits for peers that only records tell of: a record's life
    broken_s: float = 4.0  # how long a stage may be empty before an older common position is looked for
    # How long a stage's state may be nowhere before the run begins anew without it: where this conductor saw it go, or
    # those who had it were dialed in vain; where they or others may bring it; and where the whole run comes back, or a
    # peer that can be reached keeps a checkpoint.
    forsake_s: float = math.inf
    forsake_unseen_s: float = math.inf
    forsake_most_s: float = math.inf
    fetch_s: float = 0.0  # how long members may fetch such a checkpoint, beside that: it grows with its size
    lease_s: float = 30.0  # how long a whole batch waits for one that its trainer does not finish, others being quicker
    first_lease_s: float = 120.0  # how long a microbatch may stay unfinished where nobody else shows what is usual
    retry_s: float = 0.2  # before a failed attempt is repeated; doubles up to 5 s
    own_pace: bool | None = None  # are trainers as fast as their machines? None: in a run of one stage
    group_size: int = 0  # of an averaging group, at most; 0: chosen
    factors: bool = False  # gradients travel in factors: a grid sums the first ones, and then the second ones
    late_s: float = 10.0  # how long half of a stage, its sum ready, waits for the others at least
    work: tuple[float, ...] = ()  # of a microbatch in each stage, relative to each other; empty: all the same
    moves: bool = False  # may the conductor order peers to other stages?
    least_gain: float = 0.01  # share of the throughput that moves by load must win
    move_price_s: float = 20.0  # a move costs at least so many seconds of its peer's work
    weighs: bool = False  # is each member's gradient weighed against what its line costs everybody?
    ban_s: float = 15.0  # how long a member that stood in the way stays out, the first time


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a conductor can rely on: its own peer, and the members that the one before it named as ready, by stage."""

    own: str = ""
    established: Mapping[str, int] = field(default_factory=dict)
    resting: Collection[str] = ()  # of these, the members that it named as resting
    seen: Collection[Position] = ()  # positions of the swarm that the own peer took part in, or was told of
    trusted: Collection[str] = ()  # peers whose word the user takes
    cold: bool = False  # what it knows is from before a restart: members that are away may come back with their states
    signers: Callable[[Position], Set[str]] | None = None  # peers that validly signed a commit to a position
    verify: Verify | None = None  # looks at a receipt; None: none counts
    place_of: Callable[[str], str] | None = None  # where a peer connects from; None: each from a place of its own


@dataclass(frozen=True, slots=True)
class MemberHello:
    """A stage peer's first report in this session, or a new one after it moved by itself."""

    peer: str
    stage: int
    session: int
    position: Position
    prepared: Position | None
    saved: tuple[Position, ...]
    held: frozenset[Mb]
    counted: frozenset[Mb]  # what it contributed to the last mean it has
    addrs: tuple[str, ...]
    early: frozenset[Mb] = frozenset()  # what it holds for the step after its own
    since: float = 0.0  # when it joined its stage, Unix time
    digest: bytes = b""  # of the last mean it has, be it prepared or stepped with
    seen: tuple[Position, ...] = ()  # positions of the swarm that it took part in, or was told of


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
    unknown: tuple[int, ...] = ()  # to be done again, and it has them no more; or without a finite gradient


@dataclass(frozen=True, slots=True)
class TrainerGone:
    peer: str


@dataclass(frozen=True, slots=True)
class PrepareEnded:
    """A member's answer to SendPrepare; `ok` False with no list: it could not be reached."""

    peer: str
    attempt: bytes
    ok: bool
    missing: tuple[Mb, ...] = ()
    lost: tuple[str, ...] = ()
    digest: bytes = b""  # of its sum
    refused: tuple[Mb, ...] = ()  # it holds these, and they cannot be summed
    declines: bool = False  # it answered that it takes no such order, as a member does that follows another conductor
    absent: bool = False  # it does not have the sum that it is to bring


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A member's answer to SendMove, with None if it failed. A `slow` member was not in time, and may still arrive."""

    peer: str
    position: Position | None
    slow: bool = False


@dataclass(frozen=True, slots=True)
class TransferRefused:
    """A member will not go to another stage, or cannot be asked."""

    peer: str


Event = MemberHello | MemberGone | TrainerReport | TrainerGone | PrepareEnded | MoveEnded | TransferRefused


@dataclass(frozen=True, slots=True)
class SendPrepare:
    """Take part in one group's attempt at a sum. What a member brings is its own microbatches (`assigned`), or, where
    `brings` names the attempt that gave it, a sum that it has.
    """

    peer: str
    attempt: bytes
    lineage: bytes
    group: tuple[str, ...]  # senders, in the order of the sum, and then listeners
    assigned: tuple[Mb, ...]  # its own in the sum that results, in any order
    split: Split | None = None  # None: the group in equal shares
    most_s: float = 0.0  # how long the bytes of the attempt may take
    listeners: tuple[str, ...] = ()  # of the group: they take the sum and bring nothing
    copy: int = 0  # which of the groups that make the same sum, from 0,
    copies: int = 1  # and how many of them there are
    brings: bytes = b""  # the attempt that gave the sum which it brings, or, if it listens, keeps
    last: bool = True  # the result is the sum of the whole batch, which a step is made with
    second: bool = False  # of sums in factors: it makes its second factors with the sum that it has, and brings these
    leads: bool = True  # it brings what only one member of the stage may bring

    @property
    def takes_part(self) -> bool:
        """True when the peer has anything to do. A helper may be left without a share when the work is divided anew."""
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
    """Commit (the member has prepared `target`) or restore (it has saved it)."""

    peer: str
    target: Position
    commit: bool


@dataclass(frozen=True, slots=True)
class SendTransfer:
    """Go and serve another stage, for a reason that the log will tell."""

    peer: str
    target: int
    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Check a member that is said to be unreachable: can we reach it? If not, it is gone."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person may want to know; `warning`: it cost something."""

    text: str
    warning: bool = False


Output = SendPrepare | CancelAttempt | SendMove | SendTransfer | Probe | Note
