"""Ids of microbatches on the wire: compact for consecutive numbers, and bounded by the size of a batch.

Hostile input: numbers out of range, more ids than a batch can have, duplicates. Decoding rejects the first two;
duplicates are harmless because callers build sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from peerd.core.limits import BATCH_TRAINERS, MICROBATCHES

PeerText = Annotated[str, msgspec.Meta(max_length=64)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Skipped = Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
SpanCount = Annotated[int, msgspec.Meta(ge=1, le=MICROBATCHES)]


class Mb(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A microbatch's id: its trainer, and a number that is unique for this trainer."""

    trainer: PeerText
    seq: Seq


class Seqs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Numbers of one trainer's microbatches, in order, at most MICROBATCHES.

    Encoded as spans of consecutive numbers: reports are sent for each microbatch, and single numbers would fill a slow
    connection if a batch has many. Each span is (gap after the end of the previous span, count); the first gap counts
    from 0. Gaps are small, while a session's numbers are large.
    """

    spans: Annotated[
        list[tuple[Skipped, SpanCount]],
        msgspec.Meta(max_length=MICROBATCHES),
    ] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        end = total = 0
        for skipped, count in self.spans:
            begin, end = end + skipped, end + skipped + count
            total += count
            if begin < 0 or end > 1 << 62:
                raise ValueError("a microbatch's number is out of range")
        if total > MICROBATCHES:
            raise ValueError(f"more than {MICROBATCHES} microbatches")

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Seqs:
        """Encode numbers as spans, in the given order. Raises ValueError if there are too many."""
        spans: list[tuple[int, int]] = []
        end = 0
        for number in numbers:
            if spans and number == end:
                spans[-1] = spans[-1][0], spans[-1][1] + 1
            else:
                spans.append((number - end, 1))
            end = number + 1
        return cls(spans)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())

    def numbers(self) -> tuple[int, ...]:
        """All numbers, in order."""
        if not self.spans:  # the most frequent case
            return ()
        found, end = list[int](), 0
        for skipped, count in self.spans:
            begin, end = end + skipped, end + skipped + count
            if count == 1:
                found.append(begin)
            else:
                found += range(begin, end)
        return tuple(found)

    def __contains__(self, number: object) -> bool:
        end = 0
        for skipped, count in self.spans:
            begin, end = end + skipped, end + skipped + count
            if isinstance(number, int) and begin <= number < end:
                return True
        return False

    def __len__(self) -> int:
        return sum(count for _, count in self.spans)


class Mbs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Microbatches of a batch, grouped by trainer: at most BATCH_TRAINERS trainers, MICROBATCHES in total."""

    of_trainers: Annotated[list[tuple[PeerText, Seqs]], msgspec.Meta(max_length=BATCH_TRAINERS)] = msgspec.field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        if len(self) > MICROBATCHES:
            raise ValueError(f"more than {MICROBATCHES} microbatches")

    @classmethod
    def of(cls, mbs: Iterable[Mb]) -> Mbs:
        """Encode microbatches in sorted order; those beyond the bounds are dropped.

        A batch is within the bounds. If a report was cut, the conductor has the missing ones repeated or removed.
        """
        numbers: dict[str, list[int]] = {}
        for mb in sorted(mbs)[:MICROBATCHES]:
            numbers.setdefault(mb.trainer, []).append(mb.seq)
        return cls([(trainer, Seqs.of(numbers[trainer])) for trainer in [*numbers][:BATCH_TRAINERS]])

    def __iter__(self) -> Iterator[Mb]:
        return (Mb(trainer, seq) for trainer, seqs in self.of_trainers for seq in seqs)

    def __len__(self) -> int:
        return sum(len(seqs) for _, seqs in self.of_trainers)
