"""The swarm of a run as its directory records show it: steps, losses and rates, peers by stage, contributions.

Records in the DHT are strangers' words: decoded strictly, counted when unreadable. Each is as old as it is: `told_at`
is when its publisher last spoke, and a rate counts only while it is fresh, so that what stands still shows no speed.
The leader-board goes by the counts of the conductor that most stage peers follow, beside each peer's own word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import DIRECTORY_READ_BYTES
from peerd.core.messages.contributions import contributions_key, counted_key, decode_contributed
from peerd.core.messages.progress import (
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
from peerd.service.dht.dht import Dht
from peerd.service.rpc.types import AccessGuard
from peerd.service.swarm.counted_record import CountedTable, read_counted

SWARM_TIMEOUT_S: Final = 5.0
COPY_AGE_S: Final = 2.0  # many who watch one run make its keys hot: copies on the way will do
STAGES_SHOWN: Final = 64  # of a swarm view: bounds its look-ups
FRESH_S: Final = 22.0  # a rate in a record that is older counts no more: peers speak every 20 s at least
_COUNTED_AS: Final = {"trainer": "brought", "expert": "updates"}  # what a role tells, in the leader-board
_OWN_WORD: Final = ("samples", "brought", "updates", "bytes_aggregated", "hours", "since")  # what a peer says of itself


async def swarm_view(dht: Dht, run: RunFile, gate: AccessGuard | None = None, wall: float = 0.0) -> dict[str, Any]:
    """The swarm of a run as the DHT shows it at `wall`: its step, each stage's peers, and each peer's contribution."""
    stages = min(run.pipeline.stages, STAGES_SHOWN)
    keys = [stage_key(run.run, number) for number in range(stages)]
    try:
        wanted = [*keys, progress_key(run.run), contributions_key(run.run), counted_key(run.run)]
        found = await dht.get_many(
            wanted, timeout_s=SWARM_TIMEOUT_S, max_age_s=COPY_AGE_S, most_bytes=DIRECTORY_READ_BYTES
        )
    except RemoteError as error:
        return {"run": run.run, "why": f"the directory gave no answer: {error}"}
    unreadable: list[Record] = []
    rows = [
        {"stage": number, "peers": _members(_read(found.get(key, []), decode_stage, unreadable), gate, "stage")}
        for number, key in enumerate(keys)
    ]
    trainers = _read(found.get(progress_key(run.run), []), decode_trainer, unreadable)
    given = _members(_given(found.get(contributions_key(run.run), []), unreadable), gate)
    counted = _counted(rows, found.get(counted_key(run.run), []), gate, unreadable)
    return {
        "run": run.run,
        **summary(rows, trainers, wall),
        "stages": rows,
        "trainers": trainers,
        "contributions": leader_board(given, counted.of if counted is not None else {}),
        "counted": _head(counted) if counted is not None else None,
    } | ({"unreadable_records": len(unreadable)} if unreadable else {})


def _counted(
    stages: list[dict[str, Any]], records: list[Record], gate: AccessGuard | None, unreadable: list[Record]
) -> CountedTable | None:
    """The counts of the conductor that most stage peers follow, or None if they cannot be read."""
    followed = followed_most((row["peer"].text, row["conductor"]) for stage in stages for row in stage["peers"])
    by = next((r.publisher for r in records if r.publisher.text == followed), None)
    return read_counted(by, records, gate, unreadable) if by is not None else None


def _head(counted: CountedTable) -> dict[str, Any]:
    """Facts about the counts, without the counts."""
    names = ("by", "since_step", "step", "unlisted", "told_at")
    return {name: getattr(counted, name) for name in names}


def foretold_by(swarm: dict[str, Any], wall: float) -> float | None:
    """Seconds until the step under way should end, as the stage peers of `swarm_view` have it; None: nobody knows."""
    rows = [row for stage in swarm.get("stages", []) for row in stage["peers"]]
    return foretold_in_s([(row["peer"].text, row["conductor"], row["step_at"]) for row in rows], wall)


def _read(records: list[Record], decode: Callable[[bytes], Any], unreadable: list[Record]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for record in records:
        try:
            value = decode(record.value)
        except ProtocolViolation:
            unreadable.append(record)
            continue
        told = {name: getattr(value, name) for name in value.__struct_fields__}
        rows.append({"peer": record.publisher, **told, "told_at": record.version / 1000})
    return rows


def _given(records: list[Record], unreadable: list[Record]) -> list[dict[str, Any]]:
    """Contributions, each with the role in which it was made: the suffix of its record."""
    found = []
    for record in records:
        for row in _read([record], decode_contributed, unreadable):
            found.append(row | {"role": record.suffix.decode("ascii", "replace")})
    return found


def _members(rows: list[dict[str, Any]], gate: AccessGuard | None, *roles: str) -> list[dict[str, Any]]:
    """In a run with tokens: only members' rows, under the names that the organizer signed."""
    found = []
    for row in rows:
        peer, token = row["peer"], row.pop("token")
        name = gate.named(peer, token, *roles) if gate is not None else ""
        if name is not None:
            found.append(row | {"name": name})
    return found


