"""Reads a run's records in the DHT: steps, losses and rates, peers by stage, contributions.

Records may come from untrusted peers: they are decoded strictly, and unreadable ones are counted. `told_at` is the time
at which a record was published. Rates of old records are ignored, so that a run that stands still shows no speed.
The leaderboard uses the counts of the conductor that most stage peers follow, and shows each peer's own figures, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from msgspec import Struct, structs

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import Key, PeerId
from peerd.core.limits import DIRECTORY_READ_BYTES
from peerd.core.record import Record
from peerd.dht.dht import Dht
from peerd.messages.contributions import Contributed, contributions_key, counted_key, decode_contributed
from peerd.messages.progress import (
    StageProgress,
    decode_stage,
    decode_trainer,
    followed_most,
    foretold_in_s,
    progress_key,
    stage_key,
    sum_told,
)
from peerd.rpc.rpc_types import AccessGuard
from peerd.run.runfile import RunFile
from peerd.screen import units
from peerd.status.swarm_status import (
    ContributionStatus,
    CountedStatus,
    SampleCounts,
    StagePeerStatus,
    StageStatus,
    SwarmStatus,
    TrainerStatus,
)
from peerd.swarm.batch.counted_record import CountedTable, read_counted
from peerd.swarm.batch.counted_work import PeerWork

SWARM_TIMEOUT_S: Final = 5.0
COPY_AGE_S: Final = 2.0  # cached copies up to this age will do, since many watchers make a run's keys hot
STAGES_SHOWN: Final = 64  # most stages in a swarm view; bounds its lookups
FRESH_S: Final = 22.0  # rates in older records are ignored; peers publish at least every 20 s
_COUNTED_AS: Final = {b"trainer": "brought", b"expert": "updates"}  # role -> its column in the leaderboard

V = TypeVar("V", bound=Struct)
M = TypeVar("M", StageProgress, Contributed)


async def swarm_view(dht: Dht, run: RunFile, gate: AccessGuard | None = None, wall: float = 0.0) -> SwarmStatus:
    """Read the swarm of a run from the DHT: its step, each stage's peers, and each peer's contribution.

    `wall` is the current Unix time. If the DHT cannot be read, the result has only `run` and the reason, `why`.
    """
    keys = [stage_key(run.run, number) for number in range(min(run.pipeline.stages, STAGES_SHOWN))]
    try:
        wanted = [*keys, progress_key(run.run), contributions_key(run.run), counted_key(run.run)]
        found = await dht.get_many(
            wanted, timeout_s=SWARM_TIMEOUT_S, max_age_s=COPY_AGE_S, most_bytes=DIRECTORY_READ_BYTES
        )
    except RemoteError as error:
        return SwarmStatus(run=run.run, why=f"the directory gave no answer: {error}")
    records = _Records(found, gate)
    stages = [
        StageStatus(stage=number, peers=[_stage_peer(*row) for row in records.members(key, decode_stage, "stage")])
        for number, key in enumerate(keys)
    ]
    trainers = [
        TrainerStatus(peer=record.publisher.text, told_at=record.version / 1000, **structs.asdict(value))
        for record, value in records.read(progress_key(run.run), decode_trainer)
    ]
    given = records.members(contributions_key(run.run), decode_contributed)
    swarm = SwarmStatus(run=run.run, stages=stages, trainers=trainers)
    counted = _counted(swarm, found.get(counted_key(run.run), []), records)
    head = None
    if counted is not None:
        names = ("since_step", "step", "unlisted", "told_at")
        head = CountedStatus(by=counted.by.text, **{name: getattr(counted, name) for name in names})
    return structs.replace(
        summed(swarm, wall),
        contributions=leader_board(given, counted.of if counted is not None else {}),
        counted=head,
        unreadable_records=len(records.unreadable),
    )


class _Records:
    """Records of a run by key. Collects those that cannot be decoded."""

    def __init__(self, found: Mapping[Key, list[Record]], gate: AccessGuard | None) -> None:
        self._found = found
        self.gate = gate
        self.unreadable: list[Record] = []

    def read(self, key: Key, decode: Callable[[bytes], V]) -> list[tuple[Record, V]]:
        rows = list[tuple[Record, V]]()
        for record in self._found.get(key, []):
            try:
                rows.append((record, decode(record.value)))
            except ProtocolViolation:
                self.unreadable.append(record)
        return rows

    def members(self, key: Key, decode: Callable[[bytes], M], *roles: str) -> list[tuple[Record, M, str]]:
        """Records with each peer's name. In a run with tokens, only members', with the names the organizer signed."""
        rows = [
            (record, value, self.gate.named(record.publisher, value.token, *roles) if self.gate is not None else "")
            for record, value in self.read(key, decode)
        ]
        return [(record, value, name) for record, value, name in rows if name is not None]


def _counted(swarm: SwarmStatus, counts: list[Record], records: _Records) -> CountedTable | None:
    """The counts of the conductor that most stage peers follow, or None if they cannot be read."""
    followed = followed_most((row.peer, row.conductor) for row in swarm.stage_peers())
    by = next((record.publisher for record in counts if record.publisher.text == followed), None)
    return read_counted(by, counts, records.gate, records.unreadable) if by is not None else None


def foretold_by(swarm: SwarmStatus, wall: float) -> float | None:
    """Predicted seconds until the current step ends, by the stage peers of `swarm_view`. None if unknown."""
    return foretold_in_s([(row.peer, row.conductor, row.step_at) for row in swarm.stage_peers()], wall)


def _stage_peer(record: Record, value: StageProgress, name: str) -> StagePeerStatus:
    told = structs.asdict(value)
    del told["token"]
    return StagePeerStatus(peer=record.publisher.text, name=name, told_at=record.version / 1000, **told)


Given = tuple[Record, Contributed, str]  # with the publisher's name


def leader_board(given: Iterable[Given], counted: Mapping[PeerId, PeerWork]) -> list[ContributionStatus]:
    """Contributions, one row for each peer over all its roles, sorted by the conductor's counts, then by own figures.

    The role in which a contribution was made is the suffix of its record.
    """
    by_peer: dict[PeerId, list[Given]] = {peer: [] for peer in counted}
    for one in given:
        by_peer.setdefault(one[0].publisher, []).append(one)
    rows = [(_contribution(peer, own, counted.get(peer)), peer) for peer, own in by_peer.items()]

    def most(entry: tuple[ContributionStatus, PeerId]) -> tuple[list[int], PeerId]:
        row, peer = entry
        by_count = row.counted or SampleCounts()
        own = (row.samples, row.brought, row.updates, row.bytes_aggregated)
        return [-(figure or 0) for figure in (by_count.samples, by_count.brought, *own)], peer

    return [row for row, _ in sorted(rows, key=most)]


def _contribution(peer: PeerId, own: Sequence[Given], work: PeerWork | None) -> ContributionStatus:
    """Row of a peer: the sums of what it published in its roles, and the conductor's count."""
    counted = SampleCounts(samples=work.computed, brought=work.brought) if work is not None else None
    if not own:
        return ContributionStatus(peer=peer.text, counted=counted)
    samples, values = Counter[str](), [value for _, value, _ in own]
    for record, value, _ in own:
        samples[_COUNTED_AS.get(record.suffix, "samples")] += value.samples
    return ContributionStatus(
        peer=peer.text,
        name=own[0][2],
        samples=samples["samples"],
        brought=samples["brought"],
        updates=samples["updates"],
        bytes_aggregated=sum(value.bytes_aggregated for value in values),
        hours=max(value.seconds for value in values) / 3600,
        since=min(value.since for value in values),
        counted=counted,
    )


def summed(swarm: SwarmStatus, wall: float) -> SwarmStatus:
    """The swarm, with the run's step, loss and speed taken from its trainers' records.

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
