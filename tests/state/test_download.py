"""The plan of a download: whatever donors do, each piece comes once, from somebody who had the right one."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import STATE_DONORS
from peerd.messages.swarm import Position
from peerd.state import download_events as dl
from peerd.state.download import Download
from peerd.state.quorum import GATHER_S, PATIENCE_S, Claim, StateQuorum, camps

TRUTH = Claim(Position(7, b"x"), b"t" * 32)
OTHER = Claim(Position(7, b"x"), b"o" * 32)
OLDER = Claim(Position(6, b"w"), b"6" * 32)
NEWER = Claim(Position(8, b"y"), b"8" * 32)


@dataclass
class Behaviour:
    """A donor's behaviour. Times in virtual seconds."""

    claim: Claim = TRUTH
    piece_s: float = 0.1
    manifest_s: float = 0.05
    lies_from: int = 1 << 30  # its n-th piece, and all after it, are wrong
    dies_at: float = 1e9  # what it owes then fails; it fails at once later
    silent_at: float = 1e9  # it answers nothing from then on
    gone_at: float = 1e9  # it has let go of the copy
    busy: float = 0.0  # probability of being busy
    catches_up: bool = False  # asked for its claim a second time, it tells the truth
    step_s: float = 0.0  # it makes steps, one in so many seconds; its claim is that of the step it stands at
    copies_in_s: float = 0.0  # at most; how long it takes until it comes to copy its state

    def stands_at(self, now: float) -> int:
        return int(now / self.step_s)


class World:
    """Drives a Download against donors in virtual time."""

    def __init__(self, behaviours: dict[str, Behaviour], pieces: int, seed: int = 0) -> None:
        self.behaviours = behaviours
        self.rng = random.Random(seed)
        self.pieces = pieces
        self.now = 0.0
        self.queue: list[tuple[float, int, dl.Event]] = []
        self.serial = 0
        self.asked: Counter[int] = Counter()
        self.came: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.claims: Counter[str] = Counter()
        self.busy_until: dict[str, float] = {}
        self.blamed: list[str] = []
        self.chosen: dl.Chosen | None = None
        self.last: dl.Downloaded | dl.GaveUp | None = None
        self.flying: dict[int, dl.AskDonor] = {}
        self.joins: list[tuple[float, str]] = []

    def run(self, kept: dl.PartialState | None = None, known: Claim | None = None) -> Download:
        joining = {name for _, name in self.joins}
        present = [name for name in self.behaviours if name not in joining]
        rng = random.Random(self.rng.random())
        self.download = Download(0.0, self.pieces, rng, present, kept, known=known)
        self.perform(self.download.wake(0.0))
        while self.last is None:
            self.step()
        assert self.download.wake(self.now + 1) == []
        assert self.download.wake_at() == float("inf")
        return self.download

    def step(self) -> None:
        due = min(self.queue[0][0] if self.queue else float("inf"), self.download.wake_at())
        if self.joins and self.joins[0][0] <= due:
            self.now, name = self.joins.pop(0)
            self.perform(self.download.add(self.now, [name]))
            return
        assert due < 1e4, "the download waits for ever"
        assert due > self.now or self.queue, "the download wakes without end"
        self.now = due
        if self.queue and self.queue[0][0] <= due:
            _, _, event = heapq.heappop(self.queue)
            if event.ask in self.flying:
                ask = self.flying.pop(event.ask)
                if isinstance(event, dl.Arrived) and ask.piece >= 0:
                    assert ask.piece not in self.download.have
                    self.came[ask.donor] += 1
                self.perform(self.download.handle(self.now, event))
        else:
            self.perform(self.download.wake(self.now))

    def perform(self, outputs: list[dl.Output]) -> None:
        self.download.check()
        for output in outputs:
            assert self.last is None, "something follows the end"
            match output:
                case dl.AskDonor():
                    assert output.donor not in self.blamed
                    self.flying[output.ask] = output
                    self.answer(output)
                case dl.Cancel(ask):
                    del self.flying[ask]
                case dl.BlameDonor(donor, _):
                    self.blamed.append(donor)
                case dl.Chosen():
                    self.chosen = output
                case dl.Downloaded() | dl.GaveUp():
                    self.last = output
        assert self.last is None or not self.flying

    def answer(self, ask: dl.AskDonor) -> None:
        told = self.behaviours[ask.donor]
        event, at = self.outcome(ask, told)
        if at >= told.dies_at:
            event, at = dl.DonorFailed(ask.ask, "lost"), max(told.dies_at, self.now + 0.01)
        if at >= told.silent_at or at > self.now + ask.timeout_s:
            event, at = dl.DonorFailed(ask.ask, "too slow"), self.now + ask.timeout_s
        self.serial += 1
        heapq.heappush(self.queue, (at, self.serial, event))

    def outcome(self, ask: dl.AskDonor, told: Behaviour) -> tuple[dl.Event, float]:
        if self.rng.random() < told.busy:
            return dl.DonorFailed(ask.ask, "busy", retry_after_s=self.rng.choice([0.0, 0.2, 1e9])), self.now + 0.01
        if ask.piece == dl.MANIFEST:
            self.claims[ask.donor] += 1
            claim = TRUTH if told.catches_up and self.claims[ask.donor] > 1 else told.claim
            if told.step_s:
                return self.stepping(ask, told)
            return dl.ClaimReceived(ask.ask, claim), self.now + told.manifest_s
        if self.now >= told.gone_at:
            return dl.DonorFailed(ask.ask, "no such copy", gone=True), self.now + 0.01
        if ask.piece == dl.DIGESTS:
            return dl.Arrived(ask.ask), self.now + 0.05
        self.asked[ask.piece] += 1
        self.given[ask.donor] += 1
        at = self.busy_until[ask.donor] = max(self.now, self.busy_until.get(ask.donor, 0.0)) + told.piece_s
        if self.given[ask.donor] > told.lies_from:
            return dl.Wrong(ask.ask, "a wrong piece"), at
        return dl.Arrived(ask.ask), at

    def stepping(self, ask: dl.AskDonor, told: Behaviour) -> tuple[dl.Event, float]:
        """A claim of the step that it waits for; else of the one at which it comes to copy its state."""
        at = self.now + told.manifest_s
        if ask.meet > told.stands_at(at):
            at = ask.meet * told.step_s + 1e-6
        else:
            at += self.rng.uniform(0.0, told.copies_in_s)
        step = told.stands_at(at)
        return dl.ClaimReceived(ask.ask, Claim(Position(step, b"x"), step.to_bytes(32, "big"))), at + told.manifest_s


