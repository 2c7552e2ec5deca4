"""Exception classes. The class says who is at fault: this program, the user, a peer, or the network.

A decoder raises `ProtocolViolation`; the caller that knows the peer calls `blame(peer)` on it.
"""

from __future__ import annotations

import enum
from typing import Final, Self

from peerd.core.ids import PeerId

_DISTRIBUTIONS: Final = {"yaml": "PyYAML", "nacl": "pynacl", "google": "protobuf", "sklearn": "scikit-learn"}


class Cause(enum.Enum):
    """Cause of a peer's failure that callers react to. The value names it in messages."""

    OTHER = "refused"
    OTHER_RUN_FILE = "other run file"
    NOT_CONDUCTING = "not conducting"
    NO_TOKEN = "no token"
    NO_SUCH_PROTOCOL = "no such protocol"  # never sent: the negotiation of a stream shows it
    OURSELVES = "ourselves"  # never sent: the connection leads back to this peer


class PeerdError(Exception):
    """Base class of peerd's own exceptions."""


class ConfigError(PeerdError):
    """Invalid input from the user. The message says what is wrong, where, and what is allowed."""


def missing_package(error: ModuleNotFoundError) -> str:
    """Message for the user: the missing package, and the command that installs it."""
    package = (error.name or str(error)).partition(".")[0]
    distribution = _DISTRIBUTIONS.get(package, package)
    return f"the package {package}, which is not installed; type: pip install {distribution}"


class LocalError(PeerdError):
    """A bug in this program: an interface was used wrongly. Never caused by a peer."""


class WorkCancelled(PeerdError):
    """Work was cancelled because its result is no longer needed."""


class NoMemory(PeerdError):
    """This machine, or its device, has no memory left for a job. Another program may use it, so a retry can succeed."""


class RemoteError(PeerdError):
    """A failure caused by a peer. `peer` is None until `blame` sets it. `cause` is for code, the message for people.

    `unproven` is True if a call carried an invalid proof: checking it cost a signature verification, which is charged
    to the caller.
    """

    unproven = False

    def __init__(self, message: str, peer: PeerId | None = None, cause: Cause = Cause.OTHER) -> None:
        super().__init__(message)
        self.peer, self.cause = peer, cause

    def as_unproven(self) -> Self:
        """Mark this as the error of a call with an invalid proof; returns self."""
        self.unproven = True
        return self

    def blame(self, peer: PeerId) -> RemoteError:
        """Set the peer at fault unless it is set; returns self, for `raise error.blame(peer)`."""
        self.peer = self.peer or peer
        return self

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} (peer {self.peer.short})" if self.peer is not None else text


class ProtocolViolation(RemoteError):
    """Input from a peer that breaks the protocol."""


class Refused(RemoteError):
    """The peer refused the request; the message is its reason."""


def other_run_file() -> Refused:
    """The error for a request of a peer with another run file."""
    return Refused("your run file differs from this run's", cause=Cause.OTHER_RUN_FILE)


def not_conducting(more: str = "") -> Refused:
    """The error of a peer that is not the conductor. `more` continues its message."""
    return Refused(f"this peer does not conduct{more}", cause=Cause.NOT_CONDUCTING)


class Untrusted(RemoteError):
    """This side rejects the peer, which has not proven that it is a member of the run."""


class NotFiniteHere(RemoteError):
    """The peer computed a non-finite or too large output or gradient for a microbatch with a finite input."""


class Overloaded(RemoteError):
    """The peer is busy; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float, peer: PeerId | None = None) -> None:
        super().__init__(message, peer)
        self.retry_after_s = retry_after_s


class Unreachable(RemoteError):
    """The peer cannot be connected to, or the connection was lost."""


class TooSlow(RemoteError):
    """The deadline passed before the peer answered."""


class TooFewExperts(RemoteError):
    """Fewer experts answered for a sample than required; the message lists the experts asked and each one's result."""
