"""Attacks at a run: claims without evidence, work that nobody admitted, records and addresses to lead others astray."""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable

import msgspec
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.messages.encoding import Message
from peerd.messages.handover import PassAnswer, PassRequest, Ticket
from peerd.messages.progress import StageProgress, encode_progress, stage_key
from peerd.messages.proof import signed_ticket
from peerd.messages.state import StateManifest, StateRequest
from peerd.messages.swarm import (
    Commit,
    Conducts,
    Done,
    Grant,
    LineInfo,
    Mb,
    Mbs,
    MemberAnswer,
    MemberSync,
    Moved,
    Position,
    Prepare,
    Prepared,
    Seqs,
    StageAnswer,
    StageForward,
    StageLoss,
    TrainerAnswer,
    TrainerSync,
    WhoConducts,
)
from peerd.pipeline.next_stage import PASS
from peerd.role.peer_stack import PeerStack
from peerd.rpc.rpc import Answer, Incoming
from scripts.hostile.field import FAR, Field, each
from tests.kit.declared import ANY

_MOST = (1 << 53) - 1
_START = Position(0, b"")


def hello(there: Field, session: int, stage: int, position: Position, **other: object) -> MemberSync:
    """A member's first report, in which it says where it stands."""
    told = MemberSync(
        run=there.fingerprint,
        session=session,
        stage=stage,
        position=position,
        prepared=None,
        saved=[],
        held=Mbs(),
        counted=Mbs(),
        addrs=[f"/ip4/{there.address}/tcp/9"],
        since=1.0,
        term=0,
        seen=0,
        wait_s=0.0,
    )
    return msgspec.structs.replace(told, **other)


def wishes(there: Field, **other: object) -> TrainerSync:
    """A trainer's report."""
    told = TrainerSync(run=there.fingerprint, term=0, step=0, open=Seqs(), done=[], seen=0, seen_members=0, wait_s=0.0)
    return msgspec.structs.replace(told, **other)


async def tell_all(there: Field, peer: PeerStack, method: str, body: Message, reply: type[msgspec.Struct]) -> None:
    """One call to every honest peer; most refuse."""
    await each([lambda to=to: peer.rpc.call(to, method, body, reply, timeout_s=4.0) for to in there.peers()])


async def announce(there: Field, peer: PeerStack, stage: int, step: int, since: float = 1.0, addrs: int = 1) -> None:
    """A record of a stage peer that serves since long ago."""
    at = [f"/ip4/10.1.2.{number + 1}/tcp/6379" for number in range(addrs)]
    told = StageProgress(stage, since, step, 0, 1e9, "cpu", "", "", at)
    await peer.dht.put(stage_key(there.run.run, stage), encode_progress(told), ttl_s=60.0, timeout_s=5.0)


async def c3_a_term(there: Field) -> None:
    """Reports of the highest term there is, and a stage 0 peer that says it conducts in it."""
    async with there.peer(listen=True) as peer:

        async def conducts(_: Incoming[WhoConducts]) -> Answer[Conducts]:
            return Answer(Conducts(_MOST))

        peer.rpc.serve("swarm/6/who", WhoConducts, conducts, declared=ANY)
        await announce(there, peer, 0, 10)
        for term in (_MOST, _MOST - 1, there.rng.randint(2, 10_000), 1 << 40):
            await tell_all(there, peer, "swarm/6/trainer", wishes(there, term=term), TrainerAnswer)
            report = hello(there, 7, 0, _START, term=term)
            await tell_all(there, peer, "swarm/6/member", report, MemberAnswer)
        await trio.sleep(there.rng.uniform(1, 4))


async def c4_a_position(there: Field) -> None:
    """Hellos from far ahead, again and again under new sessions, and records that say the same."""
    async with there.peer() as peer:
        for session in range(there.rng.randint(4, 12)):
            stage = there.rng.randrange(there.run.pipeline.stages)
            far = there.rng.choice([FAR, Position(_MOST, b"x" * 16), Position(there.rng.randint(1, 5000), b"near.now")])
            report = hello(there, session, stage, far, saved=[far], prepared=far)
            await tell_all(there, peer, "swarm/6/member", report, MemberAnswer)
            await announce(there, peer, stage, there.rng.choice([10**9, _MOST]))
            await trio.sleep(0.3)


