"""Members of a run with access tokens: who is a member, what members may call and serve, and revoked tokens. Sans-IO.

Reads no clock: `now` is corrected Unix time. Invariants: a peer is a member only with a token that the organizer signed
for this run and this peer; the number of the list of revoked tokens only increases, no matter which peer delivers the
list; the organizer is always a member. There are no more members than tokens that the organizer issued.

Hostile input: a peer may present any bytes as its token or its list, any number of times, and may call methods that its
roles do not allow. A token's signature is verified last, and once for each genuine token; a list's signature is
verified first, since that costs less than decoding the list.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import CLOCK_CORRECTION_S
from peerd.messages.token import NO_TOKEN, Revoked, Token, fault, signed_by, unseal

# Roles, as tokens name them, that may call a method or a whole service. Every member may call what is not listed.
CALLERS: Final[dict[str, frozenset[str]]] = {
    "stage/6/forward": frozenset({"trainer"}),
    "stage/6/loss": frozenset({"trainer"}),
    "stage/6/prepare": frozenset({"stage"}),
    "stage/6/commit": frozenset({"stage"}),
    "stage/6/restore": frozenset({"stage"}),
    "handover/2/pass": frozenset({"trainer", "stage"}),
    "handover/2/relay": frozenset({"stage"}),
    "swarm/6/member": frozenset({"stage", "aux"}),
    "swarm/6/trainer": frozenset({"trainer"}),
    "network/1/report": frozenset({"stage", "aux", "trainer"}),
    "average/2": frozenset({"stage", "aux"}),
    "kept/1": frozenset({"stage"}),
    "expert/1": frozenset({"trainer", "expert"}),
    "sharing/2": frozenset({"expert"}),
    "vault/2": frozenset({"expert", "backbone"}),
}
# Roles whose methods a member calls. It uses the directory of any peer, since publishers sign the records.
SERVERS: Final[dict[str, frozenset[str]]] = {
    "stage/6/prepare": frozenset({"stage", "aux"}),
    "stage/6": frozenset({"stage"}),
    "handover/2/pass": frozenset({"stage"}),
    "handover/2/relay": frozenset({"trainer"}),
    "swarm/6": frozenset({"stage"}),
    "posts/1": frozenset({"stage"}),
    "network/1": frozenset({"stage"}),
    "average/2": frozenset({"stage", "aux"}),
    "state/1": frozenset({"stage"}),
    "kept/1": frozenset({"backbone"}),
    "expert/1": frozenset({"expert"}),
    "sharing/2": frozenset({"expert"}),
    "vault/2": frozenset({"expert", "backbone"}),
}
FREE: Final = "access/1"  # for showing tokens: open to everyone
OPEN: Final = frozenset({FREE, "run/1"})  # the run file, too: a stranger sees what it would join
ANYWHERE: Final = "dht/4"
_REMEMBERED: Final = 2048  # tokens whose signature was verified


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the run. `rights`: its roles, and those that these imply, or None for all rights (the organizer)."""

    name: str
    token: Token | None
    rights: frozenset[str] | None

    def lacks(self, roles: frozenset[str]) -> bool:
        """True if the member's rights are limited and include none of `roles`."""
        return self.rights is not None and not self.rights & roles


