"""Reads a run's records in the DHT: steps, losses and rates, peers by stage, contributions.

Records may come from untrusted peers: they are decoded strictly, and unreadable ones are counted. `told_at` is the time
at which a record was published. Rates of old records are ignored, so that a run that stands still shows no speed.
The leader-board uses the counts of the conductor that most stage peers follow, and shows each peer's own figures, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from msgspec import Struct, structs

from peerd.control.swarm_status import (
    ContributionStatus,
    CountedStatus,
    SampleCounts,
    StagePeerStatus,
    StageStatus,
    SwarmStatus,
    TrainerStatus,
)
from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import DIRECTORY_READ_BYTES
from peerd.core.messages.contributions import Contributed, contributions_key, counted_key, decode_contributed
from peerd.core.messages.progress import (
    StageProgress,
    decode_stage,
    decode_trainer,
    followed_most,
    foretold_in_s,
    progress_key,
    stage_key,
    sum_told,
)
from peerd.core.record import Record
from peerd.core.run.runfile import RunFile
from peerd.machine.batch.counted_work import PeerWork
from peerd.screen import units
from peerd.service.dht.dht import Dht
from peerd.service.rpc.rpc_types import AccessGuard
from peerd.service.swarm.counted_record import CountedTable, read_counted

SWARM_TIMEOUT_S: Final = 5.0
COPY_AGE_S: Final = 2.0  # cached copies up to this age will do, since many watchers make a run's keys hot
STAGES_SHOWN: Final = 64  # most stages in a swarm view; bounds its lookups
FRESH_S: Final = 22.0  # rates in older records are ignored; peers publish at least every 20 s
_COUNTED_AS: Final = {b"trainer": "brought", b"expert": "updates"}  # role -> its column in the leader-board
V = TypeVar("V", bound=Struct)


@dataclass(frozen=True, slots=True)
class _Read(Generic[V]):
    """A record's publisher, value, suffix and time; and the publisher's name, if it has a token."""

    peer: PeerId
    value: V
    suffix: bytes
    told_at: float
    name: str = ""


async def swarm_view(dht: Dht, run: RunFile, gate: AccessGuard | None = None, wall: float = 0.0) -> SwarmStatus:
    """Read the swarm of a run from the DHT: its step, each stage's peers, and each peer's contribution.

    `wall` is the current Unix time. If the DHT cannot be read, the result has only `run` and the reason, `why`.
    """
    numbers = range(min(run.pipeline.stages, STAGES_SHOWN))
    keys = [stage_key(run.run, number) for number in numbers]
    try:
        wanted = [*keys, progress_key(run.run), contributions_key(run.run), counted_key(run.run)]
        found = await dht.get_many(
            wanted, timeout_s=SWARM_TIMEOUT_S, max_age_s=COPY_AGE_S, most_bytes=DIRECTORY_READ_BYTES
        )
    except RemoteError as error:
        return SwarmStatus(run=run.run, why=f"the directory gave no answer: {error}")
    unreadable: list[Record] = []
    stages = [
        StageStatus(stage=number, peers=_stage_peers(found.get(key, []), gate, unreadable))
        for number, key in zip(numbers, keys, strict=True)
    ]
    trainers = [
        TrainerStatus(peer=one.peer.text, told_at=one.told_at, **structs.asdict(one.value))
        for one in _read(found.get(progress_key(run.run), []), decode_trainer, unreadable)
    ]
    given = _members(_read(found.get(contributions_key(run.run), []), decode_contributed, unreadable), gate)
    swarm = SwarmStatus(run=run.run, stages=stages, trainers=trainers)
    counted = _counted(swarm, found.get(counted_key(run.run), []), gate, unreadable)
    return structs.replace(
        summed(swarm, wall),
        contributions=leader_board(given, counted.of if counted is not None else {}),
        counted=_head(counted) if counted is not None else None,
        unreadable_records=len(unreadable),
    )


def _counted(
    swarm: SwarmStatus, records: list[Record], gate: AccessGuard | None, unreadable: list[Record]
) -> CountedTable | None:
    """The counts of the conductor that most stage peers follow, or None if they cannot be read."""
    followed = followed_most((row.peer, row.conductor) for row in swarm.stage_peers())
    by = next((r.publisher for r in records if r.publisher.text == followed), None)
    return read_counted(by, records, gate, unreadable) if by is not None else None


def _head(counted: CountedTable) -> CountedStatus:
    return CountedStatus(
        by=counted.by.text,
        since_step=counted.since_step,
        step=counted.step,
        unlisted=counted.unlisted,
        told_at=counted.told_at,
    )


def foretold_by(swarm: SwarmStatus, wall: float) -> float | None:
    """Predicted seconds until the current step ends, by the stage peers of `swarm_view`. None if unknown."""
    return foretold_in_s([(row.peer, row.conductor, row.step_at) for row in swarm.stage_peers()], wall)


def _read(records: list[Record], decode: Callable[[bytes], V], unreadable: list[Record]) -> list[_Read[V]]:
    rows: list[_Read[V]] = []
    for record in records:
        try:
            rows.append(_Read(record.publisher, decode(record.value), record.suffix, record.version / 1000))
        except ProtocolViolation:
            unreadable.append(record)
    return rows


def _stage_peers(records: list[Record], gate: AccessGuard | None, unreadable: list[Record]) -> list[StagePeerStatus]:
    rows: list[StagePeerStatus] = []
    for one in _members(_read(records, decode_stage, unreadable), gate, "stage"):
        told = structs.asdict(one.value)
        del told["token"]
        rows.append(StagePeerStatus(peer=one.peer.text, name=one.name, told_at=one.told_at, **told))
    return rows


M = TypeVar("M", StageProgress, Contributed)


def _members(rows: Iterable[_Read[M]], gate: AccessGuard | None, *roles: str) -> list[_Read[M]]:
    """The rows with each peer's name. In a run with tokens, only members' rows, with the names the organizer signed."""
    found = []
    for row in rows:
        name = gate.named(row.peer, row.value.token, *roles) if gate is not None else ""
        if name is not None:
            found.append(replace(row, name=name))
    return found


def leader_board(given: Iterable[_Read[Contributed]], counted: Mapping[PeerId, PeerWork]) -> list[ContributionStatus]:
    """Contributions, one row for each peer over all its roles, sorted by the conductor's counts, then by own figures.

    The role in which a contribution was made is the suffix of its record.
    """
    by_peer: dict[PeerId, list[_Read[Contributed]]] = {peer: [] for peer in counted}
    for one in given:
        by_peer.setdefault(one.peer, []).append(one)
    rows = [(_contribution(peer, own, counted.get(peer)), peer) for peer, own in by_peer.items()]

    def most(entry: tuple[ContributionStatus, PeerId]) -> tuple[list[int], PeerId]:
        row, peer = entry
        by_count = row.counted or SampleCounts()
        own = (row.samples, row.brought, row.updates, row.bytes_aggregated)
        return [-(figure or 0) for figure in (by_count.samples, by_count.brought, *own)], peer

    return [row for row, _ in sorted(rows, key=most)]


def _contribution(peer: PeerId, own: Sequence[_Read[Contributed]], work: PeerWork | None) -> ContributionStatus:
    """Row of a peer: the sums of what it published in its roles, and the conductor's count."""
    counted = SampleCounts(samples=work.computed, brought=work.brought) if work is not None else None
    if not own:
        return ContributionStatus(peer=peer.text, counted=counted)
    samples = Counter[str]()
    for one in own:
        samples[_COUNTED_AS.get(one.suffix, "samples")] += one.value.samples
    return ContributionStatus(
        peer=peer.text,
        name=own[0].name,
        samples=samples["samples"],
        brought=samples["brought"],
        updates=samples["updates"],
        bytes_aggregated=sum(one.value.bytes_aggregated for one in own),
        hours=max(one.value.seconds for one in own) / 3600,
        since=min(one.value.since for one in own),
        counted=counted,
    )


def summed(swarm: SwarmStatus, wall: float) -> SwarmStatus:
    """The swarm with the run's step, loss and speed by its trainers' records.

    Without trainers, the step is that of the stages. Only rates published within the last FRESH_S count.
    """
    rows, peers = swarm.trainers, swarm.stage_peers()
    losses = [loss for row in rows if (loss := units.known(row.loss)) is not None]
    judged = [row for row in rows if units.known(row.valid_loss) is not None]
    valid = max(judged, key=lambda row: row.valid_step, default=None)
    fresh = [row for row in rows if wall - row.told_at <= FRESH_S]
    return structs.replace(
        swarm,
        step=max((row.step or 0 for row in rows or peers), default=None),
        loss=sum_told(loss / len(losses) for loss in losses) if losses else None,
        valid_loss=valid.valid_loss if valid else None,
        valid_step=valid.valid_step if valid else None,
        samples_per_s=sum_told(units.known(row.samples_per_s) or 0.0 for row in fresh),
        tokens_per_s=sum_told(units.known(row.tokens_per_s) or 0.0 for row in fresh),
        microbatches=sum(row.microbatches for row in rows),
        redone=sum(row.redone for row in rows),
        lost=sum(row.lost for row in rows),
    )
