"""Points within services: a peer that calls as it should, as a member, trainer, helper, newcomer, conductor, stage-mate
or relay, up to some moment, and then calls with anything.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import msgspec
from multiaddr import Multiaddr

from peerd.core.ids import PeerId
from peerd.core.varint import encode_varint
from peerd.messages.encoding import decode, encode
from peerd.messages.handover import PassAnswer
from peerd.messages.state import StateManifest
from peerd.messages.swarm import Done
from peerd.reach.messages.autonat_message import AUTONAT, DialRequest
from peerd.reach.messages.circuit_message import HOP, STOP, HopKind, HopMessage, Limit, StopKind, StopMessage
from peerd.reach.messages.holepunch_message import DCUTR, HolePunch, PunchKind
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.method_load import method_name
from peerd.swarm.roster import START
from peerd.wire.yamux.frames import DATA, SYN
from peerd.wire.yamux.stream import YamuxStream
from tests.fuzz import goods
from tests.fuzz import handover_goods as handing
from tests.fuzz.answering import Answering
from tests.fuzz.calls import FIRST_STREAM, Good, Menu
from tests.fuzz.goods import SELF, SEQ
from tests.fuzz.service_scene import RunStage, services
from tests.fuzz.session_points import WHO, Frames, entered, inside
from tests.fuzz.sessions import Point, Stage, Talk, point
from tests.kit.mutate import mutated
from tests.worlds.network.hostile import Hostile, enter, frame, hello, secrets
from tests.worlds.simulation.clock import run_virtual

POINTS: list[Point] = []


# --- speaking as one should ------------------------------------------------------------------------------------------
async def ask(hostile: Hostile, good: Good) -> bytes:
    """One call, and the body of its answer; b"" where it is refused, or none comes."""
    headers, payloads = wire.encode_frames(good.frames)
    method = method_name(good.method)
    call = wire.encode_call(wire.REQUEST, 1, method.name, 5.0, encode(good.body), headers, len(payloads))
    stream = await hostile.open(method.protocol)
    await hostile.send(stream, call + b"".join(payloads))
    await hostile.receive(stream, len(hello(method.protocol)))
    head = await hostile.receive(stream, wire.HEAD_BYTES)
    if len(head) < wire.HEAD_BYTES:
        return b""
    size, kind, count, _ = wire.read_head(head)
    block, at = await hostile.receive(stream, size), 0
    for _ in range(count):
        _, at = wire.decode_header(block, at)
    return block[at:] if kind == wire.REPLY else b""


def served(stage: Stage) -> RunStage:
    assert isinstance(stage, RunStage)
    return stage


async def back_to_start(stage: Stage) -> None:
    """Move the host's post back to the start, where the good bodies are valid: another session may have moved it."""
    role = served(stage).served.role
    if role.position != START:
        await role.post.state.move(START, role.post.state.load_saved)


def asking(name: str, talk: Talk, *calls: Good, from_start: bool = False, is_answered: bool = False) -> None:
    """Add a point that a peer reaches by these calls."""

    @point(name, talk, POINTS)
    async def reach(stage: Stage) -> Sequence[Hostile]:
        if from_start:
            await back_to_start(stage)
        hostile = await entered(stage)
        for call in calls:
            assert await ask(hostile, call) or not is_answered
        return [hostile]


# --- the directory ---------------------------------------------------------------------------------------------------
asking(
    "in the directory",
    Menu(goods.DHT_POOL, goods.DHT, goods.DHT_REPLIES).talk(),
    *(goods.DHT[1], goods.DHT[3]),
    is_answered=True,
)


# --- the conductor's service -----------------------------------------------------------------------------------------
def _as(*menu: Good) -> Talk:
    return Menu(goods.POOL, menu, goods.REPLIES).talk()


asking("as a stage peer", _as(*goods.SWARM), goods.MEMBER)
asking("as a peer of another stage", _as(goods.OF_STAGE_1, *goods.SWARM), goods.OF_STAGE_1)
asking("as a helper", _as(goods.HELPER, goods.LEAVE, goods.TRAINER), goods.HELPER)

# --- a trainer -------------------------------------------------------------------------------------------------------
asking("as a trainer", _as(goods.TRAINER, goods.DONE, *goods.STAGE), goods.TRAINER, from_start=True)
_WORK = [goods.DONE, *goods.STAGE, *handing.AT_FIRST]


