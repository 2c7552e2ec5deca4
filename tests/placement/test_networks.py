"""The five networks of the DT-FM paper: as the file has them, and planned as well as its authors' code does."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from peerd.placement.cost import CostKind
from peerd.placement.search import SearchOptions, plan
from scripts.benchmarks import _placement_cases, placement
from tests.kit.amount import some

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT.parent / "shared/data/network-cases.json"


@pytest.mark.skipif(not FILE.exists(), reason="the file of the five networks is not beside the project")
def test_the_five_networks_are_those_of_the_file() -> None:
    found = json.loads(FILE.read_text())
    work = found["workload"]
    assert (work["stages"], work["pipelines"]) == (_placement_cases.STAGES, _placement_cases.PIPELINES)
    assert work["gradient_gb"] * 1e9 == _placement_cases.GRADIENT_BYTES
    assert work["activation_gb"] * 1e9 == pytest.approx(_placement_cases.ACTIVATION_BYTES, rel=1e-15)
    cases = _placement_cases.cases()
    assert [case.name for case in cases] == list(found["cases"])
    apart = ~np.eye(64, dtype=bool)
    for case in cases:
        delay_ms, gbit_s = case.matrices()
        assert (delay_ms[apart] == np.array(found["cases"][case.name]["delay_ms"])[apart]).all()
        assert (gbit_s[apart] == np.array(found["cases"][case.name]["bandwidth_gbps"])[apart]).all()


@pytest.mark.slow
@pytest.mark.parametrize("number", some((2, 3, 0, 1, 4), 2))
def test_each_network_is_planned_as_well_as_the_published_code_does(number: int) -> None:
    found = plan(
        _placement_cases.cases()[number].problem(), SearchOptions(evaluations=4000), Random(placement.SEED), lambda: 0.0
    )
    assert found.cost.kind is CostKind.LATENCY
    assert found.cost.total_s <= placement.TARGETS_S[number]
