"""The error tree. Type tells whose fault it is: ours, the user's, a peer's, or the network's.

A decoder raises `ProtocolViolation`; the driver that knows the peer calls `blame(peer)` on it.
"""

from __future__ import annotations

from typing import Final, Self

from peerd.core.ids import PeerId

OTHER_RUN_FILE: Final = "your run file differs from this run's"  # the reason of a Refused, where that is it
NOT_CONDUCTING: Final = "this peer does not conduct"  # a Refused of one that is not the conductor begins so
_DISTRIBUTIONS: Final = {"yaml": "PyYAML", "nacl": "pynacl", "google": "protobuf", "sklearn": "scikit-learn"}


class PeerdError(Exception):
    """Any failure that peerd names itself."""


class ConfigError(PeerdError):
    """The user gave something that cannot be used: says what, where, and what is allowed."""


def missing_package(error: ModuleNotFoundError) -> str:
    """The package that an import lacks, and what to type to get it."""
    package = (error.name or str(error)).partition(".")[0]
    distribution = _DISTRIBUTIONS.get(package, package)
    return f"the package {package}, which is not installed; type: pip install {distribution}"


class LocalError(PeerdError):
    """We misused one of our own parts: a bug, never a peer's doing."""


class GivenUp(PeerdError):
    """Work was stopped because its result is not needed any more."""


class NoMemory(PeerdError):
    """This machine, or its device, has no memory left for a job: others' programs may have it. Later it may do."""


class RemoteError(PeerdError):
    """A peer failed us. `peer` is None until the driver that knows it fills it in.

    `unproven`: a call showed a proof that does not hold, which took a signature check; it counts against the caller.
    """

    unproven = False

    def __init__(self, message: str, peer: PeerId | None = None) -> None:
        super().__init__(message)
        self.peer = peer

    def as_unproven(self) -> Self:
        """The error of a call whose proof does not hold; returns self."""
        self.unproven = True
        return self

    def blame(self, peer: PeerId) -> RemoteError:
        """Name the peer at fault; returns self, so that `raise error.blame(peer)` reads well."""
        self.peer = self.peer or peer
        return self

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} (peer {self.peer.short})" if self.peer is not None else text


class ProtocolViolation(RemoteError):
    """Input from a peer that breaks the protocol."""


class Refused(RemoteError):
    """The peer understood and said no; the message is its reason."""


class Untrusted(RemoteError):
    """We do not deal with the peer: it showed nothing that makes it a member of the run."""


class NotFiniteHere(RemoteError):
    """The peer's own output or gradient for a microbatch is not finite, or too large, though its input was finite."""


class Overloaded(RemoteError):
    """The peer is busy; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float, peer: PeerId | None = None) -> None:
        super().__init__(message, peer)
        self.retry_after_s = retry_after_s


class Unreachable(RemoteError):
    """No connection to the peer, or the connection was lost."""


class TooSlow(RemoteError):
    """The deadline passed before the peer answered."""


class TooFewExperts(RemoteError):
    """Fewer experts answered for a sample than it needs; the message names those asked and what became of each."""
