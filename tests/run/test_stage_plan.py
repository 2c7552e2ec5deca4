"""Plans that runs obey: read from a placement file, published with the run file, each mistake in one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from peerd.cli.cli import invoke
from peerd.core.errors import ConfigError
from peerd.core.keys import Keypair
from peerd.core.limits import PLAN_BYTES, RUN_FILE_BYTES
from peerd.messages.run_link import RunFileAnswer, shared_file, shared_run
from peerd.run.check import check
from peerd.run.config import load_run
from peerd.run.runfile import PipelineSection, PlanSection, RunFile, fingerprint
from peerd.run.stage_plan import followers, planned_stage

RUN = "run: r\npipeline: {{stages: 2, placement: plan, plan: {plan}}}\n"


def peer(number: int) -> str:
    return Keypair(random.Random(f"plan {number}").randbytes(32)).peer_id.text


A, B, C = (peer(number) for number in range(3))
PLAN = f"""
stages: [[near, {B}], [far]]
follows: [[[near, far], [{B}, far]]]
peers: {{near: {A}, far: {C}}}
"""


def loaded(folder: Path, plan: str, run: str = RUN) -> RunFile:
    (folder / "plan.yaml").write_text(plan)
    (folder / "run.yaml").write_text(run.format(plan=folder / "plan.yaml"))
    return load_run(folder / "run.yaml").run


def test_a_plan_names_peers_by_id_or_by_a_name_of_its_own(tmp_path: Path) -> None:
    run = loaded(tmp_path, PLAN)
    assert run.plan == PlanSection(stages=[[A, B], [C]], follows=[[[0, 0], [1, 0]]])
    assert [planned_stage(run, one) for one in (A, B, C, peer(9))] == [0, 0, 1, None]
    assert followers(run.plan) == {A: [C], B: [C]}
    assert planned_stage(RunFile(run="r"), A) is None


def test_a_plan_travels_with_the_run_file_and_its_path_does_not(tmp_path: Path) -> None:
    run = loaded(tmp_path, PLAN)
    told = shared_run(RunFileAnswer(shared_file(run), b""), "r")
    assert told.plan == run.plan
    assert told.pipeline.plan == ""
    assert check(told) == []
    assert fingerprint(told) == fingerprint(run)


def test_a_run_without_a_plan_keeps_its_fingerprint_and_another_plan_is_another_run(tmp_path: Path) -> None:
    run, other = loaded(tmp_path, PLAN), loaded(tmp_path, PLAN.replace("[near, far], ", ""))
    assert fingerprint(run) != fingerprint(other)
    assert b"plan" not in msgspec.json.encode(msgspec.to_builtins(RunFile(run="r").pipeline)).replace(b'"plan":""', b"")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            "stages: [[near], [far]]",
            "stages: 'near' (and 1 more) is not a peer; allowed: a peer id, or a name with its peer id in",
        ),
        (f"stages: [[{A}]]", "has 1 stages; allowed: 2, as pipeline.stages says"),
        (f"stages: [[{A}], [{A}]]", "twice; allowed: each peer in one stage"),
        (f"stages: [[{A}], [{B}]]\nfollows: [[[{B}, {A}]]]", "is not a pair of a peer of stage 0 and one of stage 1"),
        (f"stages: [[{A}], [{B}]]\nfollows: []\nfollow: []", "follow is not a known key; did you mean follows?"),
        (
            f"stages: [[{A}], [{B}]]\nfollows: [[], []]",
            "follows: has 2 lists; allowed: one for each stage but the last",
        ),
        ("stages: 5", "stages is 5"),
        ("stages: [", "plan.yaml"),
    ],
)
def test_a_plan_that_cannot_be_obeyed_is_one_sentence(tmp_path: Path, plan: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, plan)
    message = str(raised.value)
    assert words in message
    assert "pipeline.plan" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ("{stages: 2, placement: plan}", "pipeline.placement is plan; allowed with pipeline.plan: FILE"),
        ("{stages: 2, plan: x.yaml}", "pipeline.plan is given, but pipeline.placement is load; allowed: plan"),
        ("{stages: 2, placement: plan, plan: no.yaml}", "no.yaml"),
    ],
)
def test_a_plan_and_its_key_go_together(tmp_path: Path, pipeline: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, PLAN, f"run: r\npipeline: {pipeline}\n".replace("{", "{{").replace("}", "}}"))
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_hostile_plan_is_refused_by_its_size_and_its_places() -> None:
    pipeline = PipelineSection(stages=2, placement="plan")
    many = [peer(number) for number in range(PLAN_BYTES // 50)]
    for plan, words in (
        (PlanSection(stages=[many[:-1], many[-1:]]), "bytes; allowed: up to"),
        (PlanSection(stages=[[A], [B]], follows=[[[0, 1]]]), "is not an index into that stage"),
        (PlanSection(stages=[[A], [B]], follows=[[[-1, 0]]]), "is not an index into that stage"),
        (PlanSection(stages=[[A], [B]], follows=[[[0]]]), "is not an index into that stage"),
        (PlanSection(stages=[[A], ["../etc"]]), "stage 1 has '../etc'; allowed: peer ids"),
    ):
        ((key, message),) = check(RunFile(run="r", pipeline=pipeline, plan=plan))
        assert key == "pipeline.plan"
        assert words in message
    fits = PlanSection(stages=[many[:400], many[400:800]], follows=[[[n, n] for n in range(400)]])
    run = RunFile(run="r", pipeline=pipeline, plan=fits)
    assert check(run) == []
    assert len(shared_file(run)) <= RUN_FILE_BYTES


def test_a_command_with_a_plan_of_unknown_names_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError):
        loaded(tmp_path, "stages: [[near], [far]]")
    assert invoke(["doctor", "--model", str(tmp_path / "run.yaml")]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.endswith("or a name with its peer id in the table `peers` (peerd identity prints it)")


def test_a_plan_comes_from_a_file_or_from_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    both = RUN + f"plan: {{{{stages: [[{A}], [{B}]]}}}}\n"
    with pytest.raises(
        ConfigError, match=r"pipeline.plan is given together with the section plan; allowed: only one of them"
    ):
        loaded(tmp_path, PLAN, both)
