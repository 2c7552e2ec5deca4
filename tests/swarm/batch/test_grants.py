"""Grants of a conductor: verifiable by all peers that know it, and signed once."""

from __future__ import annotations

from peerd.core.keys import Keypair
from peerd.messages.proof import is_granted
from peerd.swarm.batch.grants import GrantSigner

RUN = b"r" * 16
CONDUCTOR = Keypair.from_seed(b"conductor".ljust(32, b"."))


class Signing:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, data: bytes, /) -> bytes:
        self.times += 1
        return CONDUCTOR.sign(data)


def test_a_grant_holds_for_its_trainer_alone_and_is_signed_anew_only_when_it_changes() -> None:
    sign = Signing()
    granting = GrantSigner(RUN, sign)
    assert granting.grant(3, 7, "t", []) is None
    first = granting.grant(3, 7, "t", [4, 5, 9])
    assert first is not None
    assert granting.grant(3, 7, "t", [4, 5, 9]) is first
    assert sign.times == 1
    assert is_granted(CONDUCTOR.peer_id, RUN, "t", first)
    assert not is_granted(CONDUCTOR.peer_id, RUN, "u", first)
    assert list(first.seqs) == [4, 5, 9]
    early = granting.grant(3, 8, "t", [10], early=True)
    assert early is not None
    assert granting.grant(3, 7, "t", [4, 5, 9]) is first, "what is early has a place of its own"
    more = granting.grant(3, 7, "t", [4, 5, 9, 11])
    again = granting.grant(4, 7, "t", [4, 5, 9, 11])
    assert (more, again) != (None, None)
    assert more != again
    assert sign.times == 4
    helped = granting.grant(4, 7, "t", [4, 5, 9, 11], helped=True)
    assert helped is not None
    assert (helped.helped, again is not None and again.helped, sign.times) == (True, False, 5)
    assert is_granted(CONDUCTOR.peer_id, RUN, "t", helped)
