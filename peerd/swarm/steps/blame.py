"""Blame for a step that is not made: finds and penalizes the peer at fault for a failed attempt or missing microbatch.

Decisions rest on evidence, not on claims. What a member reports as missing counts only if it was assigned to the
member. Then a receipt decides: the holder is at fault if it signed a receipt in its present session, nobody if it
signed in an earlier session, and otherwise the trainer that credited it. Newcomers, which have not yet helped to make a
step, are removed at once and have to wait (`Probation`). Other members are banned as their failures add up
(`FailureRecord`); trainers get fewer microbatches. The conductor owns the members: it reads from here which members to
remove (`aside`) and whether the batch shrank (`shrank`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto

from peerd.core.limits import RECEIPTS_LOOKED_AT
from peerd.messages.swarm import Mb, Receipt
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.batch.batches import Batches
from peerd.swarm.batch.probation import Probation
from peerd.swarm.events import Note, Origin, Output, Verify
from peerd.swarm.positions.proven_positions import EstablishedMembers
from peerd.swarm.posts import peer_of
from peerd.swarm.roster import Roster
from peerd.swarm.steps.failure_record import Ban, FailureRecord


class Blame:
    """Judges faults of one run's members and trainers. `established`: the members that have helped to make a step."""

    def __init__(
        self, ban_s: float, batches: Batches, roster: Roster, established: EstablishedMembers, origin: Origin
    ) -> None:
        self._batches, self._roster, self._established = batches, roster, established
        self._verify, self._probation = origin.verify, Probation(origin.place_of)
        batches.trainers.newcomers.probation, batches.verify, batches.tell = self._probation, origin.verify, self.note
        self._standing = FailureRecord(ban_s)
        self._declined = Probation()  # without places: each member counts by itself
        self._refusals: dict[str, set[str]] = {}  # member -> trainers whose microbatches it could not sum
        self.aside: list[Ban] = []  # members to remove; the conductor empties this list
        self.shrank = False  # True: microbatches were dropped, so the batch is incomplete; the conductor resets this
        self.out: list[Output] = []  # notes, in one list with the outputs of `StageClosing`

    def note(self, text: str) -> None:
        """Add a note for the log."""
        self.out.append(Note(text))

    def keeps_out(self, now: float, peer: str) -> bool:
        """True if this peer is banned, sits out some steps, or is a newcomer that has to wait."""
        return bool(self.why_out(now, peer))

    def why_out(self, now: float, peer: str) -> str:
        """Reason that a peer is kept out, or "" if it may join."""
        if self._standing.banned(peer, now):
            return "the end of a ban, since this peer has often held up steps"
        if declined := self._declined.own_reason(now, peer):
            return declined
        if peer in self._established:
            return ""
        own = self._probation.own_reason(now, peer_of(peer))
        return own or ("" if self._is_member(peer) else self._probation.places_reason(now, peer_of(peer)))

    def let_in(self, now: float, peer: str) -> None:
        """Record that a peer that is not kept out becomes a member."""
        if not self._is_member(peer) and peer not in self._established:
            self._probation.let_in(now, peer_of(peer))

    def _is_member(self, peer: str) -> bool:
        return self._roster.session(peer) is not None

    def helped(self, peer: str) -> None:
        """Record that a member has helped to make a step."""
        self._declined.helped(peer)
        if peer not in self._established:
            self._probation.helped(peer_of(peer))

    def step_made(self) -> None:
        """Record a completed step: all strikes fade."""
        self._standing.step_made()
        self._probation.step_made()
        self._declined.step_made()
        self._refusals.clear()

    # --- members ----------------------------------------------------------------------------------------------

    def newcomers(self, group: Collection[str], peers: Iterable[str]) -> list[str]:
        """Newcomers among `peers`, if others of the attempt's `group` have helped to make a step; otherwise none."""
        if not any(peer in self._established for peer in group):
            return []
        return sorted(peer for peer in peers if peer in group and peer not in self._established)

    def let_go(self, now: float, newcomer: str, why: str, *, proven: bool = False) -> None:
        """Remove a newcomer or a helper that held up the step, since a round works without it.

        `proven`: as in `Probation.failed`.
        """
        seconds = self._probation.failed(now, peer_of(newcomer), proven=proven)
        self._put(Ban(newcomer, seconds, why, briefly=not proven))

    def declined(self, now: float, member: str, *, others: bool) -> None:
        """Remove a member that rejects this conductor's orders. It may return.

        It has lost the connection for a moment, or it follows another conductor. `others`: its stage can average
        without it, so it sits out the next step, and more steps if it declines again.
        """
        seconds = self._declined.failed(now, member) if others else 0.0
        self._put(Ban(member, seconds, "rejects this conductor's orders", briefly=True))

    def failed(self, now: float, member: str, why: str) -> None:
        """Count a failure that is certainly the member's own; several of them in one step ban the member."""
        self._put(self._standing.failed(now, member, why))

    def put_aside(self, now: float, member: str, why: str) -> None:
        """Ban the member at once."""
        self._put(self._standing.put_aside(now, member, why))

    def contradict(self, now: float, accused: Iterable[tuple[str, str]], members: int) -> None:
        """Weigh accusations from an attempt of `members` members: pairs (accuser, peer that it could not reach)."""
        for found in self._standing.contradict(now, accused, members, self._roster.since):
            self._put(found)

    # --- microbatches -----------------------------------------------------------------------------------------

    def missing(self, now: float, step: int, where: tuple[int, str], mbs: frozenset[Mb]) -> None:
        """Handle microbatches that a member should hold for the batch of `step` but lacks. `where`: (stage, member)."""
        stage, member = where
        faults = fault_of(self._batches.due, step, where, mbs, self._verify, self._roster.session)
        trainers = sorted({mb.trainer for mb, fault in faults.items() if fault is CreditFault.TRAINER})
        why = "credits peers with microbatches that they never received"
        void = {trainer for trainer in trainers if self._strike(now, trainer, why, proven=True)}
        self._batches.due.unhold_of(member, mbs, stage, now)
        voided = [mb for mb in sorted(mbs) if mb.trainer in void and mb.trainer != peer_of(member)]
        self.shrank |= self._batches.void(voided)
        if CreditFault.HOLDER in faults.values():
            self.failed(now, member, "has lost microbatches that it signed receipts for")

    def refused(self, now: float, member: str, mbs: frozenset[Mb]) -> None:
        """Drop from the batch, in every stage, the microbatches whose values the member could not sum."""
        trainers = sorted({mb.trainer for mb in mbs})
        known = self._refusals.setdefault(member, set())
        known.update(trainers)
        self.shrank |= self._batches.void(sorted(mbs))
        if len(known) > max(1, self._batches.trainers.count() / 3):  # a third of the trainers is not wrong at once
            known.clear()
            self.put_aside(now, member, "rejects the microbatches of many trainers")
            return
        for trainer in trainers:
            self._strike(now, trainer, "brings values that cannot be summed", proven=False)

    def _strike(self, now: float, trainer: str, why: str, *, proven: bool) -> bool:
        """Let the trainer have fewer microbatches. Returns True from its second strike on."""
        often = self._batches.strike(now, trainer, proven=proven)
        self.note(f"trainer …{trainer[-8:]} {why}: it gets fewer microbatches")
        return often > 1

    def _put(self, found: Ban | None) -> None:
        if found is not None:
            self.note(found.text())
            self.aside.append(found)


