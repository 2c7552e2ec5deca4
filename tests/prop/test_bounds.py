"""Whatever a run file that is accepted and a swarm within its bounds can make is taken by whoever it is sent to.

Run files and states are drawn at and around their limits; all that they lead to is encoded, and decoded by the strict
decoder within the body that the method allows.
"""

from __future__ import annotations

import math
import random
from typing import Any, Final, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import WorkSplitter
from peerd.core import limits
from peerd.messages.encoding import decode, encode
from peerd.messages.handover import PassRequest, Ticket
from peerd.messages.progress import KeptCheckpoints, StageProgress, TrainerProgress
from peerd.messages.swarm import (
    MAX_MEMBERS,
    MAX_MICROBATCHES,
    Done,
    Forecast,
    Grant,
    LineInfo,
    Mb,
    Mbs,
    MemberAnswer,
    MemberInfo,
    MemberSync,
    Party,
    Position,
    Prepare,
    Prepared,
    Receipt,
    Redo,
    Seqs,
    TrainerAnswer,
    TrainerSync,
)
from peerd.run.check import check
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
    SourceSection,
    shared_text,
)
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.batch.trainer_ledger import told_at_once
from peerd.swarm.events import ConductorConfig, MemberHello
from peerd.swarm.steps.conductor import Conductor
from peerd.swarm.steps.member_list import MemberList
from tests.kit.amount import examples
from tests.worlds.machines.grids import order_of, rounds_of

M = TypeVar("M", bound=msgspec.Struct)

RUN: Final = bytes(16)
LAST_SEQ: Final = (1 << 62) - 1
POSITION: Final = Position(limits.LAST_STEP, b"x" * 16)
SIGNATURE: Final = b"s" * 64
LONG_ADDR: Final = "/dns4/" + ".".join(["x" * 60] * 4) + "/tcp/65535"
sizes = st.sampled_from([0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4096])
counts = sizes | st.sampled_from([MAX_MICROBATCHES - 1, MAX_MICROBATCHES])


def name(number: int) -> str:
    """As long as a peer id in text."""
    return f"12D3KooW{number:044}"


def sent(message: M, body_bytes: int = limits.RPC_BODY_BYTES) -> M:
    """As it arrives."""
    found = decode(type(message), encode(message), body_bytes)
    assert encode(found) == encode(message)
    return found


def batch(microbatches: int, trainers: int, apart: int) -> list[Mb]:
    """Microbatches whose numbers never follow each other, of as many trainers as a batch admits."""
    ledger = BatchLedger(1, min(microbatches, MAX_MICROBATCHES))
    session = LAST_SEQ - apart * (microbatches + 1)
    for number in range(microbatches):
        ledger.admit(Mb(name(number % max(1, trainers)), session + apart * number), 0.0)
    ledger.check()
    return sorted(ledger.entries)


def addrs(count: int) -> list[str]:
    return [f"{LONG_ADDR}/p2p/{name(n)}/p2p-circuit" for n in range(count)]


def listing(count: int) -> MemberList:
    """So many members, each with as many and as long addresses as it may have."""
    found = MemberList(random.Random(1))
    ways = [addr.ljust(limits.ADDR_BYTES, "x") for addr in addrs(limits.MEMBER_ADDRS)]
    found.update([MemberInfo(name(n), limits.STAGES - 1, ways, True, True, 1e9) for n in range(count)])
    return found


# --- reports and orders about microbatches ---------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(counts, sizes, sizes, st.sampled_from([1, 2, 1000]))
def test_what_a_member_reports_is_taken(microbatches: int, trainers: int, others: int, apart: int) -> None:
    held = batch(microbatches, trainers, apart)
    message = sent(
        MemberSync(
            run=RUN,
            session=LAST_SEQ,
            stage=limits.STAGES - 1,
            position=POSITION,
            prepared=POSITION,
            saved=[POSITION] * min(others, limits.SAVED_TOLD),
            held=Mbs.of(held),
            counted=Mbs.of(held),
            addrs=addrs(limits.ADDRS_PER_PEER)[:16],
            since=1e9,
            term=limits.LAST_STEP,
            seen=LAST_SEQ,
            wait_s=2.0,
            line=LineInfo(
                "client",
                math.inf,
                math.inf,
            ),
            early=Mbs.of(held),
            listed=LAST_SEQ,
        )
    )
    assert list(message.held or ()) == held


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(counts, sizes, sizes, st.sampled_from([1, 2, 1000]))
def test_orders_to_average_and_answers_are_taken(microbatches: int, trainers: int, peers: int, apart: int) -> None:
    part, group = batch(microbatches, trainers, apart), [name(n) for n in range(peers)]
    parties = [Party(peer, "client", 1.0) for peer in group]
    order = Prepare(
        RUN, limits.LAST_STEP, limits.LAST_STEP, b"a" * 16, b"x" * 16, group, Mbs.of(part), 1 << 30, 3600.0, parties
    )
    assert list(sent(order).assigned) == part
    missing = Mbs.of(part)
    sent(Prepared(False, missing, group, b"d" * 32, missing))


