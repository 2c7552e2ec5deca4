"""Points within a host of experts: a caller of experts, a host that hands over and fetches checkpoints, and one that
announces experts, checkpoints and room, and answers what it is then called for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from peerd.codec.format.frame import TensorFrame
from peerd.dht import codec as dht
from peerd.experts.calls.vault_disk import digests_of
from peerd.messages.encoding import Empty, decode, encode
from peerd.messages.experts import (
    Announced,
    Backward,
    CheckpointRef,
    Forward,
    Gradient,
    HolderOffer,
    Keep,
    Kept,
    KeptExperts,
    Name,
    PieceWanted,
    TransferAnswer,
    TransferRequest,
    state_root,
)
from peerd.messages.state import Pieces
from peerd.run.grid import Uid, bitmap, holders_key, kept_experts_key, prefix_key
from tests.fuzz import goods
from tests.fuzz.answering import Answering, Answers
from tests.fuzz.bodies import Pool
from tests.fuzz.calls import Good, Menu
from tests.fuzz.expert_scene import EXPERTS, MARK, RUN, samples
from tests.fuzz.service_points import ask
from tests.fuzz.session_points import WHO, entered
from tests.fuzz.sessions import Point, Stage, point
from tests.worlds.network.hostile import Hostile

POINTS: list[Point] = []
UNTOUCHED, A, B = EXPERTS[:3]  # nobody claims the first one
ADDR = "/ip4/10.0.0.4/tcp/4001"
LASTS_S = 3000.0  # of records: no session lives longer in one scene
STATES = [bytes([number]) * size for number, size in enumerate((300, 301, (1 << 20) + 7))]  # of no expert


def _pointer(uid: Uid = A, generation: int = 0, version: int = 3, data: bytes = STATES[0]) -> CheckpointRef:
    owner, root = WHO.identity.peer_id.public_key, state_root(digests_of(data))
    return CheckpointRef(MARK, Name.of(uid), generation, version, root, len(data), owner).signed(WHO.identity)


def _after(former: CheckpointRef, version: int = 4, **facts: Any) -> CheckpointRef:
    """A pointer of the next generation, which goes on from another one or says so."""
    facts = {"former": former.as_former(), "began": former.version, "version": version} | facts
    made = _pointer(former.expert.uid, former.generation + 1)
    return msgspec.structs.replace(made, **facts).signed(WHO.identity)


def _announced(prefix: Uid, generation: int, *places: int) -> Announced:
    numbers = [generation] * len(places) if prefix.at else []
    return Announced(Name.of(prefix), bitmap(places, 2), numbers, numbers, 0.0, [ADDR])


# --- what the host takes ---------------------------------------------------------------------------------------------
FORWARD = Good("expert/1/forward", Forward(MARK, Name.of(UNTOUCHED)), (samples(),))
BACKWARD = Good("expert/1/backward", Backward(MARK, Name.of(UNTOUCHED), b"r" * 16, 0, 0), (samples(), samples()))
CALLS = [
    FORWARD,
    Good("expert/1/forward", Forward(MARK, Name.of(A)), (samples(8),)),
    BACKWARD,
    Good("expert/1/backward", Backward(MARK, Name.of(B), b"s" * 16, 0, 1, 3), (samples(1), samples(1))),
]
KEEP = Good("vault/2/keep", Keep(_pointer()))
PIECE = Good("vault/2/get", PieceWanted(_pointer().digest, 0))
VAULT = [
    KEEP,
    Good("vault/2/keep", Keep(_pointer(A, 1 << 52, 1 << 52, STATES[1]))),
    Good("vault/2/keep", Keep(_pointer(B, 6, 9, STATES[2]))),
    Good("vault/2/keep", Keep(msgspec.structs.replace(_pointer(), size_bytes=1 << 33).signed(WHO.identity))),
    PIECE,
    Good("vault/2/get", PieceWanted(_pointer().digest, -1)),
]
SHARING = [
    Good("sharing/2/take", TransferRequest(_pointer(), 900, 0.001)),
    Good("sharing/2/take", TransferRequest(_pointer(A, 1 << 52, 1 << 52, STATES[1]), 2, 0.0, leaves=True)),
    Good("sharing/2/take", TransferRequest(_pointer(B, 6, 9, STATES[2]), 1 << 30, 1e6)),
]
_ROOM = HolderOffer(
    1 << 40, adopts=True, addrs=[ADDR], taking=[Name.of(A), Name.of(B)], hosted=0, places=1 << 30, sample_s=1e-9
)
_ME = WHO.identity.peer_id.public_key
_FIRST = _pointer(A, 0, 3, STATES[1])
_FORGED = msgspec.structs.replace(_FIRST, owner=bytes(range(32)), signature=bytes(64))
_CHAINS = [  # of a stranger: through itself, handed to itself, from what nobody signed, and from no state of the former
    [_after(_FIRST), _FIRST],
    [_after(_after(_FIRST)), _after(_FIRST), _FIRST],
    [_after(msgspec.structs.replace(_FIRST, heir=_ME).signed(WHO.identity), 9)],
    [_after(_FORGED)],
    [_after(_FIRST, began=9, version=2), _after(_FIRST, generation=0), _after(_FIRST, generation=(1 << 53) - 1)],
    [_pointer(A, 1001, 1_000_000, STATES[1])],
]
_RECORDS = [
    *(
        goods.signed_record(prefix_key(RUN.run, prefix), encode(told), lasts_s=LASTS_S)
        for prefix, told in [
            (A.prefix, _announced(A.prefix, 0, 0, 1)),
            (A.prefix, _announced(A.prefix, 7, 1)),
            (B.prefix, _announced(B.prefix, (1 << 53) - 1, 0)),
            (Uid(0, ()), _announced(Uid(0, ()), 0, 0, 1)),
            (Uid(0, ()), _announced(A.prefix, 0, 0)),
        ]
    ),
    *(
        goods.signed_record(
            kept_experts_key(RUN.run, uid.prefix), encode(KeptExperts(pointers, [ADDR])), b"\0", lasts_s=LASTS_S
        )
        for uid, pointers in [
            (A, [_pointer(generation=5), _pointer()]),
            (B, [_pointer(B, 6, 9, STATES[2])]),
            (B, [_pointer(A)]),
            (A, [msgspec.structs.replace(_pointer(), version=9)]),
        ]
    ),
    goods.signed_record(holders_key(RUN.run), encode(_ROOM), lasts_s=LASTS_S),
    goods.signed_record(holders_key(RUN.run), b"junk", version=2, lasts_s=LASTS_S),
]
_STRANGERS = [
    *(
        goods.signed_record(
            kept_experts_key(RUN.run, A.prefix), encode(KeptExperts(chain, [ADDR])), bytes([number]), lasts_s=LASTS_S
        )
        for number, chain in enumerate(_CHAINS, 1)
    ),
    *(
        goods.signed_record(
            prefix_key(RUN.run, A.prefix), encode(_announced(A.prefix, generation, 1)), bytes([1]), lasts_s=LASTS_S
        )
        for generation in (1, 2, 1001)
    ),
]
_KEYS = [
    *(key(RUN.run, uid.prefix).raw for uid in (A, B) for key in (prefix_key, kept_experts_key)),
    holders_key(RUN.run).raw,
]
DIRECTORY = [
    *(Good("dht/4/store", dht.StoreMessage([record], None)) for record in _RECORDS),
    Good("dht/4/get", dht.FindMessage(_KEYS, None)),
]
POOL = Pool(
    goods.POOL.texts,
    (*goods.POOL.data, MARK, b"r" * 16, _pointer().digest, _pointer().signature, *_RECORDS, *_KEYS),
)
STRANGE = [
    *(Good("dht/4/store", dht.StoreMessage([record], None)) for record in _STRANGERS),
    *(Good("vault/2/keep", Keep(pointer)) for chain in _CHAINS for pointer in chain),
    *(Good("sharing/2/take", TransferRequest(chain[0], 900, 0.001)) for chain in _CHAINS),
]
REPLIES = [Kept(held=True), Kept(held=False), Empty()]

# --- what it answers -------------------------------------------------------------------------------------------------
_BY_DIGEST = {state_root(digests_of(data)): data for data in STATES}


def _piece(body: bytes) -> list[Good]:
    """The piece of a state that a call asks for."""
    wanted = decode(PieceWanted, body)
    data = _BY_DIGEST.get(wanted.digest, STATES[0])
    piece = digests_of(data) if wanted.piece < 0 else data[slice(*Pieces(len(data)).piece(wanted.piece))]
    return [Good("vault/2/get", Empty(), (TensorFrame("uint8", (len(piece),), piece),))]


_ANSWERS: dict[str, Answers] = {
    "vault/2/keep": [Good("vault/2/keep", Kept(held=True)), Good("vault/2/keep", Kept(held=False))],
    "vault/2/get": _piece,
    "sharing/2/take": [Good("sharing/2/take", TransferAnswer(generation)) for generation in (0, 1, 7, (1 << 53) - 1)],
    "dht/4/get": [Good("dht/4/get", dht.RecordsMessage([[record]], [], None)) for record in _RECORDS],
    "dht/4/ping": [Good("dht/4/ping", goods.DHT_REPLIES[0])],
    "dht/4/find": [Good("dht/4/find", goods.DHT_REPLIES[1])],
    "dht/4/store": [Good("dht/4/store", goods.DHT_REPLIES[3])],
}


async def _answering(stage: Stage) -> Hostile:
    return Answering(await entered(stage), random.Random(stage.ephemeral), POOL, _ANSWERS)


@point("as a caller of experts", Menu(POOL, CALLS).talk(), POINTS)
async def _caller(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    await ask(hostile, FORWARD)
    return [hostile]


@point("as a caller whose update is made", Menu(POOL, [BACKWARD, *CALLS]).talk(), POINTS)
async def _updated(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    answer = await ask(hostile, BACKWARD)
    assert decode(Gradient, answer).version > 0
    assert await ask(hostile, BACKWARD) == answer  # a repeat counts once
    return [hostile]


@point("as one whose checkpoints are to be kept", Menu(POOL, VAULT, REPLIES).talk(), POINTS)
async def _hands(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    await ask(hostile, KEEP)
    return [hostile]


@point("as one that hands experts over", Menu(POOL, [*SHARING, *VAULT], REPLIES).talk(), POINTS)
async def _gives(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    assert await ask(hostile, DIRECTORY[0])
    return [hostile]


@point("as one that fetches checkpoints", Menu(POOL, VAULT[2:]).talk(), POINTS)
async def _fetches(stage: Stage) -> Sequence[Hostile]:
    hostile = await entered(stage)
    await ask(hostile, PIECE)
    return [hostile]


@point("as a host of experts that it has not", Menu(POOL, [*DIRECTORY, *CALLS], REPLIES).talk(), POINTS)
async def _claims(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    assert await ask(hostile, DIRECTORY[0])
    assert await ask(hostile, DIRECTORY[3])
    return [hostile]


@point("as a holder of what it has not", Menu(POOL, [*DIRECTORY, *VAULT], REPLIES).talk(), POINTS)
async def _holds(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    for store in DIRECTORY[5:-1]:
        assert await ask(hostile, store)
    return [hostile]


@point("as a stranger with pointers of its own", Menu(POOL, [*STRANGE, *DIRECTORY], REPLIES).talk(), POINTS)
async def _signs(stage: Stage) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    for store in STRANGE[: len(_STRANGERS)]:
        assert await ask(hostile, store)
    return [hostile]
