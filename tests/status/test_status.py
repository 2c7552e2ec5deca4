"""The swarm as the directory shows it: sums over trainers, peers of each stage, and records that make no sense."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from peerd.core.errors import Unreachable
from peerd.core.ids import Key, PeerId
from peerd.core.keys import Keypair
from peerd.dht.dht import Dht
from peerd.messages.contributions import Contributed, CountedPage, CountedRow, contributions_key, counted_key
from peerd.messages.encoding import encode
from peerd.messages.progress import StageProgress, TrainerProgress, encode_progress, progress_key, stage_key
from peerd.run.runfile import PipelineSection, RunFile
from peerd.status.status_board import RoleState, StatusBoard
from peerd.status.swarm_status import (
    ContributionStatus,
    CountedStatus,
    SampleCounts,
    StagePeerStatus,
    SwarmStatus,
    TrainerStatus,
)
from peerd.status.swarm_view import foretold_by, swarm_view
from tests.worlds.simulation.clock import SimClock

RUN = RunFile(run="tiny", pipeline=PipelineSection(stages=2))


@dataclass
class Found:
    """A record, as far as a watcher looks at it."""

    publisher: PeerId
    value: bytes
    version: int = 0
    suffix: bytes = b""


Entry = tuple[Key, "bytes | Found"]  # what is there as bytes is published by the peer of its number


class Directory:
    """Answers from a table."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = [
            (key, value if isinstance(value, Found) else Found(peer(number), value))
            for number, (key, value) in enumerate(entries)
        ]

    async def get_many(
        self, keys: Iterable[Key], *, timeout_s: float, max_age_s: float, most_bytes: int
    ) -> dict[Key, list[Found]]:
        return {key: [found for of, found in self.entries if of == key] for key in keys}


class Silent:
    async def get_many(
        self, keys: Iterable[Key], *, timeout_s: float, max_age_s: float, most_bytes: int
    ) -> dict[Key, list[Found]]:
        raise Unreachable("nobody is there")


def peer(number: int) -> PeerId:
    return Keypair.from_seed(bytes([number]) * 32).peer_id


def stage(number: int, step: int, conductor: str = "", step_at: float = 0.0) -> tuple[Key, bytes]:
    told = StageProgress(
        stage=number,
        since=1.0,
        step=step,
        held=4,
        samples_per_s=9.5,
        device="cpu",
        conductor=conductor,
        waits_for="",
        addrs=[],
        step_at=step_at,
    )
    return stage_key("tiny", number), encode_progress(told)


def trainer(**changes: Any) -> tuple[Key, bytes]:
    plain = TrainerProgress(7, 3.0, math.nan, 0, 10.0, 100.0, 50, 1, 0, "")
    return progress_key("tiny"), encode_progress(msgspec.structs.replace(plain, **changes))


async def view(directory: object) -> SwarmStatus:
    return await swarm_view(cast(Dht, directory), RUN)


async def test_trainers_are_summed_and_stage_peers_listed_by_stage() -> None:
    swarm = await view(Directory(stage(0, 7), stage(1, 7), stage(1, 6), trainer(), trainer(step=8, loss=2.0)))
    assert (swarm.step, swarm.loss, swarm.samples_per_s, swarm.tokens_per_s) == (8, 2.5, 20.0, 200.0)
    assert (swarm.microbatches, swarm.redone, swarm.lost, swarm.valid_loss) == (100, 2, 0, None)
    assert [[row.step for row in found.peers] for found in swarm.stages] == [[7], [7, 6]]
    assert swarm.stages[0].peers[0].peer == peer(0).text
    assert swarm.unreadable_records == 0


async def test_the_newest_validation_counts() -> None:
    swarm = await view(Directory(trainer(valid_loss=4.0, valid_step=10), trainer(valid_loss=3.5, valid_step=20)))
    assert (swarm.valid_loss, swarm.valid_step) == (3.5, 20)


async def test_without_trainers_the_step_is_that_of_the_stages() -> None:
    swarm = await view(Directory(stage(0, 7)))
    assert (swarm.step, swarm.loss, swarm.trainers) == (7, None, [])
    assert (await view(Directory())).step is None


async def test_the_conductors_forecast_of_the_next_step_is_found_among_the_records() -> None:
    leader = peer(0).text
    swarm = await view(Directory(stage(0, 7, conductor=leader, step_at=1012.0), stage(1, 7, conductor=leader)))
    assert foretold_by(swarm, 1000.0) == 12.0
    assert foretold_by(await view(Directory(stage(0, 7))), 1000.0) is None
    assert foretold_by(await view(Silent()), 1000.0) is None


async def test_records_that_make_no_sense_are_counted_and_harm_nobody() -> None:
    swarm = await view(Directory((stage_key("tiny", 0), b"\xc1 nonsense"), (progress_key("tiny"), b""), stage(0, 3)))
    assert swarm.unreadable_records == 2
    assert len(swarm.stages[0].peers) == 1


async def test_figures_that_no_sum_can_hold_are_left_out() -> None:
    rates = [math.inf, -math.inf, math.nan, 10.0]
    swarm = await view(Directory(*(trainer(samples_per_s=rate, tokens_per_s=rate) for rate in rates)))
    assert (swarm.samples_per_s, swarm.tokens_per_s) == (10.0, 10.0)
    swarm = await view(Directory(*(trainer(samples_per_s=1.7e308, tokens_per_s=1.7e308, loss=1.7e308),) * 4))
    assert (swarm.samples_per_s, swarm.tokens_per_s, swarm.loss) == (0.0, 0.0, 1.7e308)


