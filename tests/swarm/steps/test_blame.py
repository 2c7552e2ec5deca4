"""Blame: newcomers go at once, others as they fail, and what many trainers bring is not all of it bad."""

from __future__ import annotations

from peerd.messages.swarm import Mb
from peerd.swarm.batch.batches import Batches
from peerd.swarm.events import Note, Origin
from peerd.swarm.positions.proven_positions import EstablishedMembers
from peerd.swarm.reader_versions import ReaderVersions
from peerd.swarm.roster import Roster
from peerd.swarm.steps.blame import Blame
from tests.worlds.machines.conducting import hello

TRAINERS = "tuvw"


class Scene:
    """One stage of a, which has helped to make a step, and b and c; each trainer has a microbatch that a holds."""

    def __init__(self) -> None:
        self.batches, self.roster = Batches(1, len(TRAINERS), ReaderVersions()), Roster(1)
        for peer in "abc":
            self.roster.enter(hello(peer))
        self.established = EstablishedMembers("a", {"a": 0})
        self.blame = Blame(15.0, self.batches, self.roster, self.established, Origin())
        for trainer in TRAINERS:
            self.batches.trainers.report(trainer, (1,))
            self.batches.due.admit(Mb(trainer, 1), 0.0)
            self.batches.due.finish(Mb(trainer, 1))
            self.batches.due.hold(Mb(trainer, 1), 0, "a")

    def aside(self) -> list[str]:
        return [found.peer for found in self.blame.aside]

    def notes(self) -> list[str]:
        return [output.text for output in self.blame.out if isinstance(output, Note)]


def test_newcomers_are_those_who_never_helped_where_others_of_the_group_have() -> None:
    scene = Scene()
    assert scene.blame.newcomers("abc", "cbx") == ["b", "c"]
    assert scene.blame.newcomers("bc", "bc") == []


def test_a_newcomer_goes_at_once_and_a_member_when_it_has_often_failed() -> None:
    scene = Scene()
    scene.blame.let_go(0.0, "b", "failed averaging")
    assert scene.aside() == ["b"]
    assert scene.blame.keeps_out(1.0, "b")
    for now in (1.0, 2.0, 3.0):
        assert scene.aside() == ["b"]
        scene.blame.failed(now, "a", "failed averaging")
    assert scene.aside() == ["b", "a"]
    assert any("a failed averaging and is put aside for 15 s" in note for note in scene.notes())
    assert not scene.blame.keeps_out(20.0, "a")


def test_what_was_failed_in_one_step_is_forgotten_with_it() -> None:
    scene = Scene()
    for now in (1.0, 2.0, 3.0):
        scene.blame.failed(now, "a", "failed averaging")
        scene.blame.step_made()
    assert scene.aside() == []


def test_what_a_member_cannot_sum_leaves_the_batch_and_one_that_refuses_many_trainers_goes() -> None:
    scene = Scene()
    scene.blame.refused(1.0, "a", frozenset({Mb("t", 1)}))
    assert scene.blame.shrank
    assert Mb("t", 1) not in scene.batches.due.entries
    assert scene.aside() == []
    assert any(note.startswith("trainer …t brings values that cannot be summed") for note in scene.notes())
    scene.blame.refused(2.0, "a", frozenset({Mb("u", 1)}))
    assert scene.aside() == ["a"]


def test_what_a_trainer_credited_alone_is_its_fault_and_from_the_second_time_out_of_the_batch() -> None:
    scene = Scene()
    for now, seq in ((1.0, 1), (2.0, 2)):
        mb = Mb("t", seq)
        if seq == 2:
            scene.batches.due.drop(Mb("t", 1))
            scene.batches.due.admit(mb, now)
        scene.batches.due.hold(mb, 0, "a")
        scene.blame.missing(now, 0, (0, "a"), frozenset({mb}))
        assert scene.aside() == []
    assert Mb("t", 2) not in scene.batches.due.entries
    assert scene.blame.shrank


def test_what_batches_note_of_trainers_is_among_what_is_to_be_done() -> None:
    scene = Scene()
    scene.batches.tell("a newcomer")
    assert scene.notes() == ["a newcomer"]
