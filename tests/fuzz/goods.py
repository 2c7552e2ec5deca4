"""Calls that the host of a `service_scene` takes from the hostile peer: as member, trainer, helper, newcomer,
conductor, stage-mate and peer of the directory; and what the hostile peer answers to the host's own.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from peerd.codec.format.frame import TensorFrame
from peerd.core.ids import Key
from peerd.core.record import Record
from peerd.dht import codec as dht
from peerd.messages.encoding import Empty, encode
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport, PairFigures
from peerd.messages.progress import StageProgress, TrainerProgress, progress_key, stage_key
from peerd.messages.proof import grant
from peerd.messages.state import (
    StateDigests,
    StateItem,
    StateLayout,
    StateManifest,
    StatePiece,
    StateRelease,
    StateRequest,
    piece_digest,
)
from peerd.messages.swarm import (
    AverageAlive,
    AverageKey,
    Commit,
    Conducts,
    Done,
    Forecast,
    GrantStatement,
    Leave,
    LineInfo,
    ListMembers,
    Mb,
    Mbs,
    MemberAnswer,
    MemberInfo,
    MemberNews,
    MembersListed,
    MemberSync,
    Moved,
    Party,
    Position,
    PostLoad,
    PostsHeld,
    Prepare,
    Prepared,
    Receipt,
    Relocate,
    Restore,
    Seqs,
    StageForward,
    StageLoss,
    TrainerAnswer,
    TrainerSync,
    WhichPosts,
    WhoConducts,
)
from peerd.model.stage.served_stage import ServedStage, items_of
from peerd.swarm.roster import START
from tests.fuzz.bodies import Pool
from tests.fuzz.calls import Good
from tests.fuzz.service_scene import KEPT_POSITION, MARK, RUN
from tests.fuzz.session_points import WHO
from tests.worlds.network.hosts import keypair
from tests.worlds.roles.stagescene import microbatch
from tests.worlds.simulation.clock import EPOCH_S

SELF, NOBODY = WHO.identity.peer_id, keypair("nobody").peer_id.text
HOST, MATE, HONEST = (keypair(name).peer_id for name in ("host", "mate", "honest"))
ATTEMPT, SEQ, ELEMENTS = b"a" * 16, 7 << 40, 7456  # so many are stage 0's gradients
POOL = Pool(
    texts=(
        SELF.text,
        HOST.text,
        MATE.text,
        NOBODY,
        *("", "x", "node", "aux", "float32", "bfloat16", "float99", "\0", "é" * 40, "1" * 64, "12D3KooW" + "z" * 44),
        *("/ip4/10.0.0.4/tcp/4001", "/ip4/127.0.0.1/tcp/1", "/dns4/x.example/tcp/1", "/ip4/1.2.3.4", "/" * 500),
    ),
    data=(MARK, ATTEMPT, b"", b"x", b"next", bytes(16), bytes(32), bytes(64), SELF.raw, HOST.raw, b"kept"),
)


# --- bodies that the host takes ---------------------------------------------------------------------------------------
def _report(**changes: object) -> MemberSync:
    good = MemberSync(
        run=MARK,
        session=5,
        stage=0,
        position=START,
        prepared=None,
        saved=[Position(0, b"")],
        held=Mbs.of([Mb(SELF.text, SEQ)]),
        counted=Mbs(),
        addrs=["/ip4/10.0.0.9/tcp/4001"],
        since=EPOCH_S + 100,
        term=1,
        seen=0,
        wait_s=0.5,
        line=LineInfo("node", 1e6, 1e6, 1000, "float32"),
        load=PostLoad(2.0, 0.5, 3.0, True),
    )
    return msgspec.structs.replace(good, **changes)


MEMBER = Good("swarm/6/member", _report())
HELPER = Good("swarm/6/member", _report(held=None, line=LineInfo("aux", 1e6, 1e6)))
OF_STAGE_1 = Good("swarm/6/member", _report(stage=1))
WISH = TrainerSync(MARK, 1, 0, Seqs.of([SEQ, SEQ + 1]), [], 0, 0, 0.5)
TRAINER = Good("swarm/6/trainer", WISH)
DONE = Good(
    "swarm/6/trainer",
    msgspec.structs.replace(WISH, done=[Done(SEQ, [HOST.text, MATE.text], [Receipt(1, bytes(64)), None])]),
)
LEAVE, WHO_CONDUCTS = Good("swarm/6/leave", Leave(MARK)), Good("swarm/6/who", WhoConducts(MARK))
LIST_MEMBERS = Good("swarm/6/members", ListMembers(MARK))
WHICH_POSTS = Good("posts/1/held", WhichPosts(MARK))
GRANT = grant(keypair("host").sign, GrantStatement(MARK, 1, 0, SELF.text, Seqs.of([SEQ, SEQ + 1])))
MAY_EVALUATE = grant(keypair("host").sign, GrantStatement(MARK, 1, 0, SELF.text, Seqs()))
EVALUATE = Good("stage/6/forward", StageForward(MARK, 0, grant=MAY_EVALUATE), tuple(microbatch(1)[:1]))
LOSS = Good("stage/6/loss", StageLoss(MARK, 0, MAY_EVALUATE), tuple(microbatch(1)))
_GROUP = sorted([HOST.text, SELF.text])
ORDER = Prepare(MARK, 1, 0, ATTEMPT, b"next", _GROUP, Mbs(), 4, 30.0)
SPLIT = [Party(_GROUP[0], "node", 0.5), Party(_GROUP[1], "node", 0.5)]
PREPARE = Good("stage/6/prepare", ORDER)
PREPARE_ALONE = Good("stage/6/prepare", msgspec.structs.replace(ORDER, group=[HOST.text]))
PREPARE_SPLIT = Good(
    "stage/6/prepare", msgspec.structs.replace(ORDER, split=SPLIT, part_bytes=4096, elements=ELEMENTS, dtype="float32")
)
PREPARE_FIRST = Good("stage/6/prepare", msgspec.structs.replace(PREPARE_ALONE.body, last=False))
PREPARE_JOINED = Good(
    "stage/6/prepare", msgspec.structs.replace(ORDER, attempt=b"j" * 16, brings=ATTEMPT, copy=1, copies=2)
)
PREPARE_COPY = Good("stage/6/prepare", msgspec.structs.replace(ORDER, attempt=b"c" * 16, listeners=[HOST.text]))
COMMIT = Good("stage/6/commit", Commit(MARK, 1, Position(1, b"next"), 0))
RESTORE = Good("stage/6/restore", Restore(MARK, 1, START, 0))
_HELLO = dht.HelloMessage([b"\x04\x0a\0\0\x09\x06\x0f\xa1"], EPOCH_S + 10)


def state(service: str, root: bytes = bytes(32)) -> list[Good]:
    of = KEPT_POSITION if service == "kept/1" else None
    return [
        Good(f"{service}/manifest", StateRequest(MARK, 0, of)),
        Good(f"{service}/manifest", StateRequest(MARK, 0, Position(1, b"next"), 1)),
        Good(f"{service}/digests", StateDigests(MARK, root)),
        *([Good(f"{service}/layout", StateRequest(MARK, 0))] if service == "state/1" else []),
        Good(f"{service}/piece", StatePiece(MARK, root, 0)),
        Good(f"{service}/release", StateRelease(MARK, root)),
    ]


def signed_record(key: Key, value: bytes, suffix: bytes = b"", version: int = 1, lasts_s: float = 60) -> bytes:
    """A record of the directory, with the hostile peer's signature."""
    expires_ms = int((EPOCH_S + lasts_s) * 1000)
    return Record(key, SELF, suffix, value, version, expires_ms).signed(WHO.identity).encode()


