"""Members that rest: when one begins and ends, what is tried again, and who contributes when others are gone."""

from __future__ import annotations

import itertools

import pytest

from peerd.averaging.contributors import ContributorChoice
from peerd.messages.swarm import LineInfo, Position
from peerd.swarm.events import ConductorConfig
from peerd.swarm.roster import START, Roster
from peerd.swarm.steps.rest_choice import RestChoice
from tests.worlds.machines.conducting import hello

MBIT = 125_000.0
ELEMENTS = 5_000_000  # 20 MB: 1.6 s at 100 Mb/s, and 160 s at 1
FAST = ("a/0", "b/0", "c/0")


class Scene:
    """A stage whose members say what lines they have; each step takes what the model of lines and devices says."""

    def __init__(self, *, delayed: bool = False) -> None:
        self.roster = Roster(1, delayed=delayed)
        self.pace = dict.fromkeys((*FAST, "slow/0"), 1.0)
        config = ConductorConfig(stages=1, microbatches=30, delayed=delayed, weighs=True)
        self.resting = RestChoice(config, self.roster, lambda post: self.pace.get(post, 0.0))
        self.now, self.step = 0.0, 0
        self.lines: dict[str, float] = {}

    @property
    def current(self) -> Position:
        return Position(self.step, b"here") if self.step else START

    def come(self, post: str, mbit: float, *, measured: bool = False, position: Position | None = None) -> list[str]:
        """A member says hello; returns what the conductor notes."""
        self.line(post, mbit, measured=measured)
        self.roster.enter(hello(post, position or self.current))
        return [note.text for note in self.resting.came(self.now, post, self.current)]

    def line(self, post: str, mbit: float, *, measured: bool = False) -> None:
        self.lines[post] = mbit
        rate = mbit * MBIT
        line = LineInfo("node", rate, rate, ELEMENTS, "float32", 0, measured, measured)
        self.roster.note_line(post, 0, line, ())

    def make_steps(self, count: int) -> list[str]:
        """Steps of those that contribute; returns what the conductor notes."""
        notes = list[str]()
        for _ in range(count):
            workers = self.resting.at_work(0, self.current)
            self.now += 30 / sum(self.pace[post] for post in workers)
            self.resting.filled(self.now)
            self.now += ELEMENTS * 4 / (min(self.lines[post] for post in workers) * MBIT)
            self.step += 1
            for post in workers:
                self.roster.move(post, self.current, stepped=True)
            notes += [note.text for note in self.resting.step_made(self.now, self.current)]
            self.catch_up()
        return notes

    def catch_up(self) -> None:
        for post in self.roster.of_stage(0):
            if post not in self.resting and self.roster.entries[post].position != self.current:
                self.roster.move(post, self.current, stepped=False)


@pytest.fixture
def scene() -> Scene:
    found = Scene()
    for post in FAST:
        found.come(post, 100.0)
    found.make_steps(2)
    return found


def test_a_newcomer_with_a_slow_line_rests_before_it_has_fetched_anything(scene: Scene) -> None:
    [note] = scene.come("slow/0", 1.0, position=START)
    assert note.endswith("rests: with its gradients a step would take 127.5 s, and takes 11.6 s without them")
    assert "slow/0" in scene.resting
    assert scene.resting.at_work(0, scene.current) == [*FAST]
    rest = scene.resting.of("slow/0")
    assert rest is not None
    assert 20 * MBIT < rest.needed_bytes_per_s < 100 * MBIT
    assert scene.make_steps(20) == []


def test_a_newcomer_with_a_fast_line_contributes(scene: Scene) -> None:
    assert scene.come("slow/0", 100.0, position=START) == []
    assert "slow/0" not in scene.resting
    assert scene.make_steps(20) == []


def test_a_member_rests_by_the_second_step_that_it_slows_down_and_not_by_the_first(scene: Scene) -> None:
    scene.come("slow/0", 100.0)
    scene.make_steps(3)
    scene.line("slow/0", 1.0)
    assert scene.make_steps(1) == []
    [note] = scene.make_steps(1)
    assert "rests" in note


