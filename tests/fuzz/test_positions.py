"""Strangers around a run whose position is proven: the scene of these sessions notices what counts without proof, and a
new conductor keeps its duty.
"""

from __future__ import annotations

import pytest
import trio

from peerd.messages.swarm import Conducts
from peerd.swarm.conductor import commit_proofs
from peerd.swarm.positions.proven_positions import ProvenPositions
from tests.fuzz.calls import Good
from tests.fuzz.position_points import POINTS, Asked, announced
from tests.fuzz.position_scene import proven_run
from tests.fuzz.sessions import first_failure
from tests.worlds.simulation.clock import run_virtual

CONTESTED_S = 30.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "place", "careless", "told"),
    [
        pytest.param(1, ProvenPositions, "proves", "what was believed of strangers has [Position(", id="claims"),
        pytest.param(2, commit_proofs, "has_committed", "a proof of Position(", id="proofs"),
    ],
)
def test_the_scene_notices_what_counts_without_proof(
    number: int, place: object, careless: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, careless, lambda *_: True)
    assert told in first_failure(1, range(number, number + 1), POINTS, proven_run)


class Rival(Asked):
    """Says that it conducts, in the next term and where the run is."""

    asked = 0

    def conducts(self, _: bytes) -> list[Good]:
        self.asked += 1
        return [Good("swarm/6/who", Conducts(self.scene.services.conducting.term + 1, self.scene.places[-1]))]


async def _contested() -> None:
    async with proven_run() as made:
        conducting = made.services.conducting
        rival, term = await announced(made, Rival), conducting.term
        conducting._duty._resign("it begins again")
        with trio.move_on_after(CONTESTED_S):
            while True:
                await rival.hear()
                await rival.pump()
        assert rival.asked > 2
        assert conducting.term == term + 1, "it took the duty on, and gave it up"
        await rival.raw.aclose()
        assert await made.check() == ""


def test_a_stranger_that_says_it_conducts_does_not_keep_a_new_conductor_from_its_duty() -> None:
    """The conductor has made no step yet, and members that it knows report to it."""
    run_virtual(_contested, seed=1)
