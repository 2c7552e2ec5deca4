"""Blame for a credit that does not hold, when a member denies what it was credited with: receipts decide.

A credit rests on what a trainer shows (the holder's signed receipt), on the holder's own word of a session, or on the
trainer's word alone. Receipts are looked at only here, when a member says that something is missing: one takes a tenth
of a millisecond. Hostile input: receipts of any content, and members that deny what they signed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum, auto

from peerd.core.limits import RECEIPTS_LOOKED_AT
from peerd.core.messages.swarm import Mb, Receipt
from peerd.machine.batch.ledger import Ledger
from peerd.machine.swarm.events import Verify
from peerd.machine.swarm.posts import peer_of


class CreditFault(Enum):
    """The party at fault for a credit that does not hold."""

    HOLDER = auto()
    TRAINER = auto()
    NOBODY = auto()


def fault_of(
    ledger: Ledger,
    step: int,
    where: tuple[int, str],
    mbs: Iterable[Mb],
    verify: Verify | None,
    session: Callable[[str], int | None],
) -> dict[Mb, CreditFault]:
    """Party at fault for each microbatch that `where`, a stage and its member, should hold and does not.

    Of very many only some of each trainer are looked at: the rest is judged like the last of these.
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