def world(pieces: int = 40, **behaviours: Behaviour) -> World:
    return World(behaviours, pieces)


# --- choosing ---------------------------------------------------------------------------------------------------


def test_the_largest_camp_is_the_best_then_the_newest_then_the_greatest_root() -> None:
    ranked = camps([("a", OLDER), ("b", TRUTH), ("c", TRUTH), ("d", OTHER), ("e", NEWER)])
    assert [camp.claim for camp in ranked] == [TRUTH, NEWER, OTHER, OLDER]
    assert ranked[0].donors == ("b", "c")


def test_a_camp_that_cannot_be_beaten_is_chosen_at_once() -> None:
    poll = StateQuorum(0.0)
    assert poll.decide(0.0, {"a": TRUTH}, 2).camp is None
    assert poll.decide(0.1, {"a": TRUTH, "b": TRUTH}, 2).camp is None
    chosen = poll.decide(0.2, {"a": TRUTH, "b": TRUTH}, 1).camp
    assert chosen is not None
    assert chosen.claim == TRUTH


def test_silent_donors_are_waited_for_only_so_long() -> None:
    poll = StateQuorum(0.0)
    claims = {"a": TRUTH, "b": TRUTH}
    assert poll.decide(1.0, claims, 5).camp is None
    assert poll.due == 1.0 + GATHER_S
    assert poll.decide(1.0 + GATHER_S, claims, 5).camp is not None
    alone = StateQuorum(0.0)
    assert alone.decide(11.0, {"a": TRUTH}, 1).camp is None
    assert alone.due == PATIENCE_S
    assert alone.decide(PATIENCE_S, {"a": TRUTH}, 1).camp is not None


def test_donors_are_waited_for_as_long_as_they_copy_a_large_state() -> None:
    """Each donor copies and hashes a state of 4 GB in three minutes."""
    w = World({name: Behaviour(manifest_s=180.0, piece_s=0.01) for name in "abc"}, 4000)
    w.run()
    assert isinstance(w.last, dl.Downloaded), w.last