async def h1_accuses(there: Field) -> None:
    """A member that stands where it is told to, computes nothing, and accuses others when it shall average."""
    async with there.peer(listen=True) as peer:
        stage, at = there.rng.randrange(there.run.pipeline.stages), _START

        async def prepare(call: Incoming[Prepare]) -> Answer[Prepared]:
            there.done("h1 was asked to average")
            others = [name for name in call.body.group if name != peer.host.id.text]
            made_up = [Mb(there.rng.choice([peer.host.id.text, *others]), there.rng.getrandbits(60)) for _ in range(5)]
            return Answer(Prepared(False, Mbs.of(there.rng.choice([[], made_up])), there.rng.choice([[], others])))

        async def move(_: Incoming[Commit]) -> Answer[Moved]:
            return Answer(Moved(at))

        peer.rpc.serve("stage/6/prepare", Prepare, prepare, declared=ANY)
        peer.rpc.serve("stage/6/commit", Commit, move, declared=ANY)
        addrs = [str(addr) for addr in peer.host.addrs()]
        with trio.move_on_after(there.rng.uniform(6, 12)):
            while True:
                for to in there.peers():
                    report = hello(there, 3, stage, at, addrs=addrs, since=peer.clock.wall())
                    with trio.move_on_after(2.0):
                        try:
                            found = await peer.rpc.call(to, "swarm/6/member", report, MemberAnswer, timeout_s=2.0)
                            at = found.body.current or at
                        except RemoteError:
                            continue
                await trio.sleep(0.2)


async def h1_helper_accuses(there: Field) -> None:
    """A helper with a very good line that accuses everybody."""
    async with there.peer(listen=True) as peer:
        stage = there.rng.randrange(there.run.pipeline.stages)

        async def prepare(call: Incoming[Prepare]) -> Answer[Prepared]:
            there.done("h1 helper was asked to sum")
            return Answer(Prepared(False, Mbs(), [*call.body.group, *there_names(there)]))

        peer.rpc.serve("stage/6/prepare", Prepare, prepare, declared=ANY)
        line = LineInfo("aux", 1e9, 1e9)
        addrs = [str(addr) for addr in peer.host.addrs()]
        report = hello(there, 5, stage, _START, line=line, addrs=addrs, held=None)
        for _ in range(8):
            await tell_all(there, peer, "swarm/6/member", report, MemberAnswer)
            await trio.sleep(0.5)


async def h1_wishes(there: Field) -> None:
    """A trainer that takes every place it can get in the batch, and does nothing."""
    async with there.peer() as peer:
        step = 0
        with trio.move_on_after(there.rng.uniform(6, 15)):
            while True:
                for to in there.peers():
                    report = wishes(there, step=step, open=Seqs.of(range(64)))
                    try:
                        found = await peer.rpc.call(to, "swarm/6/trainer", report, TrainerAnswer, timeout_s=2.0)
                    except RemoteError:
                        continue
                    step = found.body.step
                    there.done("h1 was given places") if list(found.body.admitted) else None
                await trio.sleep(0.1)


async def h1_credits(there: Field) -> None:
    """A trainer that says at once that all is done, and held by peers that have nothing of it."""
    async with there.peer() as peer:
        step, admitted = 0, list[int]()
        with trio.move_on_after(there.rng.uniform(6, 12)):
            while True:
                holders = [there.rng.choice(there_names(there)) for _ in range(there.run.pipeline.stages)]
                done = [Done(seq, holders) for seq in admitted]
                report = wishes(there, step=step, open=Seqs.of(range(16)), done=done)
                for to in there.peers():
                    try:
                        found = await peer.rpc.call(to, "swarm/6/trainer", report, TrainerAnswer, timeout_s=2.0)
                    except RemoteError:
                        continue
                    step, admitted = found.body.step, list(found.body.admitted)
                    there.done("h1 credited") if done else None
                await trio.sleep(0.1)