@pytest.mark.slow
@pytest.mark.parametrize("members", [193, 1000, MAX_MEMBERS])
def test_orders_of_a_whole_run_in_one_stage_are_taken(members: int) -> None:
    group = tuple(name(n) for n in range(members))
    part = Mbs.of(batch(MAX_MICROBATCHES, limits.BATCH_TRAINERS, 2))
    for size in (0, 3, 192):
        for groups in rounds_of(GroupTopology(WorkSplitter(), size), group):
            for one in (groups[0], groups[-1]):
                order = order_of(one, b"a" * 16, b"b" * 16, 1.0, last=False)
                sent(msgspec.structs.replace(order, assigned=part))


def test_a_batch_takes_no_more_trainers_than_a_message_names() -> None:
    held = batch(MAX_MICROBATCHES, limits.BATCH_TRAINERS + 1, 1)
    assert len({mb.trainer for mb in held}) == limits.BATCH_TRAINERS
    assert list(Mbs.of(held)) == held


@given(st.lists(st.builds(Mb, st.sampled_from(["a", "b", "c"]), st.integers(0, LAST_SEQ))))
def test_microbatches_come_back_sorted(mbs: list[Mb]) -> None:
    assert list(sent(Mbs.of(mbs))) == sorted(mbs)


# --- trainers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(counts, st.sampled_from([1, 2, 30, limits.STAGES - 1, limits.STAGES]), st.booleans())
def test_all_that_a_trainer_has_done_is_told_in_reports_that_are_taken(count: int, stages: int, signed: bool) -> None:
    count = min(count, 200_000 // stages)  # of a batch that does not fill this machine's memory
    receipts: list[Receipt | None] = [Receipt(LAST_SEQ, SIGNATURE)] * stages if signed else []
    news = [Done(LAST_SEQ - 2 * n, [name(s) for s in range(stages)], receipts) for n in range(count)]
    told: list[int] = []
    while news:
        now, later = told_at_once(news)
        assert now
        numbers = Seqs.of([*later, *range(limits.REDO_AT_ONCE)][:MAX_MICROBATCHES])
        sent(TrainerSync(RUN, 1, 1, numbers, now, LAST_SEQ, LAST_SEQ, 2.0, early=numbers, unknown=numbers))
        told += [done.seq for done in now]
        assert [done.seq for done in news[len(now) :]] == later
        news = news[len(now) :]
        if len(told) > 4 * len(now):
            break  # the others are alike
    assert len(told) == len(set(told))


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(counts, st.sampled_from([0, 1, 200]), st.sampled_from([0, 1, limits.REDO_AT_ONCE]))
def test_answers_to_trainers_are_taken(count: int, members: int, redo: int) -> None:
    """Its numbers lie close together, since it counts them itself."""
    seqs, listed = Seqs.of(range(LAST_SEQ - 2 * count, LAST_SEQ, 2)), listing(members)
    granted = Grant(limits.LAST_STEP, limits.LAST_STEP, seqs, SIGNATURE)
    sent(
        TrainerAnswer(
            term=1,
            step=limits.LAST_STEP,
            taken=True,
            admitted=seqs,
            redo=[Redo(LAST_SEQ, limits.STAGES - 1)] * redo,
            counted=seqs,
            evaluate=Grant(limits.LAST_STEP, limits.LAST_STEP, Seqs(), SIGNATURE),
            complete=False,
            waits_for="é" * limits.WAITS_CHARS,
            version=LAST_SEQ,
            members=listed.news(0),
            forecast=Forecast(limits.FORESEEABLE_S, limits.FORESEEABLE_S),
            early=seqs,
            counted_early=seqs,
            grant=granted,
            grant_early=granted,
        )
    )
    last, route = limits.STAGES - 1, [name(stage) for stage in range(limits.STAGES)]
    ticket = Ticket(limits.LAST_STEP, LAST_SEQ, (1 << 16) - 1, 0, last, 0, route, SIGNATURE)
    sent(PassRequest(RUN, last, route[0], ticket, granted, math.inf), limits.RPC_DEFAULT_BODY_BYTES)


# --- the list of members ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [0, 1, 127, 128, MAX_MEMBERS, MAX_MEMBERS + 1])
def test_answers_to_members_are_taken(members: int) -> None:
    listed, version = listing(members), 0
    while (news := listed.news(version)) is not None:
        sent(MemberAnswer(1, POSITION, False, "é" * limits.WAITS_CHARS, False, 1, news))
        version = news.version
    listed.update([])
    gone = listed.news(version)
    if gone is not None:
        sent(MemberAnswer(1, None, False, "", True, 1, gone))


@pytest.mark.parametrize("stages", [1, 100, limits.STAGES])
def test_what_a_conductor_waits_for_is_told_within_its_bound(stages: int) -> None:
    made = Conductor(ConductorConfig(stages=stages, microbatches=1), random.Random(1), 0.0)
    made.handle(0.0, MemberHello(name(1), 0, 1, Position(0, b""), None, (), frozenset(), frozenset(), ()))
    text = made.waits_for()[: limits.WAITS_CHARS]
    sent(MemberAnswer(1, None, False, text, False, 1, None))


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [0.0, 1.0, math.inf, -math.inf, math.nan])
def test_records_are_taken_and_fit_into_the_directory(figure: float) -> None:
    text, token, ways = "é" * 200, b"t" * limits.TOKEN_BYTES, [LONG_ADDR] * 16
    big = (1 << 63) - 1
    stage = StageProgress(9, 1e9, big, big, figure, text, name(1), text, ways, token, 1e9, True)
    kept = KeptCheckpoints([POSITION] * limits.KEPT_SETS, ways, token)
    trainer = TrainerProgress(big, figure, figure, big, figure, figure, big, big, big, text, ways, True)
    for record in (stage, kept, trainer):
        sent(record, limits.RECORD_VALUE_BYTES)