def _records() -> list[bytes]:
    """Records that the hostile peer has signed: valid ones, of odd values."""
    say = StageProgress(0, EPOCH_S, 1 << 40, 0, 1e300, "cpu", HOST.text, "", ["/ip4/10.0.0.4/tcp/4001"])
    trains = TrainerProgress(1 << 50, float("nan"), float("inf"), 0, -1.0, 1e300, 1, 1, 1, "")
    later = msgspec.structs.replace(say, stage=1, since=EPOCH_S + 9)
    return [
        signed_record(stage_key(RUN.run, 0), b"junk"),
        signed_record(stage_key(RUN.run, 0), encode(later), b"", 2),
        signed_record(stage_key(RUN.run, 1), encode(later)),
        signed_record(progress_key(RUN.run), encode(trains)),
        signed_record(Key.of("any"), b"value", b"suffix", 1 << 62),
    ]


_STORED = _records()
_KEYS = [stage_key(RUN.run, 0).raw, Key.of("any").raw, HOST.raw[-32:]]
DHT = [
    Good("dht/4/ping", dht.PingMessage(_HELLO)),
    Good("dht/4/find", dht.FindMessage(_KEYS, _HELLO)),
    Good("dht/4/get", dht.FindMessage(_KEYS, None)),
    Good("dht/4/get", dht.FindMessage(_KEYS, None, 1 << 16, has=[record[:16] for record in _STORED])),
    *(Good("dht/4/store", dht.StoreMessage([record], _HELLO)) for record in _STORED),
    Good("dht/4/store", dht.StoreMessage(_STORED, None)),
]
DHT_POOL = Pool(POOL.texts, (*POOL.data, *_KEYS, *_STORED, _HELLO.addrs[0]))
DHT_REPLIES = [
    dht.PongMessage(_HELLO),
    dht.NearMessage([dht.ContactMessage(MATE.raw, _HELLO.addrs)], _HELLO),
    dht.RecordsMessage([[_STORED[1]], [bytes(16)]], [dht.ContactMessage(SELF.raw, [])], _HELLO),
    dht.StoredMessage([dht.VerdictMessage(0, 1)], _HELLO),
]
_MEMBER_ANSWER = MemberAnswer(1, Position(1, b"next"), False, "", False, 1, None)
REPLIES = [
    Prepared(True, Mbs(), [], bytes(32)),
    Prepared(False, Mbs.of([Mb(SELF.text, SEQ)]), [HOST.text, MATE.text]),
    Moved(Position(1, b"next")),
    Conducts(9),
    PostsHeld([1]),
    _MEMBER_ANSWER,
    TrainerAnswer(1, 0, True, Seqs(), [], None, None, False, "", 1, None),
    AverageAlive(True),
    StateManifest(Position(1, b"next"), bytes(32), bytes(32)),
    Empty(),
]
NETWORK = [
    Good("network/1/report", NetworkReport(MARK, [PairFigures(HOST.text, 0.02, 1e6, 2e6, 5.0, 9.0, True, True)])),
    Good("network/1/map", NetworkMapRequest(MARK)),
    Good("network/1/map", NetworkMapRequest(MARK, HOST.text, MATE.text)),
]
SWARM = [MEMBER, HELPER, OF_STAGE_1, TRAINER, DONE, LEAVE, LIST_MEMBERS, WHO_CONDUCTS, WHICH_POSTS, *NETWORK]
# Calls with many rows, and with rows that are too long: good ones but for that.
MANY = TensorFrame("uint8", (6000, 16), bytes(96_000))
_LONG = TensorFrame("uint8", (2, 48_000), bytes(96_000))
MANY_ROWS = [
    *(replace(good, frames=(MANY, *good.frames[1:])) for good in (EVALUATE, LOSS)),
    replace(EVALUATE, frames=(_LONG,)),
]
STAGE = [EVALUATE, LOSS, *MANY_ROWS]
RELOCATE = Good("stage/6/relocate", Relocate(MARK, 1, 0, 1, "stage 1 does 1 microbatch a second"))
ORDERS = [PREPARE, PREPARE_ALONE, PREPARE_SPLIT, PREPARE_FIRST, PREPARE_JOINED, PREPARE_COPY, COMMIT, RESTORE, RELOCATE]
# What is asked of the last stage, where the host's is not: for its mate.
_HIDDEN = TensorFrame("float32", (2, 16, 16), np.linspace(-1, 1, 512, dtype="float32").tobytes())
LAST = [
    Good("stage/6/forward", StageForward(MARK, 1, grant=MAY_EVALUATE), (_HIDDEN,)),
    Good("stage/6/loss", StageLoss(MARK, 1, MAY_EVALUATE), (_HIDDEN, microbatch(1)[0])),
    Good("stage/6/loss", StageLoss(MARK, 1, MAY_EVALUATE), (_HIDDEN, MANY)),
]