def leader_board(given: list[dict[str, Any]], counted: Mapping[PeerId, PeerWork]) -> list[dict[str, Any]]:
    """Contributions, one row for each peer over all its roles: the most by the conductor's count first, then by the
    peers' own word.

    `samples`: those whose gradients a peer says it computed or held; `brought`: those that it says it brought to the
    stages, as a trainer; `updates`: those of the experts that it hosts. A peer that says nothing has None for each.
    `counted`: `samples` and `brought` as the conductor counted them, or None if it never counted the peer.
    """
    rows: dict[PeerId, dict[str, Any]] = {}
    for told in given:
        fresh = {"peer": told["peer"], "name": told["name"], "samples": 0, "brought": 0}
        fresh |= {"updates": 0, "bytes_aggregated": 0, "hours": 0.0, "counted": None}
        row = rows.setdefault(told["peer"], fresh)
        row[_COUNTED_AS.get(told["role"], "samples")] += told["samples"]
        row["bytes_aggregated"] += told["bytes_aggregated"]
        row["hours"] = max(row["hours"], told["seconds"] / 3600)
        row["since"] = min(row.get("since", told["since"]), told["since"])
    for peer, work in counted.items():
        row = rows.setdefault(peer, {"peer": peer, "name": "", **dict.fromkeys(_OWN_WORD)})
        row["counted"] = {"samples": work.computed, "brought": work.brought}

    def most(row: dict[str, Any]) -> tuple[list[int], PeerId]:
        by_count = row["counted"] or {}
        figures = [by_count.get("samples", 0), by_count.get("brought", 0)]
        figures += [row[key] or 0 for key in ("samples", "brought", "updates", "bytes_aggregated")]
        return [-figure for figure in figures], row["peer"]

    return sorted(rows.values(), key=most)


def summary(stages: list[dict[str, Any]], trainers: list[dict[str, Any]], wall: float) -> dict[str, Any]:
    """The run's step, loss and speed from what its trainers say; the step from its stages when none is there.

    Only rates that were told within the last FRESH_S count.
    """
    steps = [row["step"] for row in trainers] or [peer["step"] for stage in stages for peer in stage["peers"]]
    losses = [row["loss"] for row in trainers if math.isfinite(row["loss"])]
    judged = [row for row in trainers if math.isfinite(row["valid_loss"])]
    valid = max(judged, key=lambda row: int(row["valid_step"]), default=None)
    fresh = [row for row in trainers if wall - row["told_at"] <= FRESH_S]
    return {
        "step": max(steps, default=None),
        "loss": sum_told(loss / len(losses) for loss in losses) if losses else None,
        "valid_loss": valid["valid_loss"] if valid else None,
        "valid_step": valid["valid_step"] if valid else None,
        "samples_per_s": sum_told(row["samples_per_s"] for row in fresh),
        "tokens_per_s": sum_told(row["tokens_per_s"] for row in fresh),
        "microbatches": sum(row["microbatches"] for row in trainers),
        "redone": sum(row["redone"] for row in trainers),
        "lost": sum(row["lost"] for row in trainers),
    }
