"""Claims of positions and commit proofs in a `position_scene`: reports that a conductor takes from strangers, questions
for proofs, and what a stranger answers when it is asked for one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence

import msgspec
import trio

from peerd.core.keys import Keypair
from peerd.core.limits import KEPT_SETS, MEMBERS, SAVED_TOLD, SEEN_POSITIONS
from peerd.dht import codec as dht
from peerd.messages.commits import CommitProof, Committed, ProofShown, ShowProof
from peerd.messages.encoding import decode, encode
from peerd.messages.progress import KeptCheckpoints, StageProgress, kept_key, stage_key
from peerd.messages.proof import commit_signature
from peerd.messages.swarm import LAST_STEP, Conducts, Mbs, Position, PostsHeld
from peerd.swarm.roster import START
from tests.fuzz import goods
from tests.fuzz.bodies import Pool
from tests.fuzz.calls import Good
from tests.fuzz.position_scene import MARK, RUN
from tests.fuzz.session_points import WHO
from tests.worlds.network.hosts import keypair
from tests.worlds.simulation.clock import EPOCH_S

OTHER_RUN, DIGEST = bytes(16), b"m" * 32
MEMBERS_KEYS = [keypair(name) for name in ("host", "mate", "third")]
STRANGERS = [WHO.identity, *(keypair(f"stranger {number}") for number in range(5))]
BEHIND, AHEAD = Position(1, b"behind"), Position(5, b"ahead")
FAR = Position(LAST_STEP, b"f" * 16)
ELSEWHERE = (AHEAD, BEHIND, FAR, START, None)
CLAIMS_PER_SESSION = 8
POOL = Pool(
    (*goods.POOL.texts, keypair("third").peer_id.text, *(key.peer_id.text for key in STRANGERS)),
    (*goods.POOL.data, MARK, OTHER_RUN, DIGEST, BEHIND.lineage, AHEAD.lineage, FAR.lineage),
)


def show(position: Position, run: bytes = MARK) -> Good:
    return Good("proofs/1/show", ShowProof(run, position))


def asked(places: Iterable[Position]) -> list[Good]:
    """Questions for proofs of these positions, and of others."""
    known = [show(place) for place in (START, BEHIND, AHEAD, FAR, *places)]
    return [*known, show(BEHIND, OTHER_RUN), *(show(Position(place.step, b"")) for place in places)]


# --- claims ----------------------------------------------------------------------------------------------------------
def _position(rng: random.Random, places: Sequence[Position]) -> Position:
    """Behind, at or ahead of the run; mostly one that nobody has named before."""
    step = rng.choice((0, 1, 1, 2, 2, 3, 4, 1 << 20, LAST_STEP - 1, LAST_STEP))
    made_up = Position(step, rng.choice((rng.randbytes(8), rng.randbytes(16), b"", places[-1].lineage)))
    return rng.choice((made_up, made_up, made_up, BEHIND, AHEAD, FAR, START, *places))


def _positions(rng: random.Random, places: Sequence[Position], most: int) -> list[Position]:
    """None, some, or as many as fit; or one of them again and again."""
    found = [_position(rng, places) for _ in range(rng.choice((0, 1, 2, 3, most)))]
    return found if rng.random() < 0.7 else found[:1] * rng.choice((2, most))


def agreed(stage: int, position: Position) -> Good:
    """A report that names one position throughout: strangers at all stages may agree on it."""
    body = msgspec.structs.replace(goods.MEMBER.body, run=MARK, stage=stage, position=position, saved=[position])
    return Good("swarm/6/member", msgspec.structs.replace(body, held=Mbs(), witnessed=[position], wait_s=0.0))


def claim(rng: random.Random, places: Sequence[Position]) -> Good:
    """A report of a stranger as a member of either stage."""
    return Good(
        "swarm/6/member",
        msgspec.structs.replace(
            goods.MEMBER.body,
            run=MARK,
            session=rng.choice((5, 5, rng.getrandbits(40))),
            stage=rng.choice((0, 1)),
            position=_position(rng, places),
            prepared=rng.choice((None, _position(rng, places))),
            saved=_positions(rng, places, SAVED_TOLD),
            witnessed=_positions(rng, places, SEEN_POSITIONS),
            held=rng.choice((Mbs(), Mbs(), None)),
            digest=rng.choice((b"", DIGEST)),
            term=rng.choice((1, 1, 2, 9, 1 << 40)),
            wait_s=rng.choice((0.0, 0.5, 5.0)),
        ),
    )


def claims(rng: random.Random, places: Sequence[Position]) -> list[Good]:
    """Reports of one session; the next one's are others."""
    both = [agreed(stage, rng.choice((BEHIND, AHEAD, FAR))) for stage in (0, 1)]
    return [*both, *(claim(rng, places) for _ in range(CLAIMS_PER_SESSION))]