def test_the_digests_of_a_large_state_may_take_their_time() -> None:
    """The digests of a state of 100 GB take 98 s on a line of 32 KiB/s."""
    download = Download(0.0, 100_000, random.Random(1), ["a"])
    asked = download.wake(0.0)
    asked = download.handle(1.0, dl.ClaimReceived(asked[0].ask, TRUTH))
    (digests,) = [one for one in asked if isinstance(one, dl.AskDonor) and one.piece == dl.DIGESTS]
    assert digests.timeout_s > 98.0


def test_a_slow_line_that_many_donors_fill_is_waited_for() -> None:
    """Eight donors at once on a line of 32 KiB/s: of each one piece comes in 256 s."""
    world = World({f"d{i}": Behaviour(piece_s=256.0) for i in range(8)}, 40)
    world.run()
    assert isinstance(world.last, dl.Downloaded), world.last


def test_two_donors_that_contradict_each_other_are_not_believed() -> None:
    w = world(a=Behaviour(), b=Behaviour(OTHER))
    w.run()
    assert isinstance(w.last, dl.GaveUp)
    assert "agree" in w.last.why
    assert not w.asked


def test_a_single_donor_is_believed_when_it_is_the_only_one() -> None:
    w = world(a=Behaviour(), b=Behaviour(dies_at=0.0))
    w.run()
    assert w.last == dl.Downloaded()


def test_of_a_known_root_no_claim_is_asked_and_a_liar_and_a_silent_donor_are_replaced() -> None:
    w = world(silent=Behaviour(silent_at=0.0), liar=Behaviour(lies_from=3), honest=Behaviour(OTHER))
    w.run(known=TRUTH)
    assert w.last == dl.Downloaded()
    assert not w.claims
    assert w.blamed == ["liar"]
    assert w.came["honest"] > w.came["liar"] > w.came["silent"] == 0


@pytest.mark.parametrize("silent", [1, 2, 3, 5])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_small_download_of_a_known_root_comes_from_the_only_donor_that_answers(silent: int, pieces: int) -> None:
    names = [*(f"s{number}" for number in range(silent)), "a"]
    w = World({name: Behaviour(silent_at=1e9 if name == "a" else 0.0) for name in names}, pieces)
    w.run(known=TRUTH)
    assert isinstance(w.last, dl.Downloaded)
    assert w.came == {"a": pieces}
    assert w.now < 15 * (silent + 1), "the digests from each in turn; the pieces from those that had answered"


@pytest.mark.parametrize(("pieces", "kept"), [(1, set()), (3, set()), (3, {0})])
def test_pieces_come_over_a_slow_line_on_which_each_donor_seems_quiet(pieces: int, kept: set[int]) -> None:
    """No piece arrives before each donor asked would be late: replacing them without end would fetch nothing."""
    w = World({f"d{number}": Behaviour(piece_s=20.0) for number in range(4)}, pieces)
    w.run(dl.PartialState(TRUTH.root, kept) if kept else None, known=TRUTH)
    assert isinstance(w.last, dl.Downloaded)


def test_a_download_that_ends_while_a_donor_owes_an_answer_says_so() -> None:
    w = World({"a": Behaviour(silent_at=0.1), "b": Behaviour(lies_from=0)}, 6)
    assert w.run(known=TRUTH).unanswered
    w = World({"b": Behaviour(lies_from=0)}, 6)
    assert not w.run(known=TRUTH).unanswered


def test_donors_of_a_known_root_that_have_lost_it_or_are_silent_are_given_up() -> None:
    w = world(gone=Behaviour(gone_at=0.0), silent=Behaviour(silent_at=0.0))
    w.run(known=TRUTH)
    assert isinstance(w.last, dl.GaveUp)
    assert not w.last.moved_on
    assert w.now < 70.0


def test_a_donor_that_is_a_step_behind_is_asked_again() -> None:
    w = world(a=Behaviour(), b=Behaviour(OLDER, catches_up=True))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.came["b"] > 0


