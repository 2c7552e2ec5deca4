"""Failure suspicion: which peers to avoid for a while; suspicion grows with silence and ends with an answer.

It uses only the events it is given, and forgets the peers with the oldest events. A silent peer is shunned for 5 s,
then 10, 20, ... (algorithms.md 12); a peer that lied is shunned for as long as the caller decides. Shunning is local
and never reported to others, so that nobody can be slandered.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.machine.rate.backoff import backoff_s

BASE_S = 5.0  # suspicion after the first silence; doubles with each further one
LONGEST_S = 640.0


@dataclass(slots=True)
class _Suspect:
    silences: int = 0  # in a row
    until: float = 0.0


class Liveness:
    """Suspicion of each peer. Every method takes and returns monotonic seconds."""

    def __init__(self, remember: int = 4096) -> None:
        self._suspects = BoundedDict[bytes, _Suspect](remember)  # by raw peer id, which hashes fast

    def answered(self, peer: PeerId) -> None:
        """End the suspicion of a peer that answered."""
        self._suspects.pop(peer.raw, None)

    def silent(self, now: float, peer: PeerId) -> int:
        """Record that the peer did not answer, or closed its connection; returns the number of silences in a row.

        Several calls that fail at once are one silence: failures while the peer is shunned do not count.
        """
        suspect = self._suspect(peer)
        if now >= suspect.until:
            suspect.silences += 1
            suspect.until = now + backoff_s(suspect.silences, BASE_S, LONGEST_S)
        return suspect.silences

    def lied(self, now: float, peer: PeerId, shun_s: float) -> None:
        """Shun a peer that violated the protocol for `shun_s`."""
        suspect = self._suspect(peer)
        suspect.until = max(suspect.until, now + shun_s)

    def shunned(self, now: float, peer: PeerId) -> bool:
        """Return True while the peer must be avoided."""
        suspect = self._suspects.get(peer.raw)
        return suspect is not None and now < suspect.until

    def cooled(self, now: float) -> list[PeerId]:
        """Suspects that may be tried again."""
        return [PeerId(raw) for raw, suspect in self._suspects.items() if now >= suspect.until]

    def suspected(self, peer: PeerId) -> bool:
        """Return True if the last event of the peer was a silence or a lie, however long ago."""
        return peer.raw in self._suspects

    def __len__(self) -> int:
        return len(self._suspects)

    def _suspect(self, peer: PeerId) -> _Suspect:
        suspect = self._suspects[peer.raw] = self._suspects.get(peer.raw) or _Suspect()
        return suspect