class CreditFault(Enum):
    """The party at fault if a member lacks a microbatch that it was credited with."""

    HOLDER = auto()
    TRAINER = auto()
    NOBODY = auto()


def fault_of(
    ledger: BatchLedger,
    step: int,
    where: tuple[int, str],
    mbs: Iterable[Mb],
    verify: Verify | None,
    session: Callable[[str], int | None],
) -> dict[Mb, CreditFault]:
    """The party at fault for each microbatch that a member should hold but does not. `where`: (stage, member).

    A credit rests on the holder's signed receipt, which the trainer shows, on the holder's own report in a session, or
    on the trainer's claim alone. Receipts are verified only here, when a member reports something as missing, since one
    verification takes a tenth of a millisecond; only some of each trainer's receipts are verified, and the rest get the
    verdict of the last verified one. `session` returns a member's present session. Hostile input: receipts of any
    content, and members that deny what they signed.
    """
    stage, holder = where
    found: dict[Mb, CreditFault] = {}
    looked, last = Counter[str](), dict[str, CreditFault]()
    for mb in sorted(mbs):
        entry = ledger.entries.get(mb)
        if entry is None or entry.holders[stage] != holder:
            continue
        proof = entry.proofs[stage]
        if isinstance(proof, Receipt) and looked[mb.trainer] >= RECEIPTS_LOOKED_AT:
            found[mb] = last[mb.trainer]
            continue
        if proof is None:  # a trainer that credits itself is the holder as well
            fault = CreditFault.HOLDER if mb.trainer == peer_of(holder) else CreditFault.TRAINER
        elif isinstance(proof, int):
            fault = CreditFault.HOLDER if proof == session(holder) else CreditFault.NOBODY
        else:
            looked[mb.trainer] += 1
            signed = verify is not None and verify(holder, stage, step, mb, proof)
            mine = proof.session == session(holder)
            fault = CreditFault.TRAINER if not signed else CreditFault.HOLDER if mine else CreditFault.NOBODY
        found[mb] = last[mb.trainer] = fault
    return found
