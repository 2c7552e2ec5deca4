"""Peers that differ in what must agree: refused at the start, with every difference; those that only keep it elsewhere
train together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import ConfigError
from peerd.data import corpus_digest
from peerd.messages.settings import PublishedSettings
from peerd.pipeline.trainer.trainer_data import TrainerData
from peerd.role.settings_check import SettingsCheck
from peerd.run.contents import with_digests
from peerd.run.runfile import DataSection, ModelSection, OptimizerSection, PipelineSection, RunFile, shared_text
from peerd.swarm.directory import Directory, SettingsTold
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.network.world import home_world
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run

pytestmark = pytest.mark.slow

OWN = """
from torch import nn

def layers(run):
    return [nn.Embedding(256, 8), nn.Linear(8, 256)]
"""


class Refusable:
    """A role that keeps the reason for which it was refused."""

    refusal = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await super().run(task_status=task_status)  # type: ignore[misc]
        except* ConfigError as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.refusal = str(first)
        if self.refusal:
            await trio.sleep_forever()


class Candidate(Refusable, TrainerRole):
    """A replica, or a pipeline's trainer."""


class StageCandidate(Refusable, StageRole):
    """A stage peer."""


def paced(run: RunFile, folder: Path) -> Roles:
    """On devices that leave a newcomer the time to catch up."""
    return Roles(run, folder, worker=lambda: PacedDevice(0.1))


async def refusal(roles: Roles, run: RunFile, other: RunFile) -> str:
    """The reason that a replica with `other` hears while one with `run` trains; empty: it trains with it."""
    roles.run = run
    async with replica_world(roles, 1, step=1) as world:
        await world.start("candidate", program=roles.program(Candidate, run=other))
        second: Candidate = roles.live["candidate"]
        assert await world.until(lambda: bool(second.refusal or counted(second)), within_s=60), roles.story()
        return second.refusal


def counted(role: TrainerRole) -> int:
    counts: Any = role.status()["microbatches"]
    return int(counts["counted"])


def with_text(run: RunFile, path: Path, **settings: object) -> RunFile:
    return msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, path=str(path), **settings))


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(tmp_path, (4000,))


async def test_the_same_text_elsewhere_trains_together(tmp_path: Path, autojump_clock: MockClock, run: RunFile) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((tmp_path / "text0.txt").read_bytes())
    (tmp_path / "peers").mkdir()
    assert await refusal(paced(run, tmp_path / "peers"), run, with_text(run, elsewhere)) == ""


async def test_another_text_is_refused_with_both_digests_unless_every_trainer_has_its_own(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile
) -> None:
    other = tmp_path / "other"
    other.write_bytes((tmp_path / "text0.txt").read_bytes()[::-1])
    roles = paced(run, tmp_path / "peers")
    told = await refusal(roles, run, with_text(run, other))
    assert told.startswith("run 'virtual' is running with other text: data.path ")
    assert "... here, " in told
    assert "let the organizer set data.digest: any" in told
    own = with_text(run, tmp_path / "text0.txt", digest="any")
    assert await refusal(paced(own, tmp_path / "peers2"), own, with_text(own, other)) == ""


