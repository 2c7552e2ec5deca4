"""The room for microbatches that a stage peer keeps follows the memory that is free, from step to step."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.run.runfile import RunFile
from tests.worlds.roles.training import pipeline, reaches, swarm


@pytest.mark.slow
@pytest.mark.usefixtures("autojump_clock")
async def test_each_step_begins_with_the_room_that_is_free_then(tmp_path: Path, run: RunFile) -> None:
    async with swarm(tmp_path / "peers") as s:
        peers, _ = await pipeline(s, run, 2)
        await reaches(s, peers[0], 1)
        handover, seen = peers[0].role.post.handover, list[tuple[int, int]]()

        def room(kept_bytes: int) -> int:
            seen.append((handover._place.step, kept_bytes))
            return (1 << 30) + len(seen)

        begun = peers[0].role.position.step
        handover.room_for = room
        await reaches(s, peers[0], begun + 3)
        assert [step for step, _ in seen[:3]] == [begun + 1, begun + 2, begun + 3]
        assert handover.status()["room_bytes"] == (1 << 30) + len(seen)
        assert {kept for _, kept in seen} == {0}  # what a step has counted is not kept any more
