"""Backbones keep a run's curve and checkpoints; whoever has lost all its peers goes on from what they give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.core.errors import ConfigError
from peerd.messages.encoding import Empty
from peerd.messages.state import StatePiece
from peerd.model.checkpoint import Checkpoints
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile, fingerprint
from peerd.state.checkpoints.keeper import CheckpointKeeper
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.state.snapshot import StateServer
from peerd.status.learning_curve import LearningCurves
from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.roles.training import Peer, Swarm, events, pinned, small_run, swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setattr(BackboneRole, "look_s", 0.2)
    evaluate, checkpoint = {"every_steps": 4, "samples": 4}, {"every_steps": 4, "keep": 2}
    return small_run(tmp_path, run="kept", evaluate=evaluate, checkpoint=checkpoint)


async def until(s: Swarm, peer: Peer, what: str, true: Callable[[], bool]) -> None:
    """Looks again whenever the peer's role has: a backbone at the run, a stage peer at a step."""
    with trio.move_on_after(120):  # records of peers that are gone live for a minute: till then newcomers wait for them
        while not true():
            role = peer.role
            await (role.moved() if isinstance(role, StageRole) else role._looked.wait())
        return
    pytest.fail(f"not within two minutes: {what}\n" + "\n".join(events(s.peers.values())))


async def started(s: Swarm, run: RunFile, backbones: int) -> tuple[list[Peer], list[Peer]]:
    keepers = [await s.start(f"backbone{i}", BackboneRole, run) for i in range(backbones)]
    stages = [await s.start(f"stage{i}", StageRole, pinned(run, i)) for i in range(2)]
    await s.start("trainer", TrainerRole, run)
    return keepers, stages


def trusting(run: RunFile, *keepers: Peer) -> RunFile:
    """The run as new peers have it whose users trust these keepers: nobody else bears out where the run was."""
    return changed(run, limits={"trust": [keeper.host.id.text for keeper in keepers]})


def kept(peer: Peer) -> list[int]:
    found: list[int] = peer.role.status().get("kept_steps", [])
    return found


def step_of(peer: Peer) -> int:
    step: int = peer.role.status()["step"]
    return step


@pytest.mark.thorough
async def test_of_two_backbones_one_is_killed_and_the_run_goes_on_from_what_the_other_kept(
    tmp_path: Path, run: RunFile
) -> None:
    place = tmp_path / "peers"
    async with swarm(place) as s:
        (first, second), stages = await started(s, run, backbones=2)
        await until(s, second, "both kept", lambda: bool(kept(first)) and bool(kept(second)))
        before = max(kept(second))
        first.kill()
        await until(s, second, "went on", lambda: max(kept(second)) > before)
        await until(s, second, "curve", lambda: second.role.status()["curve_step"] > before)
        welcome = {event["peer"] for event in second.log.recent() if event["name"] == "peer.welcomed"}
        assert welcome == {peer.host.id.text for peer in (*stages, s.peers["trainer"])}
        (line,) = [event["line"] for event in second.log.recent() if event["name"] == "run.joinable"]
        assert str(line).startswith("peerd join peerd://")
        assert f"/{second.host.id.text}/" in str(line)
        await second.role.leave()
    newest = whole_set(place / "backbone1", run)
    steps = whole_curve(place / "backbone1")
    assert steps[-1] >= before

    for lost in ("stage0", "stage1", "trainer", "backbone0"):
        shutil.rmtree(place / lost)
    async with swarm(place) as s:
        second = await s.start("backbone1", BackboneRole, run)
        run = trusting(run, second)
        stages = [await s.start(f"stage{i}", StageRole, pinned(run, i)) for i in range(2)]
        await s.start("trainer", TrainerRole, run)
        await until(s, stages[0], "goes on", lambda: step_of(stages[0]) > newest + 1)
        restored = {
            event["step"] for peer in stages for event in peer.log.recent() if event["name"] == "stage.restored"
        }
        assert restored == {newest}
        await until(s, second, "curve goes on", lambda: second.role.status()["curve_step"] > steps[-1])
    whole_curve(place / "backbone1")


def whole_set(place: Path, run: RunFile) -> int:
    """Every stage of the newest set can be read and is of its step; returns that."""
    folder = place / "checkpoints" / run.run
    sets = json.loads((folder / "kept.json").read_text())["sets"]
    newest: int = sets[-1]["step"]
    for stage in range(2):
        state, manifest = Checkpoints(folder / f"stage-{stage}", 3, fingerprint(run), stage).load(newest)
        assert int(state["step"]) == newest
        assert manifest.extra["lineage"] == sets[-1]["lineage"]
    return newest


def whole_curve(place: Path) -> list[int]:
    """Steps go up, each once; the table says the same where there is one."""
    curves = LearningCurves(place / "curves", "kept")
    points = curves.read()
    steps = [point.step for point in points]
    assert steps == sorted(set(steps))
    assert any(point.loss is not None and point.samples_per_s > 0 for point in points)
    assert any(point.valid_loss is not None for point in points)
    assert any(point.peers == [1, 1] and point.trainers == 1 for point in points)
    return steps


async def test_a_backbone_with_other_settings_keeps_the_curve_and_says_why_no_checkpoints(
    tmp_path: Path, run: RunFile
) -> None:
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, RunFile(run=run.run, pipeline=run.pipeline))
        for stage in range(2):
            await s.start(f"stage{stage}", StageRole, pinned(run, stage))
        await s.start("trainer", TrainerRole, run)
        backbone = s.peers["backbone"]
        told = backbone.role.status
        await until(s, backbone, "a reason", lambda: told()["not_kept"] and told()["curve_step"] > 0)
        assert "is running with other settings:" in told()["not_kept"]
        assert kept(backbone) == []