@pytest.mark.parametrize("tokens", [False, True])
async def test_another_large_text_is_a_warning_once_it_was_read_through_and_ends_a_trainer_where_members_say_so(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    monkeypatch.setattr(corpus_digest, "PROMPT_BYTES", 0)
    other, late = tmp_path / "other", trio.Event()
    other.write_bytes((tmp_path / "text0.txt").read_bytes()[::-1])
    digests = TrainerData.digests

    async def digests_late(data: TrainerData) -> dict[str, str]:
        if data._run.data.path == str(other):
            await late.wait()
        return await digests(data)

    monkeypatch.setattr(TrainerData, "digests", digests_late)
    monkeypatch.setattr(SettingsCheck, "has_tokens", property(lambda services: tokens))
    roles = paced(run, tmp_path / "peers")
    async with replica_world(roles, 1, step=1) as world:
        await world.start("candidate", program=roles.program(Candidate, run=with_text(run, other)))
        second: Candidate = roles.live["candidate"]
        assert await world.until(lambda: counted(second) >= 3, within_s=60), roles.story()
        assert not second.refusal
        late.set()
        warned = lambda: [e for e in roles.logs["candidate"].recent(200) if e["name"] == "data.differs"]  # noqa: E731
        assert await world.until(lambda: bool(second.refusal or warned()), within_s=60), roles.story()
        if not tokens:
            before = counted(second)
            assert await world.until(lambda: counted(second) > before, within_s=60), roles.story()
            assert [str(e["reason"]).startswith("data.path ") for e in warned()] == [True]
            assert not second.refusal
            return
    assert second.refusal.startswith("run 'virtual' is running with other text: data.path ")
    assert re.search(r"by step \d+, [1-9]\d* microbatches of it had been counted$", second.refusal)


async def test_of_trainers_that_start_in_the_same_second_with_other_texts_one_says_so_and_ends(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile
) -> None:
    other = tmp_path / "other"
    other.write_bytes((tmp_path / "text0.txt").read_bytes()[::-1])
    roles = paced(run, tmp_path / "peers")
    async with home_world() as world:
        async with trio.open_nursery() as nursery:
            for name, its in (("here", run), ("there", with_text(run, other))):
                nursery.start_soon(partial(world.start, name, program=roles.program(Candidate, run=its)))

        def told() -> list[str]:
            return [role.refusal for role in roles.of(Candidate) if role.refusal]

        assert await world.until(lambda: bool(told()), within_s=10), roles.story()
        (sentence,) = told()
        assert sentence.startswith("trainers of run 'virtual' started together with other text: data.path ")
        assert "read the same text, or let the organizer set data.digest: any" in sentence
        (loser,) = [name for name, role in roles.live.items() if role.refusal]
        await world.kill(next(node for node in world.living() if node.name == loser))  # as its process ends
        (left,) = roles.of(Candidate)
        assert await world.until(lambda: left.status()["step"] > 0, within_s=60), roles.story()
        assert left.refusal == ""


async def test_a_large_text_that_is_not_the_one_of_the_run_file_contributes_nothing(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text0.txt"
    run = with_text(run, text, digest=hashlib.sha256(text.read_bytes()).hexdigest())
    monkeypatch.setattr(corpus_digest, "PROMPT_BYTES", 0)
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes()[::-1])
    digests = TrainerData.digests

    async def digests_late(data: TrainerData) -> dict[str, str]:
        await trio.sleep(30)
        return await digests(data)

    monkeypatch.setattr(TrainerData, "digests", digests_late)
    roles = paced(run, tmp_path / "peers")
    async with replica_world(roles, 1, step=1) as world:
        await world.start("candidate", program=roles.program(Candidate, run=with_text(run, other)))
        second: Candidate = roles.live["candidate"]
        assert await world.until(lambda: bool(second.refusal), within_s=60), roles.story()
        assert second.refusal.endswith("in data.digest)")
        assert counted(second) == 0


@pytest.mark.parametrize("named", [True, False])
async def test_a_text_that_strangers_publish_ends_no_trainer_whose_run_file_names_its_text_or_has_other_settings(
    tmp_path: Path, autojump_clock: MockClock, run: RunFile, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    text = tmp_path / "text0.txt"
    if named:
        run = with_text(run, text, digest=hashlib.sha256(text.read_bytes()).hexdigest())
    stranger = PublishedSettings(shared_text(run) if named else b"of another run file", {"data": "f" * 64})

    async def published(directory: Directory) -> SettingsTold:
        return SettingsTold(serving=[], training=[stranger, stranger])

    monkeypatch.setattr(Directory, "published_settings", published)
    roles = paced(run, tmp_path / "peers")
    async with home_world() as world:
        await world.start("one", program=roles.program(Candidate))
        (one,) = roles.of(Candidate)
        assert await world.until(lambda: bool(one.refusal or counted(one)), within_s=60), roles.story()
        await trio.sleep(20)  # it looks again meanwhile
        assert not one.refusal


@pytest.mark.parametrize("kind", [Candidate, StageCandidate])
async def test_a_peer_with_other_settings_that_starts_in_the_same_second_is_told_every_key_and_ends(
    tmp_path: Path, autojump_clock: MockClock, kind: type[Refusable]
) -> None:
    """Neither serves yet when the other compares; only one of them can have the run: the one that conducts."""
    run = virtual_run(tmp_path, (4000,), 2, pipeline=PipelineSection(stages=2, microbatch=2))
    other = msgspec.structs.replace(run, seed=7, optimizer=OptimizerSection(name="sgd"))
    roles = Roles(run, tmp_path / "peers")
    async with home_world() as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(world.start, "one", program=roles.program(StageCandidate)))
            nursery.start_soon(partial(world.start, "two", program=roles.program(kind, run=other)))
        refused: Callable[[], list[str]] = lambda: [n for n, role in roles.live.items() if role.refusal]  # noqa: E731
        assert await world.until(lambda: bool(refused()), within_s=30), roles.story()
        await trio.sleep(30)
        (name,) = refused()
        (kept,) = {"one", "two"} - {name}
        assert roles.live[kept].status()["conducts"]
        told = roles.live[name].refusal
        names = {"one": ("'adamw'", 5), "two": ("'sgd'", 7)}
        (here, seed), (there, other_seed) = names.pop(name), *names.values()
        assert told.startswith("run 'virtual' is running with other settings:")
        assert f"optimizer.name is {here} here and {there} there" in told
        assert f"seed is {seed} here and {other_seed} there" in told


def tokenizers_at(folder: Path) -> tuple[RunFile, RunFile]:
    """Two run files that name a tokenizer of the same name and size, made of other words."""
    tokenizers, models = pytest.importorskip("tokenizers"), pytest.importorskip("tokenizers.models")
    pytest.importorskip("tokenizers.pre_tokenizers")
    (folder / "text0.txt").write_text("one two three " * 300)
    runs = []
    for word in ("one", "two"):
        vocab = {"[UNK]": 0, word: 1, "</s>": 2}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        runs.append(with_digests(RunFile(run="virtual", model=ModelSection(vocab="tokenizer.json"))))
    return runs[0], runs[1]


def sources_at(folder: Path) -> tuple[RunFile, RunFile]:
    """Two run files that name a function of the same name, in other words."""
    runs = []
    for text in (OWN, OWN + "# or so\n"):
        (folder / "mine.py").write_text(text)
        runs.append(with_digests(RunFile(run="virtual", model=ModelSection(kind="mine:layers"))))
    return runs[0], runs[1]


def keys_at(folder: Path) -> tuple[RunFile, RunFile]:
    """Two run files with three keys that differ."""
    other = RunFile(run="virtual", seed=6, optimizer=OptimizerSection(lr=0.5), data=DataSection(holdout=0.2))
    return RunFile(run="virtual", seed=5, data=DataSection(holdout=0.1)), other


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (tokenizers_at, ["other settings: model.vocab: tokenizer.json differs from the run's (sha256 "]),
        (sources_at, ["other settings: model.kind: mine.py differs from the run's (sha256 "]),
        (
            keys_at,
            [
                "\n  data.holdout is 0.2 here and 0.1 there",
                "\n  optimizer.lr is 0.5 here and 0.001 there",
                "\n  seed is 6",
            ],
        ),
    ],
)
async def test_other_contents_and_every_other_key_are_refused(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    run: RunFile,
    made: Any,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    both = []
    for part in made(tmp_path):
        model = msgspec.structs.replace(part.model, d_model=8, heads=1, layers=1, context=8)
        both.append(
            changed(run, seed=part.seed, model=model, optimizer=part.optimizer, data={"holdout": part.data.holdout})
        )
    told = await refusal(paced(both[0], tmp_path / "peers"), *both)
    for part in words:
        assert part in told
