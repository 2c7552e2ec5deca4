"""Reads a run's records in the DHT: steps, losses and rates, peers by stage, contributions.

Records may come from untrusted peers: they are decoded strictly, and unreadable ones are counted. `told_at` is the time
at which a record was published. Rates of old records are ignored, so that a run that stands still shows no speed.
The leader-board uses the counts of the conductor that most stage peers follow, and shows each peer's own figures, too.
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
from peerd.service.rpc.rpc_types import AccessGuard
from peerd.service.swarm.counted_record import CountedTable, read_counted

SWARM_TIMEOUT_S: Final = 5.0
COPY_AGE_S: Final = 2.0  # cached copies up to this age will do, since many watchers make a run's keys hot
STAGES_SHOWN: Final = 64  # most stages in a swarm view; bounds its lookups
FRESH_S: Final = 22.0  # rates in older records are ignored; peers publish at least every 20 s
_COUNTED_AS: Final = {"trainer": "brought", "expert": "updates"}  # role -> its column in the leader-board
_OWN_WORD: Final = ("samples", "brought", "updates", "bytes_aggregated", "hours", "since")  # a peer's own figures


async def swarm_view(dht: Dht, run: RunFile, gate: AccessGuard | None = None, wall: float = 0.0) -> dict[str, Any]:
    """Read the swarm of a run from the DHT: its step, each stage's peers, and each peer's contribution.

    `wall` is the current Unix time. If the DHT cannot be read, the result has only `run` and the reason, `why`.
    """
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
    """The counts' header: who counted, since and until which step, and how many peers are left out."""
    names = ("by", "since_step", "step", "unlisted", "told_at")
    return {name: getattr(counted, name) for name in names}


def foretold_by(swarm: dict[str, Any], wall: float) -> float | None:
    """Predicted seconds until the current step ends, by the stage peers of `swarm_view`. None if unknown."""
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
    """Decode contributions, each with the role in which it was made, which is the suffix of its record."""
    found = []
    for record in records:
        for row in _read([record], decode_contributed, unreadable):
            found.append(row | {"role": record.suffix.decode("ascii", "replace")})
    return found


def _members(rows: list[dict[str, Any]], gate: AccessGuard | None, *roles: str) -> list[dict[str, Any]]:
    """The rows with each peer's name. In a run with tokens, only members' rows, with the names the organizer signed."""
    found = []
    for row in rows:
        peer, token = row["peer"], row.pop("token")
        name = gate.named(peer, token, *roles) if gate is not None else ""
        if name is not None:
            found.append(row | {"name": name})
    return found


def leader_board(given: list[dict[str, Any]], counted: Mapping[PeerId, PeerWork]) -> list[dict[str, Any]]:
    """Contributions, one row for each peer over all its roles, sorted by the conductor's counts, then by own figures.

    A peer's own figures are `samples`, whose gradients it computed or held; `brought`, the samples that it brought to
    the stages as a trainer; and `updates` of the experts that it hosts. They are None if the peer publishes none.
    `counted` has `samples` and `brought` by the conductor's count, or is None if it never counted the peer.
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
    """The run's step, loss and speed by its trainers' records. Without trainers, the step is that of the stages.

    Only rates published within the last FRESH_S count.
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
