"""Stage peers keep a forward's graph for the backward while microbatches have room beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakSet

import pytest
import trio

from peerd.model.stage.kept_graph import KeptGraph
from tests.worlds.roles.handscene import HandScene, in_scene

MICROBATCHES = 3


@pytest.mark.parametrize("roomy", [True, False])
@in_scene
async def test_forward_is_computed_once_for_each_microbatch_where_there_is_room(scene: HandScene, roomy: bool) -> None:
    passes, held = Counter[int](), Counter[int]()

    def count(name: str) -> None:
        post, stage = scene.peers[name].role.post, int(name[-1])
        original = post.served.module._compute

        def computed(x: object) -> object:
            passes[stage] += 1
            return original(x)

        post.served.module._compute = computed
        post.served.module._saved.bytes = 1 << 20  # as if one had been measured
        post.handover.room_bytes = 1 << 30 if roomy else 1 << 20

    await scene.join("trainer")
    for name in scene.peers:
        count(name)
    pipeline = scene.pipeline("trainer")
    for number in range(MICROBATCHES):
        await pipeline.train(0, number, scene.load(number))
    for name in scene.peers:
        held[int(name[-1])] += len(scene.held(name))
    assert held == dict.fromkeys(range(3), MICROBATCHES)
    each = MICROBATCHES if roomy else 2 * MICROBATCHES
    assert passes == {0: each, 1: each, 2: MICROBATCHES}


@pytest.mark.slow
@in_scene
async def test_graphs_of_microbatches_that_come_together_stay_within_their_room(scene: HandScene) -> None:
    """Each is counted before it is computed: else all that wait for the device would be kept."""
    most, graph_bytes, room_bytes = [0], [0], 400_000

    def watch(post: Any) -> None:
        post.handover.room_bytes = room_bytes
        module, kept = post.served.module, WeakSet[KeptGraph]()
        original = module.forward_for_backward

        def forward(x: object) -> KeptGraph:
            graph: KeptGraph = original(x)
            kept.add(graph)
            graph_bytes[0] = graph.bytes
            most[0] = max(most[0], sum(each.bytes for each in kept if not each.used))
            return graph

        module.forward_for_backward = forward

    await scene.join("trainer")
    watch(scene.peers["a0"].role.post)
    pipeline = scene.pipeline("trainer")
    async with trio.open_nursery() as nursery:
        for number in range(24):
            nursery.start_soon(pipeline.train, 0, number, scene.load(number))
    assert 24 * graph_bytes[0] > room_bytes > graph_bytes[0] > 0
    assert graph_bytes[0] < most[0] <= room_bytes // 2
