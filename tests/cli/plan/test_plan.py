"""`peerd plan LINKS`: what it finds, how it is told, what it refuses, and that Ctrl+C ends it with the best so far."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from peerd.cli.cli import invoke
from peerd.cli.plan.plan_report import SolvedPlan, names_of
from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StagePlacement, StageWork
from peerd.placement.search import cost_of

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "configs" / "links.yaml"
LINKS = """devices:
  - {name: a, count: 3, place: here, memory_gb: 8}
  - {name: b, count: 3, place: there, memory_gb: 8}
places:
  - {inside: here, delay_ms: 1, rate_mbit: 800}
  - {inside: there, delay_ms: 1, rate_mbit: 800}
  - {between: [here, there], delay_ms: 100, rate_mbit: 8}
workload:
  stages: 2
  gradient_mb: 100
  activation_mb: 1
  microbatches: 6
  memory_gb: 1
"""
QUICK = ("--seconds", "0.3")


@pytest.fixture
def links(tmp_path: Path) -> Path:
    file = tmp_path / "links.yaml"
    file.write_text(LINKS)
    return file


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert invoke(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert invoke(["plan", *map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_peers_that_average_much_are_put_together(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, links, *QUICK, "--json"))
    assert sorted(map(sorted, found["stages"])) == [["a-1", "a-2", "a-3"], ["b-1", "b-2", "b-3"]]
    assert found["cost"] == "steady"
    assert found["optimal"] is True
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()))
    assert 2 * found["step_s"] < found["random_mean_s"]
    assert len(found["random_s"]) == 20
    assert {name for pair in found["follows"][0] for name in pair} == {*["a-1", "a-2", "a-3", "b-1", "b-2", "b-3"]}
    other = json.loads(told(capsys, links, *QUICK, "--json", "--cost", "latency"))
    assert other["cost"] == "latency"
    assert other["parts_s"]["links"] > found["parts_s"]["links"]


@pytest.mark.slow
def test_the_screen_has_stages_cost_gain_followers_and_picture_at_80_columns(
    links: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = told(capsys, links, *QUICK)
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "6 devices in 2 places; 2 stages, 6 microbatches a step" in words
    assert "the steady state of a full pipeline" in words
    assert "times as fast as random placement: the mean of 20 is" in words
    assert "a-1..3" in words
    assert "0 > 1" in words
    assert "optimal by this cost: all placements were examined" in words
    assert "\x1b" not in out
    picture = out.partition("by stage:\n")[2].splitlines()
    assert picture[1] == "0   .... @@@@@@"


@pytest.mark.slow
def test_a_placement_that_is_written_can_be_begun_from_and_nobody_moves_for_nothing(
    links: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.yaml"
    told(capsys, links, *QUICK, "--out", out)
    written = yaml.safe_load(out.read_text())
    assert sorted(map(sorted, written["stages"])) == [["a-1", "a-2", "a-3"], ["b-1", "b-2", "b-3"]]
    assert len(written["follows"]) == 1
    again = json.loads(told(capsys, links, *QUICK, "--from", out, "--json"))
    assert again["from"]["moved"] == 0
    assert again["stages"] == written["stages"]
    out.write_text("stages:\n  - [a-1, b-2, a-3]\n  - [b-1, a-2, b-3]\n")
    words = " ".join(told(capsys, links, *QUICK, "--from", out).split())
    assert "2 devices would move" in words


def planned(names: list[str], place: str = "") -> SolvedPlan:
    devices = tuple(PlanDevice(name, place=place) for name in names)
    network = Network(np.zeros((len(names),) * 2), np.ones((len(names),) * 2))
    problem = PlacementProblem(devices, network, (StageWork(1.0, 1.0),))
    placement = StagePlacement((0,) * len(names))
    return SolvedPlan("links.yaml", problem, placement, cost_of(problem, placement), 0, 1.0, False, False, [])


def test_names_that_count_on_are_told_in_one_and_many_by_their_place() -> None:
    names = ["a-1", "a-2", "a-3", "b", "c-9", "c-10", "d-01", "d-02", "e-7"]
    assert names_of(planned(names), range(len(names))) == "a-1..3, b, c-9..10, d-01, d-02, e-7"
    odd = [f"x-{2 * n}" for n in range(1, 21)]
    assert names_of(planned(odd, "tokyo"), range(20)) == "20 in tokyo"
    assert names_of(planned(odd), range(20)) == "x-2, x-4, x-6, x-8, x-10, x-12, x-14 and 13 more: --json, --out"


def test_what_a_file_calls_its_devices_cannot_write_to_the_terminal(
    links: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links.write_text(LINKS.replace("name: b", 'name: "b\\e[2J"'))
    message = refused(capsys, links)
    assert "printable characters" in message
    assert "\x1b" not in message


def test_a_device_alone_has_a_plan(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links.write_text("devices: [{name: only}]\nworkload: {stages: 1, gradient_mb: 5, activation_mb: 1}\n")
    words = " ".join(told(capsys, links, *QUICK).split())
    assert "1 device; 1 stage, 1 microbatch a step a step takes 0 ms" in words
    assert "fixed before" not in words
    assert words.endswith("0 1 only")


@pytest.mark.slow
def test_stages_of_a_run_are_placed_by_their_own_sizes(
    links: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("run: r\nmodel: {layers: 6}\npipeline: {stages: 3}\nbatch: {target_samples: 80}\n")
    found = json.loads(told(capsys, links, "--model", run, *QUICK, "--json"))
    assert len(found["stages"]) == 3
    words = " ".join(told(capsys, links, "--model", run, *QUICK).split())
    assert "3 stages, 10 microbatches a step" in words


def test_a_plan_that_the_run_obeys_is_made_though_it_is_missing_or_of_other_stages(
    links: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, placement = tmp_path / "run.yaml", tmp_path / "placement.yaml"
    for stages in (2, 3):  # at first there is none, then it is of two stages
        run.write_text(
            f"run: r\nmodel: {{layers: 6}}\npipeline: {{stages: {stages}, placement: plan, plan: {placement}}}\n"
        )
        told(capsys, links, "--model", run, *QUICK, "--out", placement)
        assert len(yaml.safe_load(placement.read_text())["stages"]) == stages
        told(capsys, "--model", run)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("stages: 2", "stages: 7"), "LINKS, line 8: workload.stages is 7, and LINKS has 6 devices; allowed: one"),
        (
            ("  memory_gb: 1\n", "  memory_gb: 9\n"),
            "LINKS, line 8: stage 0 needs 9.0 GB of memory, and the largest device, a-1, has 8.0 GB; allowed: devices",
        ),
        (("delay_ms: 100, rate_mbit: 8", "delay_ms: -1, rate_mbit: 8"), "LINKS, line 7: places[2].delay_ms is -1"),
        (("delay_ms: 100, rate_mbit: 8", "delay_ms: .nan, rate_mbit: 8"), "LINKS, line 7: places[2].delay_ms is nan"),
        (("count: 3, place: there", "place: there"), "LINKS: no placement found in which all peers"),
    ],
)
def test_what_cannot_be_placed_is_said_with_file_and_line(
    change: tuple[str, str], said: str, links: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LINKS
    if said.startswith("LINKS: no placement"):
        text = text.replace("delay_ms: 100, rate_mbit: 8", "unreachable: true").replace("stages: 2", "stages: 4")
    links.write_text(text.replace(*change))
    message = refused(capsys, links, *QUICK).replace(str(links), "LINKS")
    assert said in message
    assert "Traceback" not in message


def test_stages_that_need_more_than_most_devices_have_are_counted(
    links: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LINKS.replace("count: 3, place: here, memory_gb: 8", "place: here, memory_gb: 80")
    links.write_text(text.replace("  memory_gb: 1\n", "  memory_gb: 9\n"))
    message = refused(capsys, links, *QUICK)
    assert (
        "stage 1 needs 9.0 GB of memory, and only 1 of the devices have as much, for 2 stages that need it" in message
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to plan; pass LINKS.yaml"),
        (("LINKS", "--speed", "3"), "--speed is for a plan without LINKS"),
        (("LINKS", "--seconds", "0"), "--seconds is 0; allowed: above 0 to 86,400"),
        (("LINKS", "--model", str(ROOT / "configs/own_model.yaml")), "own_model.py:layers knows the sizes"),
        (("--model", str(ROOT / "configs/tiny.yaml"), "--out", "x"), "--from and --out need a links file"),
        (("NOWHERE",), "there is no file NOWHERE"),
        ((str(ROOT / "configs/tiny.yaml"),), "is not a known key"),
    ],
)
def test_wrong_usage_is_one_message(
    words: tuple[str, ...], said: str, links: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *(str(links) if word == "LINKS" else word for word in words))


def test_links_without_a_workload_need_a_run(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links.write_text(LINKS.partition("workload:")[0])
    assert "has no workload; add --model RUN.yaml" in refused(capsys, links)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages:\n  - [a-1]\n", "line 1: stages has 1 stages; allowed: 2"),
        ("stages:\n  - [a-1]\n  - [c]\n", "line 3: stages[1][0] is c, which the links file does not have"),
        ("stages:\n  - [a-1]\n  - [a-1]\n", "line 3: stages[1][0] is a-1 a second time, first on line 2"),
        ("stages:\n  - [a-1]\n  - []\n", "line 3: stages[1] is empty; allowed: one device at least"),
        ("stage: []\n", "stage is not a known key; did you mean stages?"),
    ],
)
def test_a_placement_with_a_mistake_is_refused(
    text: str, said: str, links: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "placement.yaml"
    file.write_text(text)
    message = refused(capsys, links, "--from", file)
    assert said in message
    assert str(file) in message


@pytest.mark.slow
@pytest.mark.parametrize("what", ["links", "model"])
def test_it_works_where_torch_cannot_be_imported(links: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "run.yaml").write_text("run: r\n")
    options = [str(links), "--seconds", "0.2"] if what == "links" else ["--model", str(tmp_path / "run.yaml")]
    argv = ["plan", *options, "--json"]
    code = f"import sys; sys.modules['torch'] = None\nfrom peerd.cli.cli import invoke; sys.exit(invoke({argv!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["stages"]


@pytest.mark.slow
def test_ctrl_c_ends_the_search_with_the_best_so_far() -> None:
    """The signal comes while the search asks for the time, so that it is under way."""
    code = (
        "import os, signal, sys\n"
        "from peerd.cli.plan import plan_search\n"
        "clock = plan_search.SearchWatch.clock\n"
        "def stopped(watch):\n"
        "    if not watch.stopped and clock(watch) - watch.began > 0.2: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return clock(watch)\n"
        "plan_search.SearchWatch.clock = stopped\n"
        "from peerd.cli.cli import invoke\n"
        f"sys.exit(invoke(['plan', {str(EXAMPLE)!r}, '--seconds', '3000', '--json']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["stopped"] is True
    assert found["step_s"] < found["random_mean_s"]
