"""Blame for a step that is not made: the peer at fault for a failed attempt or a missing microbatch, and the penalty.

Evidence, not claims. What a member reports as missing counts only within what it was assigned, and then a receipt
decides the fault: the holder's, when it signed one in its present session; no peer's, when in an earlier session; else
the trainer's that credited it. Newcomers, which have not yet helped to make a step, go at once and wait (`Probation`);
others are put aside as they fail (`FailureRecord`); trainers get less to do. The conductor, which owns the members,
takes from here the members to let go of (`aside`) and whether the batch shrank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peerd.core.messages.swarm import Mb
from peerd.machine.batch.batches import Batches
from peerd.machine.batch.credit import CreditFault, fault_of
from peerd.machine.batch.probation import Probation
from peerd.machine.conductor.standing import FailureRecord, PutAside
from peerd.machine.positions.proven_positions import EstablishedMembers
from peerd.machine.swarm.events import Note, Origin, Output
from peerd.machine.swarm.posts import peer_of
from peerd.machine.swarm.roster import Roster


class Blame:
    """Faults of one run's members and trainers. `established`: the members that have helped to make a step."""

    def __init__(
        self, ban_s: float, batches: Batches, roster: Roster, established: EstablishedMembers, origin: Origin
    ) -> None:
        self._batches, self._roster, self._established = batches, roster, established
        self._verify, self._probation = origin.verify, Probation(origin.place_of)
        batches.trainers.newcomers.probation, batches.verify, batches.tell = self._probation, origin.verify, self.note
        self._standing = FailureRecord(ban_s)
        self._declined = Probation()  # each member by itself
        self._refusals: dict[str, set[str]] = {}  # member -> trainers whose microbatches it could not sum
        self.aside: list[PutAside] = []  # members that the conductor is to let go of: it takes them from here
        self.shrank = False  # microbatches were dropped: the batch is not whole; the conductor takes this too
        self.out: list[Output] = []  # notes, in one list with the outputs of `StageClosing`

    def note(self, text: str) -> None:
        """A note for the log."""
        self.out.append(Note(text))

    def keeps_out(self, now: float, peer: str) -> bool:
        """True when this peer is put aside, sits out some steps, or is a newcomer that has to wait."""
        return bool(self.why_out(now, peer))

    def why_out(self, now: float, peer: str) -> str:
        """The reason that a peer is kept out; "" where it is let in."""
        if self._standing.banned(peer, now):
            return "a pause, since this peer has often stood in the way of steps"
        if declined := self._declined.own_reason(now, peer):
            return declined
        if peer in self._established:
            return ""
        own = self._probation.own_reason(now, peer_of(peer))
        return own or ("" if self._is_member(peer) else self._probation.places_reason(now, peer_of(peer)))

    def let_in(self, now: float, peer: str) -> None:
        """A peer that is not kept out becomes a member."""
        if not self._is_member(peer) and peer not in self._established:
            self._probation.let_in(now, peer_of(peer))

    def _is_member(self, peer: str) -> bool:
        return self._roster.session(peer) is not None

    def helped(self, peer: str) -> None:
        """A member has helped to make a step."""
        self._declined.helped(peer)
        if peer not in self._established:
            self._probation.helped(peer_of(peer))

    def step_made(self) -> None:
        """A step was made: all strikes fade."""
        self._standing.step_made()
        self._probation.step_made()
        self._declined.step_made()
        self._refusals.clear()

    # --- members ----------------------------------------------------------------------------------------------

    def newcomers(self, group: Collection[str], peers: Iterable[str]) -> list[str]:
        """The newcomers among `peers`, where others of the attempt's group have helped to make a step; else none."""
        if not any(peer in self._established for peer in group):
            return []
        return sorted(peer for peer in peers if peer in group and peer not in self._established)

    def let_go(self, now: float, newcomer: str, why: str, *, proven: bool = False) -> None:
        """Leave out a newcomer or a helper that stood in the way: a round can do without it.

        `proven`: as in `Probation.failed`.
        """
        seconds = self._probation.failed(now, peer_of(newcomer), proven=proven)
        self._put(PutAside(newcomer, seconds, why, briefly=not proven))

    def declined(self, now: float, member: str, *, others: bool) -> None:
        """A member takes no orders from this conductor: it lost us for a moment, or follows another one. It may return.

        `others`: its stage can average without it, so it sits out the next step, or more of them if that goes on.
        """
        seconds = self._declined.failed(now, member) if others else 0.0
        self._put(PutAside(member, seconds, "takes no orders from this conductor", briefly=True))

    def failed(self, now: float, member: str, why: str) -> None:
        """Count a failure that is certainly the member's own; often enough, and it is put aside."""
        self._put(self._standing.failed(now, member, why))

    def put_aside(self, now: float, member: str, why: str) -> None:
        """Put the member aside at once."""
        self._put(self._standing.put_aside(now, member, why))

    def contradict(self, now: float, accused: Iterable[tuple[str, str]], members: int) -> None:
        """Weigh accusations from an attempt of so many `members`: pairs (accuser, peer that it could not reach)."""
        for found in self._standing.contradict(now, accused, members, self._roster.since):
            self._put(found)

    # --- microbatches -----------------------------------------------------------------------------------------

    def missing(self, now: float, step: int, where: tuple[int, str], mbs: frozenset[Mb]) -> None:
        """Microbatches that a member (`where`: stage, member) should hold for the batch of `step` are not there."""
        stage, member = where
        faults = fault_of(self._batches.due, step, where, mbs, self._verify, self._roster.session)
        trainers = sorted({mb.trainer for mb, fault in faults.items() if fault is CreditFault.TRAINER})
        why = "credits peers with what they never got"
        void = {trainer for trainer in trainers if self._strike(now, trainer, why, proven=True)}
        self._batches.due.unhold_of(member, mbs, stage, now)
        voided = [mb for mb in sorted(mbs) if mb.trainer in void and mb.trainer != peer_of(member)]
        self.shrank |= self._batches.void(voided)
        if CreditFault.HOLDER in faults.values():
            self.failed(now, member, "has lost what it signed to hold")

    def refused(self, now: float, member: str, mbs: frozenset[Mb]) -> None:
        """Microbatches whose values the member could not sum: drop them from the batch in every stage."""
        trainers = sorted({mb.trainer for mb in mbs})
        known = self._refusals.setdefault(member, set())
        known.update(trainers)
        self.shrank |= self._batches.void(sorted(mbs))
        if len(known) > max(1, self._batches.trainers.count() / 3):  # so many do not err at once
            known.clear()
            self.put_aside(now, member, "refuses what many trainers bring")
            return
        for trainer in trainers:
            self._strike(now, trainer, "brings values that cannot be summed", proven=False)

    def _strike(self, now: float, trainer: str, why: str, *, proven: bool) -> bool:
        """Give the trainer less to do; True from its second strike on."""
        often = self._batches.strike(now, trainer, proven=proven)
        self.note(f"trainer …{trainer[-8:]} {why}: it is given less")
        return often > 1

    def _put(self, found: PutAside | None) -> None:
        if found is not None:
            self.note(found.text())
            self.aside.append(found)
