"""Stage peers keep a forward's graph for the backward while microbatches have room beside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kit.handscene import HandScene, in_scene

MICROBATCHES = 3


@pytest.mark.parametrize("roomy", [True, False])
def test_forward_is_computed_once_for_each_microbatch_where_there_is_room(tmp_path: Path, roomy: bool) -> None:
    passes, held = Counter[int](), Counter[int]()

    def count(scene: HandScene, name: str) -> None:
        post, stage = scene.peers[name].role.post, int(name[-1])
        original = post.served.module._compute

        def computed(x: object) -> object:
            passes[stage] += 1
            return original(x)

        post.served.module._compute = computed
        post.served.module._saved.bytes = 1 << 20  # as if one had been measured
        post.handover.room_bytes = 1 << 30 if roomy else 1 << 20

    async def main(scene: HandScene) -> None:
        await scene.join("trainer")
        for name in scene.peers:
            count(scene, name)
        pipeline = scene.pipeline("trainer")
        for number in range(MICROBATCHES):
            await pipeline.train(0, number, scene.load(number))
        for name in scene.peers:
            held[int(name[-1])] += len(scene.held(name))

    in_scene(tmp_path, main)
    assert held == dict.fromkeys(range(3), MICROBATCHES)
    each = MICROBATCHES if roomy else 2 * MICROBATCHES
    assert passes == {0: each, 1: each, 2: MICROBATCHES}
