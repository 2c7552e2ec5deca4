"""A trainer as relay: for hops of attempts that are under way, from and to peers that serve, one call at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from peerd.core.errors import Overloaded, PeerdError, ProtocolViolation, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.messages.handover import PassAnswer, PassRequest, RelayRequest, Ticket
from peerd.pipeline.next_stage import PASS
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.pipeline.trainer_relay import TrainerRelay
from peerd.rpc.rpc import Answer, Incoming
from tests.worlds.machines.handing import GRADIENT, MARK, OWN, RUN, SAMPLES, TOKENS, WIDTH, Peers, frame, peer, ticket

TICKET = ticket(0, 2, 0, "a0", "a1", "a2")
INPUT = frame(SAMPLES, TOKENS, WIDTH)
SERVES = {(peer(name), int(name[-1])) for name in ("a0", "b0", "a1", "b1", "a2")}


class Relayed:
    """A trainer that relays, as its hops call it."""

    def __init__(self) -> None:
        self.peers = Peers()
        self.relaying = TrainerRelay(self.peers, SERVES, MicrobatchShapes(RUN))  # type: ignore[arg-type]

    def objection(self, caller: str = "a0", to: str = "a1", stage: int = 1, shown: Ticket = TICKET) -> str:
        body = RelayRequest(peer(to), PassRequest(MARK, stage, OWN, shown, None))
        found: PeerdError | None = self.relaying._objection(PeerId.parse(peer(caller)), body)
        return "" if found is None else str(found)

    async def call(self, stage: int = 1, to: str = "a1", within_s: float = 50.0) -> Answer[Any]:
        body = RelayRequest(peer(to), PassRequest(MARK, stage, OWN, TICKET, None))
        deadline = trio.current_time() + within_s
        return await self.relaying._relay(Incoming(PeerId.parse(peer("a0")), body, (INPUT,), deadline))


async def test_a_hop_of_an_attempt_under_way_is_carried(autojump_clock: MockClock) -> None:
    one = Relayed()
    with one.relaying.open(TICKET):
        assert one.objection() == ""
        answer = await one.call()
    (asked,) = one.peers.asked
    assert (asked.name, asked.method, asked.body.stage, list(asked.frames)) == ("a1", PASS, 1, [INPUT])
    assert asked.timeout_s <= 50.0
    assert isinstance(answer.body, PassAnswer)
    assert answer.frames == (GRADIENT,)
    assert (one.relaying.relayed, one.relaying.relayed_bytes) == (1, 2 * len(INPUT.payload))


def test_only_what_is_under_way_is_carried_and_only_between_peers_of_stages_that_follow_each_other() -> None:
    one = Relayed()
    assert "no such attempt" in one.objection()
    with one.relaying.open(TICKET):
        assert one.objection() == ""
        assert one.objection("b0", "b1") == ""  # mates of those that the ticket names
        assert "no such attempt" in one.objection(shown=msgspec.structs.replace(TICKET, seq=6))
        assert "no such attempt" in one.objection(shown=msgspec.structs.replace(TICKET, signature=b""))
        assert "no such attempt" in one.objection(shown=ticket(0, 2, 0, "a0", "a1", "a2", attempt=1))
        assert "you are not known to serve stage 0" in one.objection("stranger")
        assert "you are not known to serve stage 0" in one.objection("a1")
        assert "you are not known to serve stage 1" in one.objection("a0", stage=2)
        assert "that peer is not known to serve stage 1" in one.objection(to="stranger")
        assert "that peer is not known to serve stage 1" in one.objection(to="a2")
        assert "you are not known to serve stage -1" in one.objection(stage=0)
    assert "no such attempt" in one.objection()


async def test_a_hop_that_floods_has_one_call_carried_at_a_time(autojump_clock: MockClock) -> None:
    one = Relayed()
    one.peers.doing["a1"] = lambda asked: 20.0
    with one.relaying.open(TICKET):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.call)
            await wait_all_tasks_blocked()
            assert "a call of this hop is being relayed already" in one.objection()
            for _ in range(100):  # that were let in before its frames had come
                with pytest.raises(Overloaded):
                    await one.call()
            assert one.objection("a1", "a2", stage=2) == ""  # another hop's
        assert one.peers.names == ["a1"]
        assert one.objection() == ""


@pytest.mark.parametrize("error", [Unreachable("no way"), ProtocolViolation("junk"), Overloaded("full", 1.0)])
async def test_what_goes_wrong_is_told_and_the_next_call_carried(autojump_clock: MockClock, error: RemoteError) -> None:
    one = Relayed()
    one.peers.doing["a1"] = lambda asked: error
    with one.relaying.open(TICKET):
        with pytest.raises(type(error)):
            await one.call()
        del one.peers.doing["a1"]
        assert (await one.call()).frames == (GRADIENT,)


async def test_a_peer_that_never_answers_is_asked_for_as_long_as_the_hop_waits(autojump_clock: MockClock) -> None:
    one, since = Relayed(), trio.current_time()
    one.peers.doing["a1"] = lambda asked: 1e9
    with pytest.raises(RemoteError):
        await one.call(within_s=7.0)
    assert trio.current_time() - since == pytest.approx(7.0)
