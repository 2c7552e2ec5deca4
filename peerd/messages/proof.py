"""Signed statements that peers send each other as proofs about one microbatch, step or position.

- `Grant`: the conductor admitted these microbatches of a trainer; without microbatches, it lets the trainer evaluate.
- `Receipt`: a stage peer holds a microbatch's gradient.
- `Ticket`: a trainer chose this route for a microbatch.
- `Committed`: a member stepped to a position.

Each statement names its run, step and peer, so that it is valid nowhere else. Each kind is signed with its own domain
tag, so that a signature of one kind is invalid for another. The signature covers the encoded statement, which the
verifier rebuilds from its own data. Hostile input: signatures of any content, for which verification returns False.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from peerd.core.ids import PeerId
from peerd.core.keys import verify
from peerd.messages.commits import CommitStatement, Committed
from peerd.messages.encoding import encode
from peerd.messages.handover import Ticket, TicketStatement
from peerd.messages.swarm import Grant, GrantStatement, Mb, Position, Receipt, ReceiptStatement

_GRANT: Final = b"peerd grant 1\0"
_RECEIPT: Final = b"peerd receipt 1\0"
_TICKET: Final = b"peerd ticket 1\0"
_COMMIT: Final = b"peerd commit 1\0"


class Sign(Protocol):
    """Signs bytes with this peer's private key."""

    def __call__(self, data: bytes, /) -> bytes: ...


def grant(sign: Sign, statement: GrantStatement) -> Grant:
    """Sign a grant as the conductor."""
    signature = sign(_GRANT + encode(statement))
    return Grant(statement.term, statement.step, statement.seqs, signature, statement.helped)


def is_granted(conductor: PeerId, run: bytes, trainer: str, shown: Grant) -> bool:
    """True if `conductor` signed the grant `shown` for `trainer` in `run`."""
    statement = GrantStatement(run, shown.term, shown.step, trainer, shown.seqs, shown.helped)
    return verify(conductor, _GRANT + encode(statement), shown.signature)


def receipt(sign: Sign, run: bytes, session: int, stage: int, step: int, mb: Mb) -> Receipt:
    """Sign a receipt: the holder has, in this session, accumulated the gradient of `mb` for `step` in `stage`."""
    return Receipt(session, sign(_RECEIPT + encode(ReceiptStatement(run, session, stage, step, mb))))


def has_received(holder: PeerId, run: bytes, stage: int, step: int, mb: Mb, shown: Receipt) -> bool:
    """True if `holder` signed the receipt `shown` for `mb` of `step` in `stage` of `run`."""
    statement = ReceiptStatement(run, shown.session, stage, step, mb)
    return verify(holder, _RECEIPT + encode(statement), shown.signature)


def signed_ticket(sign: Sign, run: bytes, trainer: str, ticket: Ticket) -> Ticket:
    """A copy of the ticket with the signature of its trainer."""
    bare = msgspec.structs.replace(ticket, signature=b"")
    return msgspec.structs.replace(ticket, signature=sign(_TICKET + encode(TicketStatement(run, trainer, bare))))


def is_ticket_of(trainer: PeerId, run: bytes, shown: Ticket) -> bool:
    """True if `trainer` signed the ticket `shown` in `run`."""
    bare = msgspec.structs.replace(shown, signature=b"")
    return verify(trainer, _TICKET + encode(TicketStatement(run, trainer.text, bare)), shown.signature)


def commit_signature(sign: Sign, run: bytes, stage: int, position: Position, digest: bytes) -> bytes:
    """Sign, as a member, that it stepped to `position` in `stage` with the mean gradient of this digest."""
    return sign(_COMMIT + encode(CommitStatement(run, stage, position, digest)))


def has_committed(run: bytes, position: Position, shown: Committed) -> bool:
    """True if the peer in `shown` signed that it stepped to `position` of `run`."""
    try:
        peer = PeerId.parse(shown.peer)
    except ValueError:
        return False
    statement = CommitStatement(run, shown.stage, position, shown.digest)
    return verify(peer, _COMMIT + encode(statement), shown.signature)
