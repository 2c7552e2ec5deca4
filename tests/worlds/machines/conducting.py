"""Messages of members and trainers to a conductor, for tests of what it makes of them."""

from __future__ import annotations

from collections.abc import Iterable

from peerd.messages.swarm import Done, Mb, Position
from peerd.swarm.events import MemberHello, SendPrepare, TrainerReport
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor


def hello(peer: str, position: Position = START, *, stage: int = 0, **more: object) -> MemberHello:
    """A member that holds nothing; `more`: fields that say otherwise."""
    none = frozenset[Mb]()
    fields: dict[str, object] = {"prepared": None, "saved": (), "held": none, "counted": none, "addrs": (), **more}
    return MemberHello(peer, stage, 1, position, **fields)  # type: ignore[arg-type]


def first_order(conductor: Conductor, members: Iterable[str], holder: str) -> list[SendPrepare]:
    """Members of one stage come, one microbatch makes a batch, `holder` has it: what they are told to average."""
    for peer in members:
        conductor.handle(0.0, hello(peer))
    conductor.wake(2.0)
    conductor.handle(2.0, TrainerReport("t", 0, (1,), ()))
    out = conductor.handle(2.0, TrainerReport("t", 0, (), (Done(1, [holder]),)))
    return [order for order in out if isinstance(order, SendPrepare)]