async def test_a_stage_whose_peers_are_all_lost_returns_from_what_a_backbone_kept(tmp_path: Path, run: RunFile) -> None:
    place = tmp_path / "peers"
    async with swarm(place) as s:
        (keeper,), stages = await started(s, run, backbones=1)
        await until(s, keeper, "kept", lambda: bool(kept(keeper)))
        stages[1].kill()
        await stages[1].gone.wait()
        fresh = await s.start("fresh", StageRole, pinned(run, 1))
        await until(s, fresh, "goes on", lambda: step_of(fresh) > 0)
        newest = {event["step"] for event in told([fresh], "checkpoint.fetched")}
        for peer in (stages[0], fresh):  # what a living one has saved may be of other steps
            await until(s, peer, "goes on", partial(lambda peer: step_of(peer) > max(newest) + 2, peer))
        assert {event["step"] for event in told([stages[0], fresh], "stage.restored")} <= newest


def told(peers: Iterable[Peer], name: str) -> list[dict[str, Any]]:
    return [event for peer in peers for event in peer.log.recent(500) if event["name"] == name]


async def kept_by(s: Swarm, run: RunFile, backbones: int) -> int:
    """A run of which all peers but backbones are lost; the newest step that all of those keep."""
    keepers, stages = await started(s, run, backbones)

    def common() -> set[int]:
        return set.intersection(*(set(kept(keeper)) for keeper in keepers))

    for keeper in keepers:
        await until(s, keeper, "all kept the same", lambda: bool(common()))
    for peer in (*stages, s.peers["trainer"]):
        peer.kill()
        await peer.gone.wait()
    return max(common())


@pytest.mark.thorough
async def test_a_fresh_peer_does_not_begin_at_the_start_when_nobody_can_give_what_is_kept(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ConfigError("the disk is broken")

    async with swarm(tmp_path / "peers") as s:
        await kept_by(s, run, backbones=1)
        monkeypatch.setattr(StageCheckpoints, "load", broken)
        run = trusting(run, s.peers["backbone0"])
        fresh = [await s.start(f"fresh{i}", StageRole, pinned(run, i)) for i in range(2)]
        await s.start("new trainer", TrainerRole, run)
        with trio.fail_after(60):
            while not told(fresh, "checkpoint.fetch_failed"):
                await s.peers["backbone0"].role._looked.wait()
        assert [step_of(peer) for peer in fresh] == [0, 0]
        assert "no position that every stage can reach" in str(fresh[0].role.status()["waits_for"])


@pytest.mark.thorough
async def test_a_backbone_that_gives_wrong_bytes_is_refused_and_named(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = StateServer._give_piece
    liars: list[StateServer] = []

    async def spoil(self: StateServer, call: Incoming[StatePiece]) -> Answer[Empty]:
        answer = await give(self, call)
        if self not in liars:
            return answer
        (frame,) = answer.frames
        spoilt = bytearray(frame.payload)
        spoilt[-1] ^= 1
        return Answer(Empty(), (replace(frame, payload=spoilt),))

    monkeypatch.setattr(StateServer, "_give_piece", spoil)
    async with swarm(tmp_path / "peers") as s:
        await kept_by(s, run, backbones=2)
        liar, honest = sorted((s.peers[f"backbone{i}"] for i in range(2)), key=lambda peer: peer.host.id)
        liar_name = liar.host.id.text  # the first is asked first
        liars.append(liar.role._keeping._giving)
        run = trusting(run, liar, honest)
        fresh = [await s.start(f"fresh{i}", StageRole, pinned(run, i)) for i in range(2)]
        await s.start("new trainer", TrainerRole, run)
        for peer in fresh:
            await until(s, peer, "goes on", partial(lambda peer: step_of(peer) > 0, peer))
        notes = [str(event["note"]) for event in told(fresh, "stage.download_noted")]
        assert [note for note in notes if f"donor {liar_name[-6:]} is not asked again" in note and "digest" in note]
        assert {event["step"] for event in told(fresh, "stage.restored")} <= set(kept(honest))


async def test_the_last_state_of_replicas_is_kept_before_they_end(tmp_path: Path, run: RunFile) -> None:
    run = changed(run, optimizer={"total_steps": 10}, pipeline={"stages": 1})
    async with swarm(tmp_path / "peers") as s:
        keeper = await s.start("backbone", BackboneRole, run)
        trainers = [await s.start(f"trainer{number}", TrainerRole, run) for number in range(2)]
        for trainer in trainers:
            await trainer.finished.wait()
        assert keeper.role.status()["kept_steps"][-1] == 10, "\n".join(events(s.peers.values()))
        told = [event["name"] for trainer in trainers for event in trainer.log.recent(500)]
        assert not [name for name in told if name.startswith("final.not")]


async def test_replicas_end_though_their_backbone_keeps_nothing(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointKeeper, "due", lambda self, *steps: False)
    run = changed(run, optimizer={"total_steps": 5}, pipeline={"stages": 1})
    async with swarm(tmp_path / "peers") as s:
        await s.start("backbone", BackboneRole, run)
        trainer = await s.start("trainer", TrainerRole, run)
        with trio.fail_after(400):
            await trainer.finished.wait()
        [event] = [event for event in trainer.log.recent(500) if event["name"] == "final.not_kept"]
        assert "it is in " in event["reason"]
