"""Stage peers in place of an Rpc, for tests of hand-over: each answers as it is told to, with receipts of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.handover import Hop, PassAnswer, PassRequest, RelayRequest, Ticket
from peerd.messages.proof import receipt, signed_ticket
from peerd.messages.swarm import Mb, MemberInfo
from peerd.rpc.rpc import Answer
from peerd.run.runfile import ModelSection, PipelineSection, RunFile, fingerprint

STAGES, STEP, SEQ, SAMPLES, TOKENS, WIDTH = 3, 7, 5, 2, 4, 3
RUN = RunFile(
    run="handing",
    model=ModelSection(d_model=WIDTH, heads=1, layers=STAGES, context=TOKENS),
    pipeline=PipelineSection(stages=STAGES, microbatch=SAMPLES),
)
MARK = fingerprint(RUN)


def key(name: str) -> Keypair:
    return Keypair.from_seed(name.encode().ljust(32, b"."))


TRAINER = key("trainer")
OWN = TRAINER.peer_id.text
NAMES = {key(name).peer_id.text: name for name in ("trainer", "stranger", *(f"{c}{s}" for c in "abcd" for s in "012"))}


def peer(name: str) -> str:
    """The peer id of `a1`: the first peer of stage 1."""
    return key(name).peer_id.text


def members(*names: str) -> list[MemberInfo]:
    return [MemberInfo(peer(name), int(name[-1]), [], True, since=1.0) for name in names]


def hop(name: str, body: PassRequest, **changes: Any) -> Hop:
    """What the peer says of its part, with its receipt."""
    mb = Mb(body.trainer, body.ticket.seq)
    signed = receipt(key(name).sign, body.run, 3, int(name[-1]), body.ticket.step, mb)
    return msgspec.structs.replace(Hop(peer(name), signed), **changes)


def frame(*shape: int, dtype: str = "float32") -> TensorFrame:
    return TensorFrame(dtype, shape, memoryview(np.zeros(shape, dtype)).cast("B"))


GRADIENT = frame(SAMPLES, TOKENS, WIDTH)


def ticket(low: int, high: int, first: int, *route: str, attempt: int = 0) -> Ticket:
    bare = Ticket(STEP, SEQ, attempt, low, high, first, list(map(peer, route)))
    return signed_ticket(TRAINER.sign, MARK, OWN, bare)


class Ways:
    """All peers are linked but those `without` a link. `silent_since`: those that say nothing any more.

    Notes whose answers are overdue.
    """

    def __init__(self) -> None:
        self.without: set[str] = set()
        self.doubted: set[str] = set()
        self.silent_since: dict[str, float] = {}

    def linked(self, peer: PeerId) -> bool:
        return NAMES[peer.text] not in self.without

    def doubt(self, peer: PeerId) -> float:
        name = NAMES[peer.text]
        self.doubted.add(name)
        return trio.current_time() - self.silent_since.get(name, trio.current_time())

    async def probe(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        if NAMES[peer.text] in self.silent_since.keys() | self.without:
            raise Unreachable("it does not answer", peer)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: who was asked, by which method, for what."""

    name: str
    method: str
    body: Any
    frames: Sequence[TensorFrame]
    timeout_s: float


Doing = Callable[[Asked], "Answer[PassAnswer] | RemoteError | float"]


class Peers:
    """In place of an Rpc. `doing`: by name, what a peer answers or raises, or for how many seconds it says nothing."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.doing: dict[str, Doing] = {}

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.asked]

    def arrival_rate(self, peer: PeerId) -> None: ...

    async def call(self, peer: PeerId, method: str, body: Any, *_: Any, **more: Any) -> Answer[PassAnswer]:
        await trio.lowlevel.checkpoint()
        asked = Asked(NAMES[peer.text], method, body, more["frames"], more["timeout_s"])
        self.asked.append(asked)
        given = self.doing.get(asked.name, done)(asked)
        if isinstance(given, float):
            await trio.sleep(min(given, asked.timeout_s))
            given = done(asked) if given < asked.timeout_s else TooSlow("the deadline passed")
        if isinstance(given, RemoteError):
            given.blame(peer)
            raise given
        return given


def passed_of(asked: Asked) -> PassRequest:
    """The microbatch that is handed over, also where it is to be carried."""
    body = asked.body
    found = body.passed if isinstance(body, RelayRequest) else body
    assert isinstance(found, PassRequest)
    return found


def done(asked: Asked, *hops: Hop, **changes: Any) -> Answer[PassAnswer]:
    """What an honest peer answers, and those after it that the ticket names; `hops`: in place of the first ones."""
    body = passed_of(asked)
    stage, shown = body.stage, body.ticket
    names = [NAMES[shown.peer_of(at) or ""] for at in range(max(stage, shown.low), shown.high + 1)]
    if names and stage >= shown.low and not isinstance(asked.body, RelayRequest):
        names[0] = asked.name
    told = [*hops, *(hop(name, body) for name in names[len(hops) :])]
    gradient = (GRADIENT,) if shown.is_done_at(stage - 1) else ()
    return Answer(msgspec.structs.replace(PassAnswer(told, 0.5), **changes), gradient)
