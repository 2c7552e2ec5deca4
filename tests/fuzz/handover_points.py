"""Points within hand-over: a trainer with tickets, a peer of the stage before, the next stage, and a relay, each as it
should be up to some moment; then it calls with anything, and answers anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz import goods
from tests.fuzz import handover_goods as handing
from tests.fuzz.answering import Answering
from tests.fuzz.calls import Good, Menu
from tests.fuzz.goods import SELF
from tests.fuzz.service_points import ask, at_mate, back_to_start, give_room, served
from tests.fuzz.session_points import entered
from tests.fuzz.sessions import Point, Stage, point
from tests.worlds.network.hostile import Hostile

POINTS: list[Point] = []
_ANSWERS = {"handover/2/pass": handing.to_pass, "handover/2/relay": handing.to_carry_on}


async def _answering(stage: Stage) -> Hostile:
    await back_to_start(stage)
    return Answering(await entered(stage), random.Random(stage.ephemeral), handing.POOL, _ANSWERS)


@point("as a trainer that hands over", Menu(handing.POOL, [*handing.AT_FIRST, goods.TRAINER]).talk(), POINTS)
async def _trainer(stage: Stage) -> Sequence[Hostile]:
    await back_to_start(stage)
    await give_room(stage)
    hostile = await entered(stage)
    assert await ask(hostile, handing.AT_FIRST[0])
    return [hostile]


@point("as a peer that hands on", Menu(handing.POOL, [*handing.AT_LAST, goods.MEMBER]).talk(), POINTS)
async def _hands_on(stage: Stage) -> Sequence[Hostile]:
    """It serves stage 0, as the last stage's peer hears, and brings the tickets of an honest trainer."""
    await back_to_start(stage)
    await give_room(stage)
    before = served(stage).mate.role.post.handover
    before._before = before._before | {SELF.text, goods.HOST.text}
    hostile = await at_mate(stage, stage.ephemeral)
    assert await ask(hostile, handing.AT_LAST[0])
    return [hostile]


async def _over(stage: Stage, menu: Sequence[Good], is_listed: bool) -> Sequence[Hostile]:
    hostile = await _answering(stage)
    await give_room(stage)
    served(stage).served.role.post.handover.note_members([handing.AS_MEMBER] if is_listed else [])
    await ask(hostile, menu[0])
    return [hostile]


@point("as the next stage", Menu(handing.POOL, handing.OVER_SELF).talk(), POINTS)
async def _next_stage(stage: Stage) -> Sequence[Hostile]:
    """The host hands on to it, by tickets of its own."""
    return await _over(stage, handing.OVER_SELF, is_listed=True)


@point("as a trainer that carries calls", Menu(handing.POOL, handing.AT_FIRST).talk(), POINTS)
async def _carries(stage: Stage) -> Sequence[Hostile]:
    """The host cannot hand on to anybody, and asks it to."""
    return await _over(stage, handing.AT_FIRST, is_listed=False)


@point("as a hop whose calls are carried", Menu(handing.POOL, [*handing.CARRY, *handing.AT_LAST]).talk(), POINTS)
async def _is_carried(stage: Stage) -> Sequence[Hostile]:
    """The host is a trainer with an attempt under way, which leads over the hostile peer."""
    await back_to_start(stage)
    await give_room(stage)
    served(stage).relaying._open[handing.TICKET_OF_HOST.signature] = handing.TICKET_OF_HOST
    hostile = await entered(stage)
    assert await ask(hostile, handing.CARRY[0])
    return [hostile]