def test_the_rows_of_peers_have_all_fields_of_their_records() -> None:
    own = {"peer", "told_at", "age_s", "gone", "own"}
    assert {*StagePeerStatus.__struct_fields__} == {*StageProgress.__struct_fields__, "name", *own} - {"token"}
    assert {*TrainerStatus.__struct_fields__} == {*TrainerProgress.__struct_fields__, *own}


async def test_a_directory_that_does_not_answer_is_said() -> None:
    assert (await view(Silent())).why == "the directory gave no answer: nobody is there"


def test_a_role_cannot_hide_its_state_behind_its_own_words() -> None:
    shown = RoleState("stage", "paused", 2, "boom", {"state": "fine", "role": "king", "x": 1}).as_dict()
    assert shown == {"waits_for": None, "x": 1, "role": "stage", "state": "paused", "restarts": 2, "failure": "boom"}


# --- contributions ----------------------------------------------------------------------------------------------------


def given(number: int, samples: int, role: str = "stage") -> Entry:
    value = encode(Contributed(samples, 0, 3600, 1))
    return contributions_key("tiny"), Found(peer(number), value, suffix=role.encode())


def counted(number: int, *rows: tuple[int, int, int], since: int = 5) -> Entry:
    told = [CountedRow(peer(one).public_key, computed, brought) for one, computed, brought in rows]
    return counted_key("tiny"), Found(peer(number), encode(CountedPage(since, 9, 3, told)), 7000, b"0")


def board(swarm: SwarmStatus) -> list[tuple[str, int | None, tuple[int, int] | None]]:
    """Peer, own word and count of each row."""
    rows = swarm.contributions
    counts = [(row.counted.samples, row.counted.brought) if row.counted else None for row in rows]
    return [(row.peer, row.samples, count) for row, count in zip(rows, counts, strict=True)]


LED = (stage(0, 9, conductor=peer(0).text), stage(1, 9, conductor=peer(0).text))  # by peers 0 and 1


async def test_the_board_goes_by_the_counts_of_the_conductor_that_most_follow() -> None:
    words = [given(1, 50), given(2, 10**15), given(3, 7, "aux"), given(0, 40)]
    swarm = await view(Directory(*LED, *words, counted(0, (0, 41, 0), (1, 44, 2), (4, 0, 43))))
    assert board(swarm) == [
        (peer(1).text, 50, (44, 2)),
        (peer(0).text, 40, (41, 0)),
        (peer(4).text, None, (0, 43)),
        (peer(2).text, 10**15, None),
        (peer(3).text, 7, None),
    ]
    assert swarm.counted == CountedStatus(by=peer(0).text, since_step=5, step=9, unlisted=3, told_at=7.0)
    assert swarm.unreadable_records == 0


async def test_a_stranger_that_counts_is_not_heard() -> None:
    alone = stage_key("tiny", 0), Found(peer(6), stage(0, 9, conductor=peer(6).text)[1])
    for hostile in (counted(6, (6, 10**15, 0)), (counted_key("tiny"), Found(peer(6), b"\xc1", 1, b"0"))):
        swarm = await view(Directory(*LED, alone, given(6, 10**15), given(1, 50), hostile))
        assert swarm.counted is None
        assert board(swarm) == [(peer(6).text, 10**15, None), (peer(1).text, 50, None)]
        assert swarm.unreadable_records == 0


async def test_where_the_counts_cannot_be_read_the_peers_own_word_is_shown() -> None:
    broken = counted_key("tiny"), Found(peer(0), b"\xc1 nonsense", 1, b"0")
    swarm = await view(Directory(*LED, given(1, 50), broken))
    assert (swarm.counted, board(swarm)) == (None, [(peer(1).text, 50, None)])
    assert swarm.unreadable_records == 1
    nobody_conducts = await view(Directory(stage(0, 9, conductor=peer(5).text), counted(5, (5, 1, 1))))
    assert nobody_conducts.counted is None


async def test_shares_go_by_the_counts_once_there_are_any() -> None:
    status = StatusBoard(cast(Any, (SimpleNamespace(id=peer(1)), None, None)), SimClock(1, "x"), cast(Any, None), RUN)

    def note(own: int, liar: int, count: int | None) -> None:
        count_of = SampleCounts(samples=count, brought=0) if count is not None else None
        rows = [
            ContributionStatus(peer=peer(1).text, samples=own, brought=0, counted=count_of),
            ContributionStatus(peer=peer(2).text, samples=liar, brought=0),
            ContributionStatus(peer=peer(3).text, counted=count_of),
        ]
        status._note_shares(rows, counted=count is not None)

    def share() -> float | None:
        return status._shares["samples"].of(peer(1).text)

    note(10, 30, None)
    assert share() == 0.25
    note(20, 10**15, 8)
    assert share() == 0.5
    note(30, 10**16, None)  # a new conductor has published nothing yet
    assert share() == 0.5
    note(30, 10**16, 16)
    assert share() == 0.5
