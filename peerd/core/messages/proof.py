"""Proofs that peers show each other: signed statements about one microbatch, step or position.

`Grant`: the conductor has admitted these microbatches of this trainer, or, with none, lets it evaluate. `Receipt`: this
stage peer holds this microbatch's gradient. `Ticket`: this trainer has chosen this way for it. `Committed`: this member
stepped to this position. All name run, step and the peer they are for, so that they prove nothing anywhere else; each
kind has a domain of its own, so that no signature of one counts for another. What is signed is our encoding of the
statement, which the reader makes anew from what it knows. Hostile input: signatures of any content, which simply do not
count.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from peerd.core.ids import PeerId
from peerd.core.keys import verify
from peerd.core.messages.commits import CommitStatement, Committed
from peerd.core.messages.encoding import encode
from peerd.core.messages.handover import Ticket, TicketStatement
from peerd.core.messages.swarm import Grant, GrantStatement, Mb, Position, Receipt, ReceiptStatement

_GRANT: Final = b"peerd grant 1\0"
_RECEIPT: Final = b"peerd receipt 1\0"
_TICKET: Final = b"peerd ticket 1\0"
_COMMIT: Final = b"peerd commit 1\0"


class Sign(Protocol):
    """Signs bytes with this peer's identity."""

    def __call__(self, data: bytes, /) -> bytes: ...


def grant(sign: Sign, statement: GrantStatement) -> Grant:
    """The conductor's word that the statement holds."""
    signature = sign(_GRANT + encode(statement))
    return Grant(statement.term, statement.step, statement.seqs, signature, statement.helped)


def is_granted(conductor: PeerId, run: bytes, trainer: str, shown: Grant) -> bool:
    """True when `conductor` signed the grant `shown` for `trainer` in `run`."""
    statement = GrantStatement(run, shown.term, shown.step, trainer, shown.seqs, shown.helped)
    return verify(conductor, _GRANT + encode(statement), shown.signature)


def receipt(sign: Sign, run: bytes, session: int, stage: int, step: int, mb: Mb) -> Receipt:
    """The holder's word that, in this session, it has accumulated `mb` for `step` in `stage`."""
    return Receipt(session, sign(_RECEIPT + encode(ReceiptStatement(run, session, stage, step, mb))))


def has_received(holder: PeerId, run: bytes, stage: int, step: int, mb: Mb, shown: Receipt) -> bool:
    """True when `holder` signed the receipt `shown` for `mb` of `step` in `stage` of `run`."""
    statement = ReceiptStatement(run, shown.session, stage, step, mb)
    return verify(holder, _RECEIPT + encode(statement), shown.signature)


def signed_ticket(sign: Sign, run: bytes, trainer: str, ticket: Ticket) -> Ticket:
    """The ticket with the signature of its trainer, whose `sign` this is."""
    bare = msgspec.structs.replace(ticket, signature=b"")
    return msgspec.structs.replace(ticket, signature=sign(_TICKET + encode(TicketStatement(run, trainer, bare))))


def is_ticket_of(trainer: PeerId, run: bytes, shown: Ticket) -> bool:
    """True when `trainer` signed the ticket `shown` in `run`."""
    bare = msgspec.structs.replace(shown, signature=b"")
    return verify(trainer, _TICKET + encode(TicketStatement(run, trainer.text, bare)), shown.signature)


def commit_signature(sign: Sign, run: bytes, stage: int, position: Position, digest: bytes) -> bytes:
    """The member's word that it stepped to `position` in `stage`, with the mean of this digest."""
    return sign(_COMMIT + encode(CommitStatement(run, stage, position, digest)))


def has_committed(run: bytes, position: Position, shown: Committed) -> bool:
    """True when the peer that `shown` names signed that it stepped to `position` of `run`."""
    try:
        peer = PeerId.parse(shown.peer)
    except ValueError:
        return False
    statement = CommitStatement(run, shown.stage, position, shown.digest)
    return verify(peer, _COMMIT + encode(statement), shown.signature)
