"""Members that fetch what backbones keep: whom they believe where these contradict each other, and what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio.testing

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.swarm import Position
from peerd.state.checkpoints.checkpoint_recovery import CheckpointRecovery
from peerd.state.quorum import Claim, StateQuorum

NEW, OLD = Position(7, b"a" * 16), Position(5, b"b" * 16)


def disagreement() -> str:
    """The poll's verdict on two keepers, each with a state of its own."""
    claims = {"12D3KooWaaaaaa": Claim(NEW, b"1" * 32), "12D3KooWbbbbbb": Claim(NEW, b"2" * 32)}
    verdict = StateQuorum(0.0).decide(0.0, claims, 0)
    assert verdict.hopeless
    return verdict.why


def recalling(asked: list[Position], saved: list[Position]) -> CheckpointRecovery:
    """Two backbones keep two positions and agree on the older one only."""

    async def nothing(*_: object, **__: object) -> Any:
        return None

    async def fetch(keepers: Any, request: Any, *_: object) -> Any:
        asked.append(request.of)
        if request.of == NEW:
            raise Unreachable(disagreement())
        return None, None, None

    async def save(position: Position, *_: object, hold: bool) -> None:
        saved.append(position)

    ctx = SimpleNamespace(
        host=SimpleNamespace(id=SimpleNamespace(text="own")),
        log=SimpleNamespace(event=lambda *_, **__: None),
        data_dir=None,
        worker=lambda _: SimpleNamespace(run=nothing),
    )
    directory = SimpleNamespace(refresh=nothing, kept={"x": [OLD, NEW]}, keepers=lambda position: ["x", "y"])
    training = SimpleNamespace(
        kept_fetcher=lambda: SimpleNamespace(fetch=fetch),
        directory=directory,
        fingerprint=bytes(32),
        proofs=SimpleNamespace(counts=lambda position, keepers: True),
    )
    model = SimpleNamespace(outline=None)
    joiner, reports = SimpleNamespace(work=nothing, model=model), SimpleNamespace(members=[], tell=lambda: None)
    return CheckpointRecovery(ctx, training, SimpleNamespace(positions=[], save=save), joiner, reports)  # type: ignore[arg-type]


async def test_where_two_keepers_contradict_each_other_the_older_position_is_taken_and_the_reason_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    asked: list[Position] = []
    saved: list[Position] = []
    mine = recalling(asked, saved)
    mine.swarm_is_lost(True)
    assert not await mine._recall(NEW, 0)
    assert mine.problem is not None
    reason = "the checkpoint of step 7 could not be fetched: no 2 donors agree"
    for part in (reason, "aaaaaa at step 7", "bbbbbb at step 7"):
        assert part in mine.problem
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mine.run, 0)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert (asked, saved) == ([NEW, OLD], [OLD])
    assert mine.problem is None


async def test_the_reason_is_forgotten_when_the_swarm_has_a_way_on(autojump_clock: trio.testing.MockClock) -> None:
    mine = recalling([], [])
    mine.swarm_is_lost(True)
    await mine._recall(NEW, 0)
    mine.swarm_is_lost(False)
    assert mine.problem is None


def test_of_three_keepers_the_two_that_agree_are_believed() -> None:
    claims = {"a": Claim(NEW, b"9" * 32), "b": Claim(NEW, b"1" * 32), "c": Claim(NEW, b"1" * 32)}
    camp = StateQuorum(0.0).decide(0.0, claims, 0).camp
    assert camp is not None
    assert camp.donors == ("b", "c")


async def test_silent_keepers_with_newer_positions_leave_an_honest_one_a_turn_to_show_its_proof(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Strangers announce many positions of their own, and can be reached by nobody."""
    honest, strangers = Keypair.from_seed(bytes(32)).peer_id, [Keypair.from_seed(bytes([n]) * 32) for n in range(1, 41)]
    asked: list[Position] = []
    saved: list[Position] = []
    proven = set[Position]()
    mine = recalling(asked, saved)

    async def connect(peer: PeerId) -> None:
        if peer != honest:
            await trio.sleep(5.0)
            raise Unreachable("nobody there")

    async def learn(peer: PeerId, position: Position) -> bool:
        if peer == honest and position == OLD:
            proven.add(position)
        else:
            await trio.sleep(5.0)
        return position in proven

    made_up = {
        key.peer_id: [Position(100 * n + k, b"made up") for k in range(32)] for n, key in enumerate(strangers, 1)
    }
    mine._services.directory.kept = {honest: [OLD], **made_up}
    mine._services.proofs = SimpleNamespace(counts=lambda position, keepers: position in proven, learn=learn)  # type: ignore[assignment]
    mine._ctx.host.connect = connect  # type: ignore[method-assign]
    mine.swarm_is_lost(True)
    with trio.move_on_after(60.0):
        await mine.run(0)
    assert saved == [OLD]
    assert len(mine._asked) <= 1024
