"""Points around the proof of positions: one that asks for commit proofs, members that claim positions behind and ahead,
and a stranger that is asked for proofs: by the conductor, by a new one while it looks for the position, by a keeper.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import trio

from peerd.messages.commits import ProofShown
from peerd.messages.encoding import decode
from peerd.messages.swarm import Position
from tests.fuzz import goods
from tests.fuzz import position_goods as claimed
from tests.fuzz.answering import Answering, Answers
from tests.fuzz.calls import Good, Menu
from tests.fuzz.position_scene import ProvenStage, proven_run
from tests.fuzz.service_points import ask
from tests.fuzz.session_points import entered
from tests.fuzz.sessions import Point, Stage, Talk, point
from tests.worlds.network.hostile import Hostile, enter, secrets
from tests.worlds.simulation.clock import run_virtual

POINTS: list[Point] = []
WITHIN_S = 8.0  # virtual: until the host asks for a proof


def _scene(stage: Stage) -> ProvenStage:
    assert isinstance(stage, ProvenStage)
    return stage


@functools.cache
def _places() -> list[Position]:
    """The positions of the run, the same in every scene: a session has to know them before it begins."""

    async def learned() -> list[Position]:
        async with proven_run() as made:
            return list(made.places)

    return run_virtual(learned, seed=1)


def _talk(menu: Callable[[random.Random, Sequence[Position]], Sequence[Good]]) -> Talk:
    replies = [*goods.REPLIES, *claimed.proofs(claimed.AHEAD)]
    return lambda rng: Menu(claimed.POOL, menu(rng, _places()), replies).talk()(rng)


CLAIMS = _talk(claimed.claims)


@point("as one that asks for commit proofs", _talk(lambda _, places: claimed.asked(places)), POINTS)
async def _asks(stage: Stage) -> Sequence[Hostile]:
    """Anybody is shown the proof, and may check it."""
    hostile = await entered(stage)
    for place in _scene(stage).places:
        shown = decode(ProofShown, await ask(hostile, claimed.show(place))).proof
        assert shown is not None
        assert {one.peer for one in shown.committed} == _scene(stage).member_ids
        assert not await ask(hostile, claimed.show(place, claimed.OTHER_RUN))
    return [hostile]


async def _other(stage: Stage) -> Hostile:
    """Another stranger than the one that all points have; in each session another one."""
    number, *rest = stage.ephemeral
    name = f"stranger {number % (len(claimed.STRANGERS) - 1)}"
    return await enter(stage.network, stage.addr, secrets(name), bytes((number ^ 1, *rest)))


async def _claim(stage: Stage, *strangers: Hostile) -> None:
    """Claims at both stages: one position of all strangers at first, and then any."""
    rng, places = random.Random(stage.ephemeral), _scene(stage).places
    agreed = rng.choice((claimed.AHEAD, claimed.BEHIND, claimed.FAR))
    for good in (*(claimed.agreed(number, agreed) for number in (0, 1)), *claimed.claims(rng, places)[:3]):
        for hostile in strangers:
            await ask(hostile, good)
            _scene(stage).note_believed()


@point("as a member of claimed positions", CLAIMS, POINTS)
async def _claims(stage: Stage) -> Sequence[Hostile]:
    strangers = await entered(stage), await _other(stage)
    await _claim(stage, *strangers)
    return strangers


class Asked(Answering):
    """A stranger that answers as it should until it has been asked for a proof."""

    def __init__(self, stage: Stage, entered: Hostile) -> None:
        self.asked_for = list[bytes]()
        answers: dict[str, Answers] = {
            "proofs/1/show": self._show,
            "swarm/6/who": self.conducts,
            "posts/1/held": [claimed.HELD],
        }
        super().__init__(entered, random.Random(stage.ephemeral), claimed.POOL, answers)
        self._new = Position(claimed.AHEAD.step, stage.ephemeral[:8])  # no other session has named it
        self.scene = _scene(stage)
        self._later = self._bad, self._bodies._wild
        self._bad = self._bodies._wild = 0.0

    def _show(self, body: bytes) -> list[Good]:
        self.asked_for.append(body)
        self._bad, self._bodies._wild = self._later
        return claimed.to_show(body)

    def conducts(self, _: bytes) -> list[Good]:
        places = [*claimed.ELSEWHERE, *self.scene.places] if self.asked_for else [self._new]
        return claimed.to_who(places, self.scene.services.conducting.term)

    async def until_asked(self) -> bool:
        with trio.move_on_after(WITHIN_S):
            while not self.asked_for and not self.ended:
                await self.hear()
                await self.pump()  # it answers pings, too
        return bool(self.asked_for)


async def announced(stage: Stage, kind: type[Asked] = Asked) -> Asked:
    """A stranger in the directory, as a peer of both stages and a keeper, that answers what it is asked."""
    hostile = kind(stage, await entered(stage))
    for good in (*(claimed.announced(number, claimed.AHEAD) for number in (0, 1)), claimed.kept(_scene(stage).places)):
        assert await ask(hostile, good)
    return hostile


@point("as a rival of the conductor, asked for proofs", CLAIMS, POINTS)
async def _rival(stage: Stage) -> Sequence[Hostile]:
    hostile = await announced(stage)
    assert await hostile.until_asked()
    _scene(stage).note_believed()
    return [hostile]


@point("as a member of a run that looks for its position", CLAIMS, POINTS)
async def _while_gathering(stage: Stage) -> Sequence[Hostile]:
    """The conductor starts over, as after it was lost, while strangers' claims and records are there."""
    hostile = await announced(stage)
    _scene(stage).services.conducting._duty._resign("it starts over")
    other = await _other(stage)
    await _claim(stage, hostile, other)
    assert await hostile.until_asked()
    _scene(stage).note_believed()
    return [hostile, other]


@point("as one of whom a keeper asks proofs", CLAIMS, POINTS)
async def _of_keeper(stage: Stage) -> Sequence[Hostile]:
    scene = _scene(stage)
    hostile = Asked(stage, await entered(stage))
    rng = random.Random(stage.ephemeral)
    place = rng.choice((claimed.AHEAD, claimed.BEHIND, claimed.FAR, Position(rng.getrandbits(20), rng.randbytes(8))))
    who = [goods.SELF, *[peer.host.id for peer in scene.members[1:]]]
    stage.nursery.start_soon(scene.keeper.collect, who, place)
    assert await hostile.until_asked()
    return [hostile]