# --- the directory ---------------------------------------------------------------------------------------------------
def announced(stage: int, place: Position) -> Good:
    """A stranger's record as a peer of a stage that is at this place, and conducts itself."""
    name, since = WHO.identity.peer_id.text, EPOCH_S + 1e5
    told = StageProgress(stage, since, place.step, 0, 1e3, "cpu", name, "", [], also=[0, 1])
    return _stored(goods.signed_record(stage_key(RUN.run, stage), encode(told), b"", *_now()))


def kept(places: Sequence[Position]) -> Good:
    """A stranger's record as a keeper of checkpoints."""
    told = KeptCheckpoints([*places, BEHIND, AHEAD, FAR][:KEPT_SETS], [])
    return _stored(goods.signed_record(kept_key(RUN.run), encode(told), b"", *_now()))


def _now() -> tuple[int, float]:
    """The version and the end of a record that is made now."""
    now = trio.current_time()
    return int(now * 1000) + 1, now + 60


def _stored(record: bytes) -> Good:
    return Good("dht/4/store", dht.StoreMessage([record], None))


# --- proofs that prove nothing ---------------------------------------------------------------------------------------
@functools.lru_cache(10_000)
def _signed(key: Keypair, position: Position, stage: int = 0, run: bytes = MARK, name: str = "") -> Committed:
    """`name`: whose signature it is said to be."""
    signature = commit_signature(key.sign, run, stage, position, DIGEST)
    return Committed(name or key.peer_id.text, stage, DIGEST, signature)


def _unsigned(name: str, size: int = 64) -> Committed:
    return Committed(name, 0, DIGEST, bytes(size))


def _lists(place: Position) -> list[list[Committed]]:
    """Signatures of which no more than a third of the run's members are valid for this position of this run."""
    names = [key.peer_id.text for key in MEMBERS_KEYS]
    liar = MEMBERS_KEYS[-1]  # one of three members signs all that strangers want
    return [
        [],
        [_unsigned(name) for name in names],
        [_unsigned(name, 0) for name in names],
        [_signed(key, place) for key in STRANGERS],
        [_signed(STRANGERS[0], place, name=name) for name in names],
        [_signed(key, place, run=OTHER_RUN) for key in MEMBERS_KEYS],
        [_signed(key, Position(place.step, b"another")) for key in MEMBERS_KEYS],
        [msgspec.structs.replace(_signed(key, place), stage=1, digest=b"") for key in MEMBERS_KEYS],
        [_signed(liar, place)] * 3,
        [_signed(liar, place, stage) for stage in range(64)],
        [_signed(liar, place), *(_signed(key, place) for key in STRANGERS), *map(_unsigned, names)],
        [_unsigned(name) for name in names for _ in range(100)],
        [_unsigned(text) for text in ("", "x", "\0", "é", "1" * 64)],
    ]


def proofs(place: Position) -> list[ProofShown]:
    """Returns answers to a request for a proof of `place`, none of which is a proof."""
    shown = [CommitProof(place, signed) for signed in _lists(place)]
    other = Position(place.step, b"another")  # a proof, but of something else
    shown.append(CommitProof(other, [_signed(key, other) for key in MEMBERS_KEYS]))
    shown.append(CommitProof(FAR, [_signed(key, FAR, run=OTHER_RUN) for key in MEMBERS_KEYS]))
    return [ProofShown(None), *map(ProofShown, shown)]


@functools.cache
def _long() -> list[list[Committed]]:
    """As many signatures as a proof may have, one more, and more than fit into a message."""
    many = [_unsigned(MEMBERS_KEYS[number % 3].peer_id.text) for number in range(MEMBERS + 1)]
    return [many[:-1], many, many * 2]


def to_show(body: bytes) -> list[Good]:
    """Answers to a question for a proof."""
    place = decode(ShowProof, body).position
    long = [ProofShown(CommitProof(place, signed)) for signed in _long()]
    return [Good("proofs/1/show", one) for one in (*proofs(place) * 3, *long)]


def to_who(places: Sequence[Position | None], term: int) -> list[Good]:
    """A stranger says that it conducts, at one of these positions. `term`: that of the conductor."""
    terms = (1, term, term + 1, term + 1, term + 2, 1 << 40)
    return [Good("swarm/6/who", Conducts(told, place)) for told in terms for place in places]


HELD = Good("posts/1/held", PostsHeld([0, 1]))
