"""The swarm's part of a status snapshot: what the daemon knows of its run, and what `peerd status` shows of it.

The daemon encodes these structs, and the commands decode them from JSON. Each field has a default, because the daemon
may be older or newer than the command. Peers are ids as text. Text may come from untrusted peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Figure = float | Literal["nan", "inf", "-inf"] | None  # JSON has no such numbers; None if unknown


class StatusPart(msgspec.Struct, kw_only=True, frozen=True):
    """Base class of the parts of a snapshot. Unknown fields, as of a newer daemon, are ignored."""


class Spread(StatusPart, frozen=True):
    """The range of a figure."""

    least: Figure = None
    median: Figure = None
    most: Figure = None


class PeerStatus(StatusPart, frozen=True):
    """A peer's record in the directory. Fields without a comment are as in StageProgress and TrainerProgress."""

    peer: str = "?"
    step: int | None = None
    samples_per_s: Figure = None
    waits_for: str | None = None
    addrs: Sequence[str] = ()
    client: bool = False
    told_at: float = 0.0  # Unix time at which it published the record
    age_s: Figure = None  # of the record
    gone: bool = False  # the conductor lists it no more
    own: bool = False  # it is the daemon's own peer


class StagePeerStatus(PeerStatus, frozen=True):
    """A stage peer. Its name is as the organizer signed it."""

    name: str = ""
    stage: int = -1
    since: float = 0.0
    held: int | None = None
    device: str = "?"
    conductor: str = ""
    step_at: float = 0.0
    also: Sequence[int] = ()
    busy: float = 0.0
    queue: float = 0.0
    ends: bool = False


class TrainerStatus(PeerStatus, frozen=True):
    """A trainer's published progress."""

    loss: Figure = None
    valid_loss: Figure = None
    valid_step: int = 0
    tokens_per_s: Figure = None
    microbatches: int = 0
    redone: int = 0
    lost: int = 0


class StageStatus(StatusPart, frozen=True):
    """A stage and its peers."""

    stage: int = -1
    peers: Sequence[StagePeerStatus] = ()


class SampleCounts(StatusPart, frozen=True):
    """Samples that the conductor credits to one peer; fields as in ContributionStatus."""

    samples: int = 0
    brought: int = 0


class ContributionStatus(StatusPart, frozen=True):
    """One peer's row in the leaderboard. Its own figures are None if it publishes none.

    `samples`: those whose gradients it computed or held; `brought`: those that it brought to the stages as a trainer;
    `updates`: those of the experts that it hosts.
    """

    peer: str = "?"
    name: str = ""
    samples: int | None = None
    brought: int | None = None
    updates: int | None = None
    bytes_aggregated: int | None = None
    hours: Figure = None
    since: Figure = None  # Unix time of its first participation
    counted: SampleCounts | None = None  # None if the conductor never counted it


class CountedStatus(StatusPart, frozen=True):
    """Which conductor counted the contributions, since which step, and how many peers its list omits."""

    by: str = "?"
    since_step: int | None = None
    step: int | None = None
    unlisted: int = 0
    told_at: float = 0.0


class StandstillStatus(StatusPart, frozen=True):
    """A standstill of the run: the reason, in words, and its duration."""

    why: str = "?"
    for_s: Figure = None


class CurveStatus(StatusPart, frozen=True):
    """Losses since the daemon started, as pairs of step and loss."""

    train: Sequence[tuple[float, float]] = ()
    valid: Sequence[tuple[float, float]] = ()


class PairStatus(StatusPart, frozen=True):
    """Two peers, and the links between them; figures are None if unknown."""

    one: str = "?"
    other: str = "?"
    rtt_ms: float | None = None
    there_mbit: float | None = None  # from `one` to `other`
    back_mbit: float | None = None
    rtt_estimated: bool = False
    there_estimated: bool = False
    back_estimated: bool = False
    age_s: float = 0.0


class DirectionStatus(StatusPart, frozen=True, rename={"source": "from", "target": "to"}):
    """A link from one peer to another, with its measured rate."""

    source: str = "?"
    target: str = "?"
    mbit: float = 0.0
    rtt_ms: float | None = None


class NetworkStatus(StatusPart, frozen=True):
    """The network between a run's peers, by the conductor's map; or `why`, the reason why it could not be read."""

    why: str | None = None
    peers: int = 0
    pairs_measured: int = 0
    rates_measured: int = 0
    more: bool = False  # not all pairs were read
    rtt_ms: Spread | None = None
    mbit: Spread | None = None
    farthest: Sequence[PairStatus] = ()
    slowest: Sequence[DirectionStatus] = ()
    pairs: Sequence[PairStatus] = ()  # empty if there are too many for a snapshot


class SwarmStatus(StatusPart, frozen=True):
    """A run. `run` is None if the daemon has none, or has not read the directory yet.

    If `stages` is empty, the directory could not be read, and `why` is the reason; otherwise `why` is the reason of the
    last attempt, and the other figures are from an earlier one.
    """

    run: str | None = None
    step: int | None = None
    loss: Figure = None  # losses are in nats per token
    valid_loss: Figure = None
    valid_step: int | None = None
    samples_per_s: Figure = None
    tokens_per_s: Figure = None
    microbatches: int | None = None
    redone: int | None = None
    lost: int | None = None
    stages: Sequence[StageStatus] = ()
    trainers: Sequence[TrainerStatus] = ()
    contributions: Sequence[ContributionStatus] = ()
    counted: CountedStatus | None = None
    unreadable_records: int = 0
    why: str | None = None
    network: NetworkStatus | None = None
    seen: float | None = None  # Unix time of the read
    next_step_at: float | None = None  # Unix time, by the conductor's forecast
    next_step_in_s: Figure = None
    age_s: Figure = None  # time since the read
    standstill: StandstillStatus | None = None
    complete: bool = False
    own_wait: str | None = None  # what this peer waits for
    total_steps: int | None = None
    left_s: Figure = None
    shares: dict[str, Figure] = msgspec.field(
        default_factory=dict
    )  # this peer's, 0 to 1, by figure of its contribution
    curve: CurveStatus = CurveStatus()

    @property
    def unread(self) -> bool:
        """True if `why` is the only thing to show."""
        return self.why is not None and not self.stages

    def stage_peers(self) -> list[StagePeerStatus]:
        """The peers of all stages."""
        return [peer for stage in self.stages for peer in stage.peers]

    def names(self) -> dict[str, str]:
        """Names of the peers, as the organizer signed them, by peer id."""
        names = {peer.peer: peer.name for peer in self.stage_peers() if peer.name}
        return names | {row.peer: row.name for row in self.contributions if row.name}
