"""A tenure: what it tells of its machine names peers, not posts, and stays within its bounds."""

from __future__ import annotations

import random

from trio.testing import MockClock

from peerd.core.keys import Keypair
from peerd.core.limits import WAITS_CHARS
from peerd.messages.proof import is_granted
from peerd.swarm.batch.grants import GrantSigner
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.events import ConductorConfig, MemberGone
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

RUN = b"r" * 16
OWN = Keypair.from_seed(b"conductor".ljust(32, b"."))


def tenure(stages: int = 1) -> Tenure:
    machine = Conductor(ConductorConfig(stages=stages, microbatches=1), random.Random(1), 0.0)
    return Tenure(3, machine, GrantSigner(RUN, OWN.sign), random.Random(2))


async def test_members_are_told_by_their_peers_and_once(autojump_clock: MockClock) -> None:
    made = tenure()
    made.machine.handle(0.0, hello("a/0"))
    news = made.members_since(0)
    assert news is not None
    assert [(m.peer, m.stage) for m in news.changed] == [("a", 0)]
    assert made.members_since(news.version) is None
    made.machine.handle(1.0, MemberGone("a/0"))
    later = made.members_since(news.version)
    assert later is not None
    assert later.gone == ["a/0"]


async def test_what_is_waited_for_is_told_within_its_bound(autojump_clock: MockClock) -> None:
    assert tenure(1).waits_for() == "stage 0 has no peers"
    assert len(tenure(WAITS_CHARS).waits_for()) == WAITS_CHARS


async def test_grants_are_of_its_term_and_nothing_is_foretold_at_its_begin(autojump_clock: MockClock) -> None:
    made = tenure()
    assert (made.step, made.forecast(), made.grant(0, "t", [])) == (0, None, None)
    granted = made.grant(0, "t", [4])
    assert granted is not None
    assert (granted.term, granted.step) == (3, 0)
    assert is_granted(OWN.peer_id, RUN, "t", granted)
