"""The store of a peer's evidence: a disk that hangs, and proofs that nobody could check."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from peerd.messages.swarm import Position
from peerd.run.runfile import RunFile
from peerd.state.checkpoints.evidence_store import EvidenceStore
from peerd.swarm.positions.evidence import Evidence
from tests.worlds.simulation.clock import SimClock

POSITION = Position(8, b"kept")


def store(asked: list[Position], established: set[str], hangs: bool = False) -> EvidenceStore:
    async def run(job: Any, name: str) -> None:
        if hangs:
            await trio.sleep_forever()

    async def learn(peer: object, position: Position) -> bool:
        asked.append(position)
        return False

    ctx = SimpleNamespace(
        run=RunFile(run="r"),
        worker=lambda name: SimpleNamespace(run=run),
        clock=SimClock(1, "own"),
        data_dir=Path("nowhere"),
        log=SimpleNamespace(event=lambda *_, **__: None),
    )
    proofs = SimpleNamespace(evidence=Evidence(), learn=learn, established=lambda: frozenset(established))
    services = SimpleNamespace(proofs=proofs, following=SimpleNamespace(conductor="conductor"), directory=None)
    return EvidenceStore(cast(Any, ctx), cast(Any, services), lambda: [POSITION])


async def test_a_disk_that_hangs_keeps_no_peer_from_ending(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    with trio.move_on_after(1.0):
        await store([], {"member"}, hangs=True).run()
    assert trio.current_time() - began < 10.0


async def test_a_peer_that_knows_no_member_asks_for_no_proof(autojump_clock: trio.testing.MockClock) -> None:
    asked: list[Position] = []
    for established in (set[str](), {"member"}):
        with trio.move_on_after(1.0):
            await store(asked, established).run()
        assert bool(asked) == bool(established)