class RunMembers:
    """The members of one run, as one peer knows them."""

    def __init__(self, run: str, organizer: PeerId, stages: int) -> None:
        self.run, self.organizer = run, organizer
        self.revoked_data = b""  # the newest list, sealed
        self.revoked_number = -1
        self._revoked: frozenset[bytes] = frozenset()
        self._one_stage = stages == 1
        self._members: dict[PeerId, Member] = {organizer: Member("organizer", None, None)}
        self._expired: set[PeerId] = set()  # peers whose token is valid except by our clock, which may be wrong
        self._genuine = BoundedDict[bytes, None](_REMEMBERED)  # SHA-256 of sealed tokens

    def __len__(self) -> int:
        return len(self._members)

    def judge(self, peer: PeerId, data: bytes, now: float) -> Member | str:
        """Verify the token `data` that `peer` shows. Returns a Member or the reason for a refusal; changes nothing."""
        if peer == self.organizer:
            return self._members[peer]
        if not data:
            return "no token was shown"
        try:
            token = unseal(Token, data)
        except ProtocolViolation as error:
            return f"the data shown is not a token: {error}"[:200]
        why = fault(token, self.run, peer, now)
        if why is None and token.id in self._revoked:
            why = "the token shown was revoked by the organizer"
        if why is None and not self._is_genuine(data):
            why = "the token shown is not signed by this run's organizer"
        return why or Member(token.name, token, self._rights(token))

    def expired_at(self, peer: PeerId, data: bytes, now: float) -> int | None:
        """Time, in Unix seconds, at which the token `data` of `peer` expired.

        Returns None if it has not expired, or is invalid for another reason.
        """
        try:
            token = unseal(Token, data)
        except ProtocolViolation:
            return None
        was_valid = isinstance(self.judge(peer, data, token.expires - 1.0), Member)
        return token.expires if now >= token.expires and was_valid else None

    def admit(self, peer: PeerId, data: bytes, now: float) -> str | None:
        """Make `peer` a member if `data` is its token. Otherwise remove it, and return the reason."""
        found = self.judge(peer, data, now)
        if isinstance(found, str):
            self.forget(peer)
            if isinstance(self.judge(peer, data, now - CLOCK_CORRECTION_S), Member):
                self._expired.add(peer)
            return found
        self._members[peer] = found
        self._expired.discard(peer)
        return None

    def may_vote(self, peer: PeerId) -> bool:
        """True if the peer's clock counts: a member's does, even if its token is expired by our own clock."""
        return peer in self._members or peer in self._expired

    def forget(self, peer: PeerId) -> None:
        """Remove a peer that has disconnected. If it reconnects, it presents its token again."""
        if peer != self.organizer:
            self._members.pop(peer, None)
            self._expired.discard(peer)

    def member(self, peer: PeerId, now: float) -> Member | None:
        """The member record of `peer`, or None if it has none or its token has expired."""
        found = self._members.get(peer)
        if found is not None and found.token is not None and now >= found.token.expires:
            del self._members[peer]
            return None
        return found

    def may_call(self, peer: PeerId, service: str, method: str, now: float) -> str | None:
        """Reason that `peer` may not call `method` (`stage/6/forward`) of `service` (`stage/6`), or None if it may."""
        found = self.member(peer, now)
        if found is None:
            return self.refusal("none was shown that is valid now")
        allowed = CALLERS.get(method) or CALLERS.get(service)
        if allowed is None or not found.lacks(allowed):
            return None
        return f"{method} is for {_listed(allowed)}; the token shown allows {_listed(found.rights)}"

    def may_serve(self, peer: PeerId, service: str, method: str, now: float) -> str | None:
        """Reason not to call `method` (`stage/6/forward`) of `service` of `peer`, or None if it may be called."""
        if service == ANYWHERE:
            return None
        found = self.member(peer, now)
        if found is None:
            return f"it has {NO_TOKEN} for run {self.run}"
        allowed = SERVERS.get(method) or SERVERS.get(service)
        if allowed is None or not found.lacks(allowed):
            return None
        return f"{method} is served by {_listed(allowed)}; its token allows {_listed(found.rights)}"

    def refusal(self, why: str) -> str:
        """Error text for a peer without a valid token."""
        return f"{NO_TOKEN} for run {self.run}: {why}; ask the organizer ({self.organizer.short}) for one"

    def learn_revoked(self, data: bytes) -> bool:
        """Adopt a list of revoked tokens; False if it is not newer than ours. Raises ProtocolViolation if invalid."""
        if not data or data == self.revoked_data:
            return False
        if not signed_by(self.organizer, Revoked, data):
            raise ProtocolViolation("the list of revoked tokens is not signed by this run's organizer")
        revoked = unseal(Revoked, data)
        if revoked.number <= self.revoked_number:
            return False
        self.revoked_data, self.revoked_number = data, revoked.number
        self._revoked = frozenset(revoked.ids)
        gone = [peer for peer, m in self._members.items() if m.token is not None and m.token.id in self._revoked]
        for peer in gone:
            del self._members[peer]
        return True

    def _rights(self, token: Token) -> frozenset[str]:
        roles = set(token.roles)
        if self._one_stage and "trainer" in roles:
            roles.add("stage")  # without a pipeline each trainer holds the whole model, and is its one stage
        return frozenset(roles)

    def _is_genuine(self, data: bytes) -> bool:
        digest = hashlib.sha256(data).digest()
        if digest not in self._genuine:
            if not signed_by(self.organizer, Token, data):
                return False
            self._genuine[digest] = None
        return True


def _listed(roles: frozenset[str] | None) -> str:
    return ", ".join(sorted(roles or ()))
