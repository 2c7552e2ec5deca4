"""One round of all-reduce as one member sees it: who owes which part to whom, and who is late.

The vector is cut into one share for each member of the group, and each share into parts. Every member sends each
part to its owner, who sums all members' versions in the order of the group (so that the sum has the same bits for
everyone) and returns the sum. A round succeeds whole or not at all; the conductor repeats it without the lost.
Counts only: the elements are summed elsewhere. A hostile member may send a part twice or one that is not its
owner's to sum: refused. Invariant: a part is summed once, when each member's version is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.errors import PeerdError


class RoundFailed(PeerdError):
    """The round cannot end; `lost` are the members at fault."""

    def __init__(self, reason: str, lost: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass(frozen=True, slots=True)
class AveragingPlan:
    """One round. `group` in the order in which sums are made; `patience_s` with a silent member."""

    attempt: bytes
    group: tuple[str, ...]
    part_bytes: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `begin` up to `end` of the vector, summed by `owner`."""

    index: int
    owner: str
    begin: int
    end: int


def cut(length: int, group: tuple[str, ...], part_elements: int) -> tuple[Part, ...]:
    """The parts of a vector; every member computes the same ones. Shares differ by one element at most."""
    parts: list[Part] = []
    for position, owner in enumerate(group):
        begin, share_end = position * length // len(group), (position + 1) * length // len(group)
        while begin < share_end:
            end = min(begin + part_elements, share_end)
            parts.append(Part(len(parts), owner, begin, end))
            begin = end
    return tuple(parts)


class Round:
    """See the module's header; `now` is monotonic seconds."""

    def __init__(self, own: str, group: tuple[str, ...], parts: tuple[Part, ...], patience_s: float) -> None:
        self.own, self.group, self.parts = own, group, parts
        self._patience_s = patience_s
        self._senders: dict[int, set[str]] = {part.index: set() for part in parts if part.owner == own}
        self._due = {part.index: part.owner for part in parts if part.owner != own}
        self._heard: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Patience with the others starts here."""
        self._heard = dict.fromkeys(self.group, now)

    def arrived(self, now: float, index: int, sender: str) -> bool:
        """`sender`'s version of one of our parts is here; True when it was the last one and the sum is due.

        Raises ValueError when the part is not ours, the sender not of the group, or its version here already.
        """
        senders = self._senders.get(index)
        if senders is None:
            raise ValueError(f"part {index} is not mine to sum")
        if sender not in self.group:
            raise ValueError("the sender is not of this round")
        if sender in senders:
            raise ValueError(f"part {index} came twice")
        senders.add(sender)
        self._heard[sender] = now
        return len(senders) == len(self.group)

    def returned(self, now: float, index: int) -> None:
        """The owner sent us the sum of a part."""
        self._heard[self._due.pop(index)] = now

    @property
    def finished(self) -> bool:
        """Have we every sum, and has everyone ours?"""
        return not self._due and all(len(senders) == len(self.group) for senders in self._senders.values())

    def late(self, now: float) -> tuple[str, ...]:
        """Members we have waited for longer than our patience, sorted.

        Who owes us its version is named first: an owner may only be waiting for the same late sender, so owners
        get twice the patience (the paper's code does the same).
        """
        group = set(self.group)
        owing = {peer for got in self._senders.values() for peer in group - got} - {self.own}
        late = [p for p in owing if now - self._heard.get(p, now) > self._patience_s]
        if not late:
            late = [p for p in set(self._due.values()) if now - self._heard.get(p, now) > 2 * self._patience_s]
        return tuple(sorted(late))
