"""Proofs count for what they name, and for nothing else."""

from __future__ import annotations

from peerd.core.keys import Keypair
from peerd.messages import proof
from peerd.messages.swarm import Grant, GrantStatement, Mb, Receipt, Seqs

RUN, OTHER_RUN = b"r" * 16, b"s" * 16
CONDUCTOR, TRAINER, STRANGER = (Keypair(bytes([n]) * 32) for n in (1, 2, 3))
TRAINER_NAME = TRAINER.peer_id.text


def granted() -> Grant:
    return proof.grant(CONDUCTOR.sign, GrantStatement(RUN, 4, 7, TRAINER_NAME, Seqs.of([1, 2, 9])))


def test_a_grant_counts_for_its_trainer_run_and_conductor_alone() -> None:
    shown = granted()
    assert proof.is_granted(CONDUCTOR.peer_id, RUN, TRAINER_NAME, shown)
    assert not proof.is_granted(STRANGER.peer_id, RUN, TRAINER_NAME, shown)
    assert not proof.is_granted(CONDUCTOR.peer_id, OTHER_RUN, TRAINER_NAME, shown)
    assert not proof.is_granted(CONDUCTOR.peer_id, RUN, STRANGER.peer_id.text, shown)


def test_a_grant_that_was_changed_does_not_count() -> None:
    shown = granted()
    for changed in (
        Grant(5, shown.step, shown.seqs, shown.signature),
        Grant(shown.term, 8, shown.seqs, shown.signature),
        Grant(shown.term, shown.step, Seqs.of([1, 2, 9, 10]), shown.signature),
        Grant(shown.term, shown.step, shown.seqs, shown.signature[:-1]),
        Grant(shown.term, shown.step, shown.seqs, b""),
        Grant(shown.term, shown.step, shown.seqs, shown.signature, helped=True),
    ):
        assert not proof.is_granted(CONDUCTOR.peer_id, RUN, TRAINER_NAME, changed)


def test_a_receipt_counts_for_its_microbatch_stage_step_and_session_alone() -> None:
    mb = Mb(TRAINER_NAME, 9)
    shown = proof.receipt(CONDUCTOR.sign, RUN, 5, 1, 7, mb)
    assert proof.has_received(CONDUCTOR.peer_id, RUN, 1, 7, mb, shown)
    assert not proof.has_received(STRANGER.peer_id, RUN, 1, 7, mb, shown)
    assert not proof.has_received(CONDUCTOR.peer_id, OTHER_RUN, 1, 7, mb, shown)
    assert not proof.has_received(CONDUCTOR.peer_id, RUN, 0, 7, mb, shown)
    assert not proof.has_received(CONDUCTOR.peer_id, RUN, 1, 8, mb, shown)
    assert not proof.has_received(CONDUCTOR.peer_id, RUN, 1, 7, Mb(TRAINER_NAME, 10), shown)
    assert not proof.has_received(CONDUCTOR.peer_id, RUN, 1, 7, mb, Receipt(6, shown.signature))


def test_a_grant_is_no_receipt() -> None:
    mb = Mb(TRAINER_NAME, 9)
    shown = granted()
    assert not proof.has_received(CONDUCTOR.peer_id, RUN, 1, 7, mb, Receipt(5, shown.signature))