async def h2_unadmitted_work(there: Field) -> None:
    """Microbatches that nobody admitted, by tickets of its own: with values that are huge, larger still, not finite."""
    async with there.peer() as peer:
        where = await there.positions(peer.dht)
        for _ in range(12):
            for to, (stage, step, _) in where.items():
                frames = work(there, stage, there.rng.choice([1e12, 1e36, math.inf, math.nan, 1e-3]))
                for ahead in (0, 1):
                    body = ticketed(there, peer, to, stage, step + ahead, there.rng.getrandbits(60), None)
                    try:
                        await peer.rpc.call(to, PASS, body, PassAnswer, frames=frames, timeout_s=3.0)
                        there.done("h2 WAS TAKEN")
                    except RemoteError:
                        there.done("h2 refused")
            where = await there.positions(peer.dht)


def ticketed(
    there: Field, peer: PeerStack, to: PeerId, stage: int, step: int, seq: int, shown: Grant | None
) -> PassRequest:
    """A call for a microbatch of this peer at a stage, whose route names the called peer at every stage."""
    own, last = peer.host.id.text, there.run.pipeline.stages - 1
    bare = Ticket(step, seq, 0, 0, last, 0, [to.text] * (last + 1))
    return PassRequest(
        there.fingerprint, stage, own, signed_ticket(peer.host.sign, there.fingerprint, own, bare), shown
    )


def work(there: Field, stage: int, value: float) -> list[TensorFrame]:
    """The frames of a microbatch at a stage: tokens, or inputs of that value; and targets."""
    model, rows = there.run.model, there.run.pipeline.microbatch
    tokens = TensorFrame("uint8", (rows, model.context), bytes(rows * model.context))
    count = rows * model.context * model.d_model
    packed = struct.pack("<d" if model.dtype == "float64" else "<f", value) * count
    values = TensorFrame(model.dtype, (rows, model.context, model.d_model), packed)
    return [tokens if stage == 0 else values, tokens]


async def h6_fill_keys(there: Field) -> None:
    """Records of the largest size under the keys that a run lives by."""
    async with there.peer() as peer:
        for suffix in range(70):
            for stage in range(there.run.pipeline.stages):
                try:
                    key = stage_key(there.run.run, stage)
                    name = suffix.to_bytes(2, "big")
                    await peer.dht.put(key, bytes(16_000), ttl_s=600, suffix=name, timeout_s=3.0)
                    there.done("h6 put")
                except RemoteError:
                    there.done("h6 refused")


async def h7_clocks(there: Field) -> None:
    """Six identities at one address whose clocks are off together."""
    off_s = there.rng.choice([1e12, -1e12, 86_400.0 * 400, -3600.0])

    async def one() -> None:
        async with there.peer(clock_off_s=off_s):
            await trio.sleep(there.rng.uniform(3, 6))

    await each([one] * 6)


async def h8_addresses(there: Field) -> None:
    """A stage peer, under many names, that says it is where others are: databases, metadata services, routers."""
    lures = ("/ip4/127.0.0.1/tcp/6379", "/ip4/169.254.169.254/tcp/80", "/ip4/192.168.1.1/tcp/80", "/dns4/a.test/tcp/80")

    async def one() -> None:
        async with there.peer() as peer:
            report = hello(there, 1, 0, _START, addrs=[there.rng.choice(lures) for _ in range(16)])
            await tell_all(there, peer, "swarm/6/member", report, MemberAnswer)
            await announce(there, peer, 0, 5, addrs=16)
            await trio.sleep(2)

    await each([one] * 4)


async def m3_unreachable_peers(there: Field) -> None:
    """Records of stage 0 peers that do not exist, all of them first in order."""

    async def one() -> None:
        async with there.peer() as peer:
            await announce(there, peer, 0, 5, since=there.rng.uniform(0, 10), addrs=8)

    for _ in range(5):
        await each([one] * 4)