async def give_room(stage: Stage) -> None:
    """Forget attempts, and microbatches, of the sessions before."""
    for peer in (served(stage).served, served(stage).mate):
        role = peer.role
        await role.post.state.move(role.position, role.post.state.load_saved)
        role.post.handover._tickets._newest.clear()


@point("as a trainer whose work is held", Menu(handing.POOL, [*_WORK, goods.LEAVE]).talk(), POINTS)
async def _credited(stage: Stage) -> Sequence[Hostile]:
    await back_to_start(stage)
    await give_room(stage)
    hostile = await entered(stage)
    await ask(hostile, goods.TRAINER)
    if (answer := await ask(hostile, handing.AT_FIRST[0])) and (hops := decode(PassAnswer, answer).hops):
        done = Done(SEQ, [goods.HOST.text, goods.MATE.text], [hops[0].receipt, None])
        await ask(hostile, Good("swarm/6/trainer", msgspec.structs.replace(goods.WISH, done=[done], wait_s=0.0)))
    return [hostile]


async def at_mate(stage: Stage, ephemeral: bytes) -> Hostile:
    return await enter(stage.network, served(stage).mate.host.listen_addrs()[0], WHO, ephemeral)


@point("as a trainer at the last stage", Menu(goods.POOL, goods.LAST).talk(), POINTS)
async def _at_last_stage(stage: Stage) -> Sequence[Hostile]:
    hostile = await at_mate(stage, stage.ephemeral)
    assert await ask(hostile, goods.LAST[0])
    return [hostile]


@point("as a trainer whose work makes a step", Menu(handing.POOL, [*_WORK, *goods.LAST]).talk(), POINTS)
async def _makes_a_step(stage: Stage) -> Sequence[Hostile]:
    """Both microbatches of the batch, over both stages, with what they signed."""
    await back_to_start(stage)
    await give_room(stage)
    hostile = await entered(stage)
    mate = await at_mate(stage, bytes((stage.ephemeral[0] ^ 1, *stage.ephemeral[1:])))
    await _make_batch(hostile)
    return [hostile, mate]


async def _make_batch(hostile: Hostile) -> None:
    await ask(hostile, goods.TRAINER)
    done = []
    for seq, good in zip((SEQ, SEQ + 1), handing.AT_FIRST, strict=False):
        answer = await ask(hostile, good)
        receipts = [hop.receipt for hop in decode(PassAnswer, answer).hops] if answer else [None, None]
        done.append(Done(seq, [goods.HOST.text, goods.MATE.text], receipts))
    await ask(hostile, Good("swarm/6/trainer", msgspec.structs.replace(goods.WISH, done=done, wait_s=0.0)))


# --- whom the host follows -------------------------------------------------------------------------------------------
async def _conducting(stage: Stage) -> Hostile:
    """The host takes the hostile peer's orders."""
    await back_to_start(stage)
    hostile = await entered(stage)
    served(stage).served.role._services.following.conductor = SELF
    return hostile


