"""One group's round in the simulation: it ends in time, whole or smaller, whatever members report."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from peerd.sim.averaging_conductor import (
    CallOff,
    Commit,
    GroupRound,
    Keep,
    Output,
    RoundTimes,
    Start,
)

GROUP = ("a", "b", "c", "d")
TIMES = RoundTimes(deadline_s=10.0, patience_s=2.0, answer_s=0.5)


# --- a round -------------------------------------------------------------------------------------------------------


def begun(group: tuple[str, ...] = GROUP) -> GroupRound:
    round_ = GroupRound(group, TIMES)
    assert round_.begin(0.0) == [Start(0, group)]
    return round_


def without(left: str, attempt: int, rest: str) -> list[Output]:
    return [Keep(tuple(left), "the others go on without it"), Start(attempt, tuple(rest))]


def test_when_all_have_the_sum_all_commit() -> None:
    round_ = begun()
    assert [round_.report(1.0, peer, 0, ok=True) for peer in "abc"] == [[], [], []]
    assert round_.report(1.2, "d", 0, ok=True) == [Commit(0, GROUP, ())]
    assert round_.over
    assert round_.wake(99.0) == round_.gone(99.0, "a") == round_.report(99.0, "a", 0, ok=True) == []


def test_a_silent_member_is_left_out_of_the_next_attempt() -> None:
    round_ = begun()
    assert round_.report(2.0, "a", 0, ok=False, lost=["c"]) == [CallOff(0, GROUP)]
    assert round_.report(2.1, "b", 0, ok=False) == round_.report(2.1, "d", 0, ok=False, lost=["c"]) == []
    assert round_.wake_at() == 2.5
    assert round_.wake(2.4) == []
    assert round_.wake(2.5) == without("c", 1, "abd")
    assert round_.report(2.6, "c", 1, ok=True) == round_.report(2.6, "a", 0, ok=True) == []
    assert [round_.report(3.0, peer, 1, ok=True) for peer in "abd"][-1] == [Commit(1, ("a", "b", "d"), ())]


def test_a_member_that_the_conductor_saw_vanish_is_not_waited_for() -> None:
    round_ = begun()
    assert round_.gone(0.3, "b") == [CallOff(0, GROUP)]
    assert [round_.report(0.4, peer, 0, ok=False) for peer in "acd"][-1] == without("b", 1, "acd")
    assert round_.gone(0.5, "b") == []


def test_who_vanishes_after_its_report_spoils_nothing() -> None:
    round_ = begun()
    assert round_.report(1.0, "b", 0, ok=True) == round_.gone(1.1, "b") == []
    assert [round_.report(1.2, peer, 0, ok=True) for peer in "acd"][-1] == [Commit(0, GROUP, ())]


def test_a_liar_cannot_drive_out_a_living_member() -> None:
    round_ = begun()
    round_.report(0.1, "d", 0, ok=False, lost=["a", "b", "c"])
    assert [round_.report(0.2, peer, 0, ok=False) for peer in "abc"][-1] == without("d", 1, "abc")


def test_who_answers_the_conductor_and_nobody_else_leaves() -> None:
    round_ = begun()
    round_.report(2.0, "c", 0, ok=False)
    assert [round_.report(2.2, peer, 0, ok=False, lost=["c"]) for peer in "abd"][-1] == without("c", 1, "abd")


def test_who_cannot_go_on_leaves() -> None:
    round_ = begun()
    round_.report(0.1, "a", 0, ok=False, lost=["a"])
    assert [round_.report(0.2, peer, 0, ok=False) for peer in "bcd"][-1] == without("a", 1, "bcd")


def test_a_member_behind_the_others_gets_some_patience() -> None:
    round_ = begun()
    for peer in "abc":
        round_.report(1.0, peer, 0, ok=True)
    assert round_.wake_at() == 3.0
    assert round_.wake(3.0) == [CallOff(0, GROUP)]
    assert round_.report(3.1, "d", 0, ok=True) == without("d", 1, "abc")  # too late: the others have let go


def test_near_the_deadline_those_who_are_ready_commit_with_the_others_counted() -> None:
    round_ = begun()
    for peer in "abc":
        round_.report(7.5, peer, 0, ok=True)
    assert round_.wake_at() == 9.5
    assert round_.wake(9.5) == [Commit(0, ("a", "b", "c"), ("d",)), Keep(("d",), "the deadline")]


def test_without_time_or_company_members_keep_what_they_have() -> None:
    round_ = begun()
    assert round_.wake(9.5) == [Keep(GROUP, "the deadline")]
    assert GroupRound(("a",), TIMES).begin(0.0) == [Keep(("a",), "nobody else is in the group")]
    round_ = begun()
    for peer in "acd":
        round_.report(9.3, peer, 0, ok=False, lost=["b"])
    assert round_.wake(round_.wake_at()) == [Keep(GROUP, "no time for another attempt")]
    round_ = begun(("a", "b"))
    round_.gone(1.0, "b")
    assert round_.report(1.1, "a", 0, ok=False) == [Keep(("a", "b"), "nobody is left to average with")]


@dataclass
class Members:
    """What the members do with the conductor's words; checks them."""

    group: tuple[str, ...] = GROUP
    attempt: int = 0
    called_off: bool = False
    ready: set[str] = field(default_factory=set)
    ended: dict[str, bool] = field(default_factory=dict)  # committed?

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Start(attempt, group):
                    assert attempt == self.attempt + 1
                    assert self.called_off
                    assert len(group) >= 2
                    assert set(group) < set(self.group)
                    self.group, self.attempt, self.called_off = group, attempt, False
                    self.ready.clear()
                case CallOff(attempt, group):
                    assert (attempt, group, self.called_off) == (self.attempt, self.group, False)
                    self.called_off = True
                case Commit(attempt, group, counted):
                    assert attempt == self.attempt
                    assert not self.called_off
                    assert set(group) == self.ready
                    assert set(group) | set(counted) == set(self.group)
                    self._end(group, committed=True)
                case Keep(group, why):
                    assert why
                    self._end(group, committed=False)

    def _end(self, group: tuple[str, ...], committed: bool) -> None:
        assert not set(group) & self.ended.keys()
        self.ended |= dict.fromkeys(group, committed)