def test_a_member_that_states_a_better_line_contributes_again(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    scene.make_steps(3)
    scene.line("slow/0", 100.0)
    notes = scene.make_steps(3)
    assert len(notes) == 1
    assert "will contribute again" in notes[0]
    assert "slow/0" not in scene.resting


def test_a_stated_line_is_never_tried_again(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    assert scene.make_steps(5000) == []
    assert scene.now > 50_000


def test_a_measured_line_is_tried_again_ever_more_rarely_and_tries_cost_little(scene: Scene) -> None:
    scene.come("slow/0", 1.0, measured=True, position=START)
    began, tries = scene.now, list[float]()
    while scene.now < began + 14 * 86_400.0:
        if any("will contribute again" in note for note in scene.make_steps(1)):
            tries.append(scene.now - began)
    print([round(at) for at in tries])
    assert 3 <= len(tries) <= 10
    pauses = [after - before for before, after in zip([0.0, *tries], tries, strict=False)]
    assert all(after > 1.5 * before for before, after in itertools.pairwise(pauses[:4])), pauses
    costs_s = 2 * 160.0 * len(tries)
    assert costs_s < 0.1 * (scene.now - began)


def test_a_member_whose_line_got_better_meanwhile_stays_when_it_is_tried(scene: Scene) -> None:
    scene.come("slow/0", 1.0, measured=True, position=START)
    while not any("will contribute again" in note for note in scene.make_steps(1)):
        assert scene.now < 100_000
    scene.line("slow/0", 100.0, measured=True)
    assert scene.make_steps(50) == []


def test_a_weak_device_rests_where_it_sums_for_others_and_its_line_is_not_the_reason() -> None:
    scene = Scene()
    for post in ("a/0", "b/0", "c/0", "d/0"):
        scene.pace[post] = 1.0
        scene.come(post, 10.0)
    scene.pace["weak/0"] = 0.001
    scene.come("weak/0", 10.0)
    [note] = scene.make_steps(3)
    assert "weak" in note
    split = scene.roster.lines.split(0, tuple(scene.resting.at_work(0, scene.current)))
    assert split is not None
    assert [party.share > 0 for party in split.parties if party.peer == "weak/0"] == [True]


def test_of_two_members_nobody_rests() -> None:
    scene = Scene()
    scene.come("a/0", 100.0)
    scene.come("slow/0", 1.0)
    assert scene.make_steps(10) == []


def test_those_that_rest_contribute_when_too_few_others_are_left(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    scene.make_steps(1)
    for post in FAST:
        assert "slow/0" in scene.resting
        scene.roster.remove(post)
        scene.resting.lost(post, 0, scene.current)
    assert "slow/0" not in scene.resting


def test_a_member_that_was_lost_while_it_rested_is_no_helper_any_more(scene: Scene) -> None:
    scene.come("slow/0", 5.0, position=START)
    group = FAST
    with_it = scene.roster.lines.split(0, group)
    assert with_it is not None
    assert "slow/0" in {party.peer for party in with_it.parties}, "it should sum a part"
    scene.roster.remove("slow/0")
    scene.resting.lost("slow/0", 0, scene.current)
    scene.come("slow/0", 5.0, position=START)
    assert "slow/0" in scene.resting
    without = scene.roster.lines.split(0, group)
    assert without is not None
    assert "slow/0" not in {party.peer for party in without.parties}


def test_after_the_swarm_went_elsewhere_everybody_contributes(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    scene.resting.restart()
    assert "slow/0" not in scene.resting


def test_in_a_delayed_run_a_line_counts_only_beyond_the_time_of_computing() -> None:
    for mbit, rests in ((20.0, False), (1.0, True)):
        scene = Scene(delayed=True)
        for post in FAST:
            scene.come(post, 100.0)
        scene.make_steps(2)
        scene.come("slow/0", mbit, position=START)
        assert ("slow/0" in scene.resting) == rests


def test_where_nobody_weighs_nobody_rests() -> None:
    scene = Scene()
    scene.resting = RestChoice(ConductorConfig(stages=1, microbatches=30), scene.roster, lambda post: 1.0)
    for post in FAST:
        scene.come(post, 100.0)
    scene.make_steps(2)
    assert scene.come("slow/0", 1.0, position=START) == []
    assert scene.make_steps(10) == []
    assert "slow/0" not in scene.resting


def test_newcomers_that_never_arrive_put_no_contributor_to_rest() -> None:
    scene = Scene()
    workers = [f"w{number}/0" for number in range(10)]
    for number, post in enumerate(workers):
        scene.pace[post] = 1.0
        scene.come(post, 200.0 if number < 2 else 20.0)
    scene.make_steps(3)
    before = scene.resting.at_work(0, scene.current)
    for number in range(30):
        scene.roster.note_line(f"x{number}/0", 0, LineInfo("node", 1e8, 1e8, ELEMENTS, "float32"), ())
        scene.roster.enter(hello(f"x{number}/0"))
        scene.resting.came(scene.now, f"x{number}/0", scene.current)
    scene.catch_up = lambda: None  # type: ignore[method-assign]
    scene.make_steps(20)
    assert scene.resting.at_work(0, scene.current) == before


def test_a_member_that_reconnects_at_each_step_rests_all_the_same(scene: Scene) -> None:
    scene.come("slow/0", 1.0)
    for _ in range(3):
        scene.make_steps(1)
        scene.roster.remove("slow/0")
        scene.resting.lost("slow/0", 0, scene.current)
        scene.come("slow/0", 1.0)
    scene.make_steps(1)
    assert "slow/0" in scene.resting


def test_a_loss_while_members_move_ends_no_rest(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    scene.resting.lost("a/0", 0, None)
    assert "slow/0" in scene.resting


def test_what_a_member_is_told_is_what_steps_take_now(scene: Scene) -> None:
    scene.come("slow/0", 1.0, position=START)
    before = scene.resting.of("slow/0")
    for post in FAST:
        scene.pace[post] = 0.25
    scene.make_steps(4)
    after = scene.resting.of("slow/0")
    assert before is not None
    assert after is not None
    assert after.without_s > 2 * before.without_s


def test_a_newcomer_that_comes_again_and_again_is_weighed_once_a_step(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed, real = 0, ContributorChoice._step_s

    def counted(self: ContributorChoice, found: set[str], rates: dict[str, float]) -> float:
        nonlocal weighed
        weighed += 1
        return real(self, found, rates)

    monkeypatch.setattr(ContributorChoice, "_step_s", counted)
    for _ in range(20):
        scene.come("new/0", 100.0, position=START)
    assert weighed <= 2