@point("as its conductor", Menu(goods.POOL, [*goods.ORDERS, *goods.STAGE], goods.REPLIES).talk(), POINTS)
async def _conductor(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    assert await ask(hostile, goods.RESTORE)
    return [hostile]


@point("as its conductor, after a mean", Menu(goods.POOL, [goods.COMMIT, *goods.ORDERS], goods.REPLIES).talk(), POINTS)
async def _conductor_of_mean(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    assert await ask(hostile, goods.PREPARE_ALONE)
    return [hostile]


async def _order(hostile: Hostile, good: Good) -> YamuxStream:
    """An order whose answer nobody waits for."""
    method = method_name(good.method)
    stream = await hostile.open(method.protocol)
    await hostile.send(stream, wire.encode_call(wire.REQUEST, 1, method.name, 30.0, encode(good.body)))
    return stream


def _in_round(attempt: bytes, *orders: Good) -> Talk:
    return Menu(goods.POOL, [*goods.in_round(attempt), *orders], goods.REPLIES).talk()


@point("in a round", _in_round(goods.ATTEMPT), POINTS)
async def _in_a_round(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    await _order(hostile, goods.PREPARE)
    return [hostile]


@point("in a round by shares", _in_round(goods.ATTEMPT, goods.PREPARE), POINTS)
async def _in_shares(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    await _order(hostile, goods.PREPARE_SPLIT)
    return [hostile]


@point("with a sum of an earlier order", _in_round(b"j" * 16, goods.COMMIT, goods.PREPARE_COPY), POINTS)
async def _in_joined(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    assert await ask(hostile, goods.PREPARE_FIRST)
    await _order(hostile, goods.PREPARE_JOINED)
    return [hostile]


@point("as the only one that has the sum", _in_round(b"c" * 16, goods.COMMIT), POINTS)
async def _in_copy(stage: Stage) -> Sequence[Hostile]:
    hostile = await _conducting(stage)
    await _order(hostile, goods.PREPARE_COPY)
    return [hostile]


# --- state -----------------------------------------------------------------------------------------------------------
async def _newcomer(stage: Stage, service: str) -> tuple[Hostile, bytes]:
    """A hostile peer that has asked for a manifest, and the root in the answer."""
    hostile = await entered(stage)
    answer = await ask(hostile, goods.state(service)[0])
    return hostile, decode(StateManifest, answer).root if answer else b""


@functools.cache
def _root(service: str) -> bytes:
    """The root of the copy, the same in every scene: a session has to know it before it begins."""

    async def learned() -> bytes:
        async with services() as made:
            return (await _newcomer(made, service))[1]

    return run_virtual(learned, seed=1)


def _state_talk(service: str) -> Talk:
    return lambda rng: Menu(goods.POOL, goods.state(service, _root(service))).talk()(rng)


@point("as a newcomer that fetches the state", _state_talk("state/1"), POINTS)
async def _fetching(stage: Stage) -> Sequence[Hostile]:
    await back_to_start(stage)
    hostile, root = await _newcomer(stage, "state/1")
    await ask(hostile, goods.state("state/1", root)[2])
    return [hostile]


@point("as one that fetches what is kept", _state_talk("kept/1"), POINTS)
async def _fetching_kept(stage: Stage) -> Sequence[Hostile]:
    hostile, root = await _newcomer(stage, "kept/1")
    await ask(hostile, goods.state("kept/1", root)[2])
    return [hostile]


# --- ways: relay, punching, reachability -----------------------------------------------------------------------------
def _delimited(*messages: bytes) -> list[bytes]:
    return [encode_varint(len(message)) + message for message in messages]


_NOBODY = PeerId.parse(goods.NOBODY)
_ADDRS = tuple(
    Multiaddr(text).to_bytes() for text in ("/ip4/10.0.0.4/tcp/4001", "/ip4/10.0.0.1/tcp/1", "/ip6/::1/tcp/9")
)
_HOP = _delimited(
    HopMessage(kind=HopKind.RESERVE).encode(),
    *(HopMessage(kind=HopKind.CONNECT, peer=peer).encode() for peer in (goods.HOST, goods.HONEST, SELF, _NOBODY)),
    HopMessage(kind=HopKind.STATUS, status=100).encode(),
)
_STOP = _delimited(
    *(
        StopMessage(kind=StopKind.CONNECT, peer=peer, limit=limit).encode()
        for peer in (goods.MATE, SELF, goods.HOST, _NOBODY)
        for limit in (None, Limit(duration_s=1, data_bytes=1), Limit(duration_s=(1 << 32) - 1, data_bytes=1 << 60))
    ),
    StopMessage(kind=StopKind.STATUS, status=100).encode(),
)
_PUNCH = _delimited(
    HolePunch(PunchKind.CONNECT, _ADDRS).encode(),
    HolePunch(PunchKind.SYNC).encode(),
    HolePunch(PunchKind.CONNECT).encode(),
)
_DIAL_ME = _delimited(
    DialRequest(peer=SELF, addrs=_ADDRS).encode(), DialRequest(peer=goods.HOST, addrs=_ADDRS[:1]).encode()
)


class Said:
    """Messages of one of libp2p's small protocols, on fresh streams, with noise after some of them."""

    def __init__(self, rng: random.Random, protocol: str, corpus: Sequence[bytes]) -> None:
        self._rng, self._protocol, self._corpus = rng, protocol, corpus
        self._next, self._frames = FIRST_STREAM, Frames(rng)
        self._wild = rng.choice((0.0, 0.1, 0.5))

    def __call__(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            return self._frames()
        said = b"".join(rng.choice(self._corpus) for _ in range(rng.choice((1, 1, 2))))
        if rng.random() < self._wild:
            said = mutated([said], rng.getrandbits(30), 0)
        if rng.random() < 0.3:
            said += hello("/noise") + bytes((0, 32)) + rng.randbytes(rng.choice((0, 5, 32, 200)))
        if self._next == FIRST_STREAM or rng.random() < 0.5:
            self._next += 2
            said = hello(self._protocol) + said
            return frame(DATA, SYN, self._next - 2, len(said), said)
        return frame(DATA, 0, rng.choice((self._next - 2, 2, 4, 6, 8)), len(said), said)


def _said(protocol: str, corpus: Sequence[bytes]) -> Talk:
    return lambda rng: Said(rng, protocol, corpus)


async def _tell(hostile: Hostile, protocol: str, message: bytes) -> None:
    await hostile.send(await hostile.open(protocol), message)
    await hostile.hear()


def telling(name: str, protocol: str, messages: Sequence[bytes], talk: Talk | None = None) -> None:
    """Add a point that a peer reaches by the first of these messages; it goes on with any of them, or with `talk`."""

    @point(name, talk or _said(protocol, messages), POINTS)
    async def reach(stage: Stage) -> Sequence[Hostile]:
        hostile = await entered(stage)
        await _tell(hostile, protocol, messages[0])
        return [hostile]


telling("as a relay's client", HOP, _HOP)


@point("over a relay, as the peer beyond it", _said(STOP, [*_HOP, *_STOP]), POINTS)
async def _beyond(stage: Stage) -> Sequence[Hostile]:
    """One identity has a reservation and opens a circuit to itself, another one to the mate."""
    first = await entered(stage)
    await _tell(first, HOP, _HOP[0])
    ephemeral = bytes((stage.ephemeral[0] ^ 1, *stage.ephemeral[1:]))
    second = await enter(stage.network, stage.addr, secrets("another"), ephemeral)
    await _tell(second, HOP, _HOP[3])
    return [first, second]


telling("as a relay", STOP, _STOP)
telling("in a circuit's hand-shake", STOP, _STOP, inside([hello("/noise") + bytes((0, 32)) + bytes(32)]))
telling("in hole punching", DCUTR, _PUNCH)
telling("while it asks to be dialed", AUTONAT, _DIAL_ME)


# --- whom the host calls ---------------------------------------------------------------------------------------------
async def _answering(stage: Stage) -> Hostile:
    """It answers what the host calls it for: as member, conductor, donor, stage-mate and peer of the directory."""
    return Answering(await entered(stage), random.Random(stage.ephemeral), goods.DHT_POOL, answers())


@functools.cache
def answers() -> dict[str, list[Good]]:
    """By method. A donor that tells the truth has what the host would have after one more step."""
    found: dict[str, list[Good]] = {}
    for good in (*goods.ANSWERS, *goods.donor()):
        found.setdefault(good.method, []).append(good)
    return found


@point("in the directory, answering", Menu(goods.DHT_POOL, goods.DHT).talk(), POINTS)
async def _directory_answering(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    assert await ask(hostile, goods.DHT[0])
    assert await ask(hostile, goods.DHT[4])
    return [hostile]


@point("as its conductor, answering", Menu(goods.POOL, [*goods.ORDERS, *goods.STAGE]).talk(), POINTS)
async def _conductor_answering(stage: Stage) -> Sequence[Hostile]:
    """The host reports to it, and fetches from it what it is told to."""
    await back_to_start(stage)
    hostile = await _answering(stage)
    role = served(stage).served.role
    assert await ask(hostile, goods.DHT[0])
    role._services.following.conductor = SELF
    role.post.session.tell()
    return [hostile]


@point(
    "as a stage-mate in a step, answering",
    Menu(goods.POOL, [goods.MEMBER, *goods.in_round(goods.ATTEMPT)]).talk(),
    POINTS,
)
async def _mate_answering(stage: Stage) -> Sequence[Hostile]:
    """A member of the host's stage that holds part of a batch: the conductor orders it to average."""
    await back_to_start(stage)
    await give_room(stage)
    hostile = await _answering(stage)
    mate = await at_mate(stage, bytes((stage.ephemeral[0] ^ 1, *stage.ephemeral[1:])))
    await ask(hostile, goods.MEMBER)
    await _make_batch(hostile)
    return [hostile, mate]
