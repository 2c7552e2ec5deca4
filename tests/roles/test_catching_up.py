"""A joiner whose download takes longer than a step comes to where the swarm stands: one state, and the steps since."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.core.errors import Refused
from peerd.messages.encoding import Empty
from peerd.messages.state import StateManifest, StatePiece, StateRequest
from peerd.model.stage.footprint import spare_bytes
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile
from peerd.state.catchup import catch_up
from peerd.state.snapshot import StateServer
from roles.stage import StageRole
from tests.kit.amount import thorough
from tests.kit.runs import changed
from tests.worlds.roles.training import Peer, events, pinned, pipeline, reaches, small_run, swarm, until_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("autojump_clock")]
SPANNED = 8  # steps that the swarm makes while the state is on its way: more than the totals that anyone keeps


class SlowLine:
    """Donors' line for states, not for totals: a piece gets through when the swarm has made SPANNED steps meanwhile."""

    def __init__(self) -> None:
        self.frozen_at: list[int] = []  # the steps of the states that somebody began to fetch
        self.peers: list[Peer] = []

    async def pass_piece(self, giving: StateServer, call: Incoming[StatePiece]) -> None:
        frozen = [copy for offer in giving._offers.values() for copy in offer.frozen.copies.values()]
        for copy in frozen:
            if copy.manifest.root == call.body.root:
                step = copy.manifest.position.step
                self.frozen_at.append(step)
                for peer in self.peers:  # one step more: the last total may have yet to arrive at the joiner
                    while peer.role.position.step <= step + SPANNED:
                        await peer.role.moved()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> SlowLine:
    line = SlowLine()
    give = StateServer._give_piece

    async def slow(self: StateServer, call: Incoming[StatePiece]) -> Answer[Empty]:
        await line.pass_piece(self, call)
        return await give(self, call)

    monkeypatch.setattr(StateServer, "_give_piece", slow)
    # Room for six totals, fewer than SPANNED: with three, a newcomer on a busy machine may come too late for one.
    monkeypatch.setattr(catch_up, "spare_bytes", lambda run, *sizes: 2 * spare_bytes(run, *sizes))
    return line


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run(tmp_path, checkpoint={"every_steps": 1000})


def told(peer: Peer, name: str) -> list[dict[str, Any]]:
    return [event for event in peer.log.recent(500) if event["name"] == name]


@pytest.mark.parametrize(
    ("code", "delayed"), [thorough("none", False), ("int8", False), thorough("powersgd", False), thorough("none", True)]
)
async def test_a_download_that_spans_many_steps_is_not_begun_anew(
    tmp_path: Path, run: RunFile, line: SlowLine, code: Any, delayed: bool
) -> None:
    run = changed(run, averaging={"code": code}, optimizer={"delayed": delayed})
    async with swarm(tmp_path / "peers") as s:
        peers, _ = await pipeline(s, run, 4)
        line.peers = [peers[0], peers[2]]
        await reaches(s, peers[0], 6)  # too far for the totals alone
        new = await s.start("new", StageRole, pinned(run, 0))
        with trio.fail_after(60):
            while not told(new, "stage.caught_up"):
                await new.role.moved()
        await until_equal(s, new, peers[0], new.role.position.step)
        assert len(told(new, "stage.downloaded")) == 1, events([new])
        assert len(set(line.frozen_at)) == 1
        (downloaded,) = told(new, "stage.downloaded")
        assert sum(event["steps"] for event in told(new, "stage.caught_up")) >= SPANNED
        assert told(new, "stage.caught_up")[0]["step"] >= downloaded["step"] + SPANNED
        assert told(new, "stage.trail_broken") == []


async def test_a_member_that_is_a_step_late_needs_no_state(tmp_path: Path, run: RunFile, line: SlowLine) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, _ = await pipeline(s, run, 4)
        late = peers[2]
        while late.role.post is None:
            await late.role.moved()
        step_to = late.role.post.orders._step_to

        async def miss(_: object) -> None:
            late.role.post.orders._step_to = step_to
            raise Refused("not this once")

        await reaches(s, late, 2)
        late.role.post.orders._step_to = miss
        with trio.fail_after(60):
            while not told(late, "stage.caught_up"):
                await late.role.moved()
        await until_equal(s, late, peers[0], late.role.position.step)
        assert told(late, "stage.downloaded") == []
        assert line.frozen_at == []


async def test_a_download_that_fails_again_and_again_writes_one_line_and_says_why_it_waits(
    tmp_path: Path, run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    give, asked, refuses = StateServer._give_manifest, list[float](), False

    async def refuse(self: StateServer, call: Incoming[StateRequest]) -> Answer[StateManifest]:
        if not refuses:
            return await give(self, call)
        asked.append(trio.current_time())
        raise Refused("its copy is being made")

    monkeypatch.setattr(StateServer, "_give_manifest", refuse)
    async with swarm(tmp_path / "peers") as s:
        peers, (trainer,) = await pipeline(s, run, 4)
        await reaches(s, peers[0], 3)
        trainer.kill()
        refuses = True
        new = await s.start("new", StageRole, pinned(run, 0))
        await trio.sleep(95)
        failed = told(new, "stage.download_failed")
        assert len(failed) == 1, f"{len(failed)} lines"
        assert "its copy is being made" in str(failed[0]["reason"])
        pauses = [later - earlier for earlier, later in pairwise(asked) if later - earlier > 0.4]
        assert 4 <= len(pauses) <= 20, pauses
        assert max(pauses) > 8 * min(pauses)
        waits_for = new.role.status()["waits_for"]
        assert "the state of step" in waits_for
        assert "attempts failed, the last one:" in waits_for
        assert "its copy is being made" in waits_for
        refuses = False
        await until_equal(s, new, peers[0], 2)
        await trio.sleep(3)  # for the conductor's answer
        assert new.role.post.catching_up.waits_for is None
        assert told(new, "stage.download_recovered")[0]["failures"] > 4