# --- run files -------------------------------------------------------------------------------------------------------


def around(*limits_of: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted({n + d for n in limits_of for d in (-1, 0, 1) if n + d > 0}))


@st.composite
def run_files(draw: st.DrawFn) -> RunFile:
    microbatch = draw(around(1, 8, 1 << 10, 65536))
    paths = draw(st.lists(st.text("ab/é", min_size=1, max_size=400), max_size=limits.STAGES // 16))
    return RunFile(
        run=draw(st.text(min_size=1, max_size=64)),
        seed=draw(st.integers() | st.sampled_from([1 << 63, (1 << 63) - 1, -(1 << 63), -(1 << 63) - 1])),
        model=ModelSection(
            d_model=8 * draw(around(1, 64, 8192)),
            heads=4,
            layers=draw(around(1, limits.STAGES, 10_000)),
            context=draw(around(1, 1024, 1 << 20)),
            dtype=draw(st.sampled_from(["float32", "float64"])),
        ),
        pipeline=PipelineSection(stages=draw(around(1, 2, limits.STAGES)), microbatch=microbatch),
        optimizer=OptimizerSection(total_steps=draw(around(1, limits.LAST_STEP))),
        batch=BatchSection(target_samples=microbatch * draw(around(1, MAX_MICROBATCHES))),
        checkpoint=CheckpointSection(every_steps=draw(around(1)), keep=draw(around(1, 64, 100, 1 << 40))),
        data=DataSection(sources=[SourceSection(path=path) for path in paths]),
    )


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(run_files())
def test_what_a_run_file_asks_for_can_be_sent_or_is_refused_with_its_place(run: RunFile) -> None:
    faults = check(run)
    m, p = run.model, run.pipeline
    makes: dict[str, bool] = {
        "pipeline.stages": p.stages <= min(limits.STAGES, m.layers),
        "batch.target_samples": run.batch.target_samples // p.microbatch <= MAX_MICROBATCHES,
        "optimizer.total_steps": run.optimizer.total_steps <= limits.LAST_STEP,
        "seed": -(1 << 63) <= run.seed < 1 << 63,
    }
    if not faults:
        assert all(makes.values())
        assert len(shared_text(run)) <= limits.RECORD_VALUE_BYTES
        activations = p.microbatch * m.context * m.d_model * (8 if m.dtype == "float64" else 4)
        assert p.stages == 1 or 2 * activations <= limits.RPC_MESSAGE_FRAME_BYTES
        sent(Position(run.optimizer.total_steps, b""))
    for path, message in faults:
        root: Any = run
        for part in path.split("[")[0].split("."):
            root = getattr(root, part)  # the place is one of the file's
        assert message


def test_the_settings_of_a_run_fit_into_one_record() -> None:
    run = RunFile(run="long", data=DataSection(sources=[SourceSection(path="x", field="y" * 300)] * 64))
    assert [(path, "allowed: up to 16384" in text) for path, text in check(run)] == [("data", True)]
