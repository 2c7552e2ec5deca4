"""Blame for a wrong credit: decides who is at fault when a member denies holding a microbatch credited to it.

A credit rests on the holder's signed receipt, which the trainer shows, on the holder's own report in a session, or on
the trainer's claim alone. Receipts are verified only here, when a member reports something as missing, since one
verification takes a tenth of a millisecond. Hostile input: receipts of any content, and members that deny what they
signed.
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
    """The party at fault for a wrong credit."""

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
    """The party at fault for each microbatch that a member should hold but does not. `where`: (stage, member).

    `session` returns a member's present session. Only some of each trainer's receipts are verified; the rest get the
    verdict of the last verified one.
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