def in_round(attempt: bytes) -> list[Good]:
    """Calls in a round of two who share stage 0's vector."""
    parts = [(0, ELEMENTS), (0, ELEMENTS // 2), (ELEMENTS // 2, ELEMENTS), (0, 1024), (1024, 2048)]
    values = np.ones(ELEMENTS, "float32")
    sent = [
        Good(
            "average/2/parts",
            AverageKey(attempt, number % 2),
            (TensorFrame("float32", (end - begin,), values[begin:end].tobytes()),),
            streaming=True,
        )
        for number, (begin, end) in enumerate(parts)
    ]
    return [*sent, Good("average/2/alive", AverageKey(attempt, 0))]


# --- what a hostile peer answers, by the call -------------------------------------------------------------------------
_NEXT = Position(1, b"next")
_SELF_READY = MemberInfo(SELF.text, 0, [], True, since=EPOCH_S + 1)
_LIST = MemberNews(0, 1, [_SELF_READY, MemberInfo(MATE.text, 1, [], True, since=EPOCH_S + 2)], [], False)
ANSWERS = [
    *(
        Good("swarm/6/member", MemberAnswer(1, current, False, "", resend, 1, listed, Forecast(1.0, 2.0), lost))
        for current in (_NEXT, _NEXT, START, None)
        for resend, listed, lost in ((False, _LIST, False), (True, _LIST, False), (False, None, True))
    ),
    Good("swarm/6/trainer", REPLIES[5]),
    Good("swarm/6/who", Conducts(9)),
    Good("swarm/6/leave", Empty()),
    Good("swarm/6/members", MembersListed(_LIST, [0], [1.5, 0.25])),
    Good("network/1/report", Empty()),
    Good("network/1/map", NetworkPart([SELF.text, HOST.text], [MappedPair(0, 1, 0.02, 1e6, 1e6, 9.0)], 2, True)),
    Good("stage/6/prepare", REPLIES[0]),
    Good("stage/6/prepare", REPLIES[1]),
    Good("stage/6/commit", Moved(_NEXT)),
    Good("stage/6/restore", Moved(START)),
    Good("average/2/alive", AverageAlive(False)),
    Good("average/2/alive", AverageAlive(True)),
    *(replace(good, body=Empty()) for good in in_round(ATTEMPT) if good.frames),
    Good("dht/4/ping", DHT_REPLIES[0]),
    Good("dht/4/find", DHT_REPLIES[1]),
    Good("dht/4/get", DHT_REPLIES[2]),
    Good("dht/4/store", DHT_REPLIES[3]),
]


def donor() -> list[Good]:
    """State of stage 0, after a step that the hostile peer names; all in one piece."""
    items = [StateItem(*item) for item in items_of(ServedStage(RUN, 0, "cpu").state())]
    layout = StateLayout(items)
    piece = bytes(layout.cut_out(0, [item.payload for item in items]))
    digests = piece_digest(piece)
    frame = TensorFrame("uint8", (layout.pieces, len(digests)), digests)
    return [
        Good("state/1/manifest", StateManifest(_NEXT, layout.digest, layout.root(_NEXT, digests))),
        Good("state/1/digests", Empty(), (frame,)),
        Good("state/1/piece", Empty(), (TensorFrame("uint8", (len(piece),), piece),)),
        Good("state/1/release", Empty()),
    ]