async def m5_hold_copies(there: Field) -> None:
    """Ask every stage peer for its state, again and again, and fetch nothing."""
    async with there.peer() as peer:
        where = await there.positions(peer.dht)
        with trio.move_on_after(there.rng.uniform(5, 10)):
            while True:
                await each([ask_state(there, peer, to, stage) for to, (stage, _, _) in where.items()])
                await trio.sleep(1.0)


def ask_state(there: Field, peer: PeerStack, to: PeerId, stage: int) -> Callable[[], Awaitable[object]]:
    """A call for what a newcomer asks first."""
    body = StateRequest(there.fingerprint, stage)
    return lambda: peer.rpc.call(to, "state/1/manifest", body, StateManifest, timeout_s=4.0)


async def granted(there: Field, peer: PeerStack) -> tuple[int, Grant | None, Grant | None]:
    """A step, the grant of a trainer that wishes for microbatches in it, and the grant to evaluate, if it gets one."""
    report = wishes(there, open=Seqs.of(range(64)))
    for to in there.peers():
        try:
            found = await peer.rpc.call(to, "swarm/6/trainer", report, TrainerAnswer, timeout_s=2.0)
        except RemoteError:
            continue
        return found.body.step, found.body.grant, found.body.evaluate
    return 0, None, None


async def f1_many_rows(there: Field) -> None:
    """Calls of 384 KB that would compute thousands of samples, or one very long one, with whatever grants there are."""
    async with there.peer() as peer:
        where, (step, shown, evaluation) = await there.positions(peer.dht), await granted(there, peer)
        seq = next(iter(shown.seqs), 0) if shown is not None else 0
        for to, (stage, _, _) in where.items():
            for shape in ((6000, 64), (1, 384_000), (384_000, 1)):
                frame = TensorFrame("uint8", shape, bytes(384_000))
                calls: list[tuple[str, Message, type[Message], int]] = [
                    ("stage/6/forward", StageForward(there.fingerprint, stage, grant=evaluation), StageAnswer, 1),
                    ("stage/6/loss", StageLoss(there.fingerprint, stage, evaluation), StageAnswer, 2),
                    (PASS, ticketed(there, peer, to, stage, step, seq, shown), PassAnswer, 2),
                ]
                for method, body, answer, count in calls:
                    try:
                        await peer.rpc.call(to, method, body, answer, frames=[frame] * count, timeout_s=5.0)
                        there.done("f1 WAS TAKEN")
                    except RemoteError:
                        there.done("f1 refused")


async def f1_floods(there: Field) -> None:
    """Eight identities with 64 endless calls each: microbatches and evaluations, with whatever grants there are."""

    async def one() -> None:
        async with there.peer() as peer:
            where, (step, shown, evaluation) = await there.positions(peer.dht), await granted(there, peer)
            seqs = list(shown.seqs) if shown is not None else [0]

            async def flood(to: PeerId, stage: int, number: int) -> None:
                frames, seq = work(there, stage, 0.1), seqs[number % len(seqs)]
                passed = ticketed(there, peer, to, stage, step, seq, shown)
                forward = StageForward(there.fingerprint, stage, grant=evaluation)
                while True:
                    try:
                        if number % 2:
                            await peer.rpc.call(
                                to, "stage/6/forward", forward, StageAnswer, frames=frames[:1], timeout_s=5.0
                            )
                        else:
                            await peer.rpc.call(to, PASS, passed, PassAnswer, frames=frames, timeout_s=5.0)
                        there.done("f1 computed")
                    except RemoteError:
                        await trio.sleep(0.1)

            async with trio.open_nursery() as nursery:
                for to, (stage, _, _) in where.items():
                    for number in range(64):
                        nursery.start_soon(flood, to, stage, number)

    with trio.move_on_after(there.rng.uniform(4, 8)):
        await each([one] * 8)


def there_names(there: Field) -> list[str]:
    """The honest peers' ids as text."""
    return [peer.text for peer in there.peers()]