events = st.tuples(
    st.sampled_from(("ok", "ok", "failed", "gone", "wake")),
    st.sampled_from((*GROUP, "stranger")),
    st.sets(st.sampled_from((*GROUP, "stranger"))),
    st.integers(0, 1),  # how many attempts behind
    st.floats(0, 1.5),
)


@given(st.lists(events, max_size=40))
def test_whatever_members_report_the_round_ends_once_for_each_and_in_time(
    schedule: list[tuple[str, str, set[str], int, float]],
) -> None:
    round_, members, now = begun(), Members(), 0.0
    ended_at: float | None = None
    for kind, peer, lost, behind, later_s in schedule:
        while not round_.over and round_.wake_at() <= now + later_s:
            later_s -= max(0.0, round_.wake_at() - now)
            now = max(now, round_.wake_at())
            members.take(round_.wake(now))
            ended_at = now if round_.over else None
        now += later_s
        attempt = members.attempt - behind
        current = attempt == members.attempt and peer in members.group and peer not in round_._reports
        if kind == "ok" and current and not round_.over:
            members.ready.add(peer)
        if kind == "gone":
            members.take(round_.gone(now, peer))
        elif kind != "wake":
            members.take(round_.report(now, peer, attempt, kind == "ok", lost if kind == "failed" else ()))
        ended_at = ended_at if ended_at is not None else now if round_.over else None
    while not round_.over:
        assert round_.wake_at() >= now
        now = round_.wake_at()
        members.take(round_.wake(now))
    assert (now if ended_at is None else ended_at) <= TIMES.deadline_s - TIMES.answer_s
    assert set(members.ended) == set(GROUP)
    assert members.attempt < len(GROUP)