def test_a_liar_that_claims_to_be_far_ahead_is_outvoted() -> None:
    w = world(a=Behaviour(), b=Behaviour(), c=Behaviour(NEWER))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.chosen is not None
    assert w.chosen.claim == TRUTH
    assert w.came["c"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_donors_whose_steps_are_shorter_than_a_look_at_them_meet_at_a_step(seed: int) -> None:
    w = World({name: Behaviour(step_s=0.3, copies_in_s=2.0) for name in "ab"}, 4, seed)
    w.run()
    assert w.last == dl.Downloaded()
    assert w.now < 15


def test_who_names_a_step_far_ahead_does_not_make_others_wait_for_it() -> None:
    far = Claim(Position(1 << 40, b"x"), b"f" * 32)
    w = World({"a": Behaviour(step_s=0.3, copies_in_s=2.0), "b": Behaviour(step_s=0.3), "c": Behaviour(far)}, 4, 1)
    w.run()
    assert w.last == dl.Downloaded()
    assert w.now < 15


def test_a_larger_camp_that_answers_late_takes_over() -> None:
    late = {f"late{i}": Behaviour(manifest_s=15.0) for i in range(3)}
    w = world(pieces=2000, a=Behaviour(OTHER), b=Behaviour(OTHER), **late)
    w.run()
    assert w.last == dl.Downloaded()
    assert w.chosen is not None
    assert w.chosen.claim == TRUTH
    assert set(w.chosen.donors) == set(late)


# --- pieces -----------------------------------------------------------------------------------------------------


def test_equal_donors_share_the_work_and_nothing_is_asked_twice() -> None:
    w = world(pieces=90, a=Behaviour(), b=Behaviour(), c=Behaviour())
    w.run()
    assert w.last == dl.Downloaded()
    assert set(w.asked.values()) == {1}
    assert min(w.came.values()) >= 25
    assert w.now < 90 * 0.1 / 3 * 1.4


def test_donors_give_by_their_speed() -> None:
    w = world(pieces=400, fast=Behaviour(piece_s=0.01), slow=Behaviour(piece_s=0.1))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.came["fast"] > 5 * w.came["slow"] > 0
    assert w.now < 400 / 110 * 1.3
    assert sum(w.asked.values()) <= 400 + 20


def test_our_own_slow_line_is_not_taken_for_a_slow_donor() -> None:
    """Asked a second time, a piece would take up as much of the line again."""
    w = world(pieces=1, a=Behaviour(piece_s=8.5), b=Behaviour(piece_s=8.5))
    known = w.run().piece_s()
    assert set(w.asked.values()) == {1}
    assert list(known.values()) == [8.5]
    w = world(pieces=1, a=Behaviour(piece_s=12.0), b=Behaviour(piece_s=12.0))
    w.run(dl.PartialState(piece_s={"a": 8.5, "b": 8.5}))  # slower than it was, still within reason
    assert set(w.asked.values()) == {1}


def test_a_silent_donor_is_replaced_by_one_of_whom_nothing_is_known_either() -> None:
    w = world(pieces=1, a=Behaviour(silent_at=0.06), b=Behaviour(silent_at=1e9))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.now < 13  # 3 s for the digests, and three times as much as a piece may take


def test_half_way_one_dies_and_one_lies_and_nothing_begins_anew() -> None:
    w = world(pieces=300, a=Behaviour(), dies=Behaviour(dies_at=5.0), lies=Behaviour(lies_from=50))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.blamed == ["lies"]
    assert sum(w.asked.values()) <= 300 + 8 + 8 + 8  # what was under way at both, and the retries
    assert all(count <= 4 for count in w.asked.values())


def test_a_donor_that_falls_silent_does_not_hold_up_the_end() -> None:
    w = world(pieces=100, a=Behaviour(), b=Behaviour(silent_at=1.0))
    w.run()
    assert w.last == dl.Downloaded()
    assert w.now < 100 * 0.1 + 5


def test_a_donor_that_joins_late_helps() -> None:
    w = world(pieces=200, a=Behaviour(), new=Behaviour())
    w.joins = [(2.0, "new")]
    w.run()
    assert w.last == dl.Downloaded()
    assert w.came["new"] > 50


def test_what_is_kept_is_not_asked_again() -> None:
    w = world(pieces=50, a=Behaviour(), b=Behaviour())
    download = w.run(dl.PartialState(TRUTH.root, set(range(0, 50, 2))))
    assert w.last == dl.Downloaded()
    assert set(w.asked) == set(range(1, 50, 2))
    assert download.have == set(range(50))


def test_what_is_kept_of_another_state_is_of_no_use() -> None:
    w = world(pieces=50, a=Behaviour(), b=Behaviour())
    w.run(dl.PartialState(OTHER.root, set(range(25))))
    assert set(w.asked) == set(range(50))


def test_when_all_let_go_of_the_copy_the_swarm_has_moved_on() -> None:
    w = world(pieces=500, a=Behaviour(gone_at=3.0), b=Behaviour(gone_at=4.0))
    w.run()
    assert isinstance(w.last, dl.GaveUp)
    assert w.last.moved_on


def test_without_donors_there_is_nothing_to_wait_for() -> None:
    w = world()
    w.run()
    assert isinstance(w.last, dl.GaveUp)


def test_an_empty_state_needs_no_pieces() -> None:
    w = world(pieces=0, a=Behaviour())
    w.run()
    assert w.last == dl.Downloaded()


def test_donors_that_are_always_busy_end_the_download() -> None:
    w = world(a=Behaviour(busy=1.0), b=Behaviour(busy=1.0))
    w.run()
    assert isinstance(w.last, dl.GaveUp)
    assert w.now <= 130


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    download = Download(0.0, 3, random.Random(1), ["a"])
    (ask,) = download.wake(0.0)
    assert isinstance(ask, dl.AskDonor)
    assert download.handle(0.1, dl.Arrived(99)) == []
    assert download.handle(0.1, dl.Wrong(99, "")) == []
    assert any(isinstance(output, dl.Chosen) for output in download.handle(0.2, dl.ClaimReceived(ask.ask, TRUTH)))
    assert download.handle(0.3, dl.ClaimReceived(ask.ask, OTHER)) == []


def test_no_more_donors_are_asked_than_allowed() -> None:
    w = World({f"d{i}": Behaviour() for i in range(30)}, 10)
    w.run()
    assert sum(w.claims.values()) == STATE_DONORS


def test_reserves_step_in_for_donors_that_are_lost() -> None:
    dead = {f"d{i}": Behaviour(dies_at=0.0) for i in range(STATE_DONORS + 4)}
    w = World({**dead, "x": Behaviour(), "y": Behaviour()}, 10)
    w.run()
    assert w.last == dl.Downloaded()


behaviours = st.builds(
    Behaviour,
    claim=st.sampled_from([TRUTH, TRUTH, TRUTH, OTHER, OLDER, NEWER]),
    piece_s=st.sampled_from([0.001, 0.05, 0.5, 4.0, 40.0]),
    manifest_s=st.sampled_from([0.01, 1.0, 30.0, 200.0]),
    lies_from=st.sampled_from([0, 3, 1 << 30, 1 << 30]),
    dies_at=st.sampled_from([0.0, 1.0, 5.0, 1e9, 1e9]),
    silent_at=st.sampled_from([0.0, 1.0, 5.0, 1e9, 1e9]),
    gone_at=st.sampled_from([2.0, 1e9, 1e9]),
    busy=st.sampled_from([0.0, 0.0, 0.3]),
    catches_up=st.booleans(),
)


@pytest.mark.slow
@given(st.lists(behaviours, max_size=6), st.integers(0, 60), st.integers(0, 1000), st.sampled_from([None, TRUTH]))
def test_every_download_ends_and_its_books_hold(
    donors: list[Behaviour], pieces: int, seed: int, known: Claim | None
) -> None:
    w = World({f"d{i}": b for i, b in enumerate(donors)}, pieces, seed)
    w.joins = [(0.5 * i, f"d{i}") for i in range(3, len(donors))]
    download = w.run(dl.PartialState(TRUTH.root, {p for p in range(pieces) if p % 3 == 0}), known)
    if w.last == dl.Downloaded():
        assert download.have == set(range(pieces))
    for name in w.blamed:
        assert w.behaviours[name].lies_from < 1 << 30


@pytest.mark.slow
@given(st.lists(behaviours, max_size=3), st.integers(0, 60), st.integers(0, 1000))
def test_honest_donors_in_the_majority_are_enough(others: list[Behaviour], pieces: int, seed: int) -> None:
    honest = {f"h{i}": Behaviour(piece_s=0.2 * (i + 1)) for i in range(len(others) + 2)}
    w = World({**{f"d{i}": b for i, b in enumerate(others)}, **honest}, pieces, seed)
    w.run()
    assert w.last == dl.Downloaded()
    assert w.chosen is not None
    assert w.chosen.claim == TRUTH
    assert not set(w.blamed) & honest.keys()
    late = 11.0 + 10.0 * len(others)  # waits for claims, for digests, and for pieces that are owed
    assert w.now < late + pieces * 0.2 + 6.0
