"""Strangers around a run whose position is proven: the scene of these sessions notices what counts without proof."""

from __future__ import annotations

import pytest

from peerd.machine.positions.proven_positions import ProvenPositions
from peerd.service.conductor import commit_proofs
from tests.fuzz.position_points import POINTS
from tests.fuzz.position_scene import proven_run
from tests.fuzz.sessions import first_failure


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
