"""Ids of microbatches on the wire: short where numbers follow each other, and never more than a batch has.

Values only. Hostile input: numbers out of range, more of them than a batch has, names twice; the first two are refused
in decoding, the last is harmless where sets are made of them.
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
    """A microbatch's id: its trainer and the trainer's own number for it."""

    trainer: PeerText
    seq: Seq


class Seqs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Numbers of one trainer's microbatches, in order, at most MICROBATCHES.

    As spans of numbers that follow each other, which most do: reports come with each microbatch, and number by number
    they would fill a slow line when a batch has many. A span says how far behind the end of the one before it it
    begins (the first: behind 0), since a session's numbers are large and lie close together.
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
        """The numbers as spans; ValueError if they are too many."""
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
        """All of them, in order."""
        if not self.spans:  # as most are
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
    """Microbatches of a batch, of at most BATCH_TRAINERS trainers and MICROBATCHES in all, by trainer."""

    of_trainers: Annotated[list[tuple[PeerText, Seqs]], msgspec.Meta(max_length=BATCH_TRAINERS)] = msgspec.field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        if len(self) > MICROBATCHES:
            raise ValueError(f"more than {MICROBATCHES} microbatches")

    @classmethod
    def of(cls, mbs: Iterable[Mb]) -> Mbs:
        """The microbatches in sorted order. What is beyond the bounds is left out: a batch is within them, and whoever
        is told of less than somebody holds has the rest done again, or taken out.
        """
        numbers: dict[str, list[int]] = {}
        for mb in sorted(mbs)[:MICROBATCHES]:
            numbers.setdefault(mb.trainer, []).append(mb.seq)
        return cls([(trainer, Seqs.of(numbers[trainer])) for trainer in [*numbers][:BATCH_TRAINERS]])

    def __iter__(self) -> Iterator[Mb]:
        return (Mb(trainer, seq) for trainer, seqs in self.of_trainers for seq in seqs)

    def __len__(self) -> int:
        return sum(len(seqs) for _, seqs in self.of_trainers)
