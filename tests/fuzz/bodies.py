"""Bodies of messages that a decoder mostly takes: made from a message's type, or from a good one with other fields.

What is in them comes from a pool: names of real peers and of none, the run's fingerprint, numbers at the edges of what
is allowed and some beyond. Everything follows from the generator's state alone.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

NUMBERS = (0, 0, 1, 1, 2, 3, 4, 7, 8, 255, 4096, (1 << 31) - 1, (1 << 53) - 1, (1 << 62) - 1)
FLOATS = (0.0, 0.0, 1.0, 0.5, 3.0, 1e-9, 1e9, 1e300, 5e-324, math.nan, math.inf, -1.0)
MOST_ITEMS = 40
BEYOND = 0.02  # how often a value is none that the type allows


@dataclass(frozen=True, slots=True)
class Pool:
    """Values for texts and bytes, apart from noise."""

    texts: Sequence[str]
    data: Sequence[bytes]


@functools.cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


class Bodies:
    """Makes encoded bodies. `wild`: how likely each field of a good message is replaced."""

    def __init__(self, rng: random.Random, pool: Pool, wild: float) -> None:
        self._rng, self._pool, self._wild = rng, pool, wild

    def any(self, kind: type[msgspec.Struct]) -> bytes:
        """A message of this type with anything in it."""
        return msgspec.msgpack.encode(self._make(_type_of(kind)))

    def like(self, good: msgspec.Struct) -> bytes:
        """This message with some fields replaced."""
        plain = msgspec.to_builtins(good, builtin_types=(bytes,))
        return msgspec.msgpack.encode(self._vary(_type_of(type(good)), plain))

    def _vary(self, kind: inspect.Type, value: Any) -> Any:
        if self._rng.random() < self._wild:
            return self._make(kind)
        match kind:
            case inspect.StructType(fields=fields):
                return [self._vary(field.type, one) for field, one in zip(fields, value, strict=True)]
            case inspect.ListType(item_type=item):
                kept = [self._vary(item, one) for one in value]
                return kept * 2 if self._rng.random() < self._wild / 4 else kept
            case inspect.TupleType(item_types=items):
                return [self._vary(item, one) for item, one in zip(items, value, strict=True)]
            case inspect.UnionType(types=types) if value is not None:
                return self._vary(next(one for one in types if not isinstance(one, inspect.NoneType)), value)
        return value

    def _make(self, kind: inspect.Type) -> Any:
        rng = self._rng
        if rng.random() < BEYOND:
            return rng.choice((None, -1, 1 << 63, "", b"", [], {}, True, 0.5))
        match kind:
            case inspect.StructType(fields=fields):
                return [self._make(field.type) for field in fields]
            case inspect.ListType(item_type=item):
                return [self._make(item) for _ in range(self._count(kind))]
            case inspect.TupleType(item_types=items):
                return [self._make(item) for item in items]
            case inspect.UnionType(types=types):
                return self._make(rng.choice(types))
            case inspect.LiteralType(values=values):
                return rng.choice(values)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.IntType():
                return self._int(kind)
            case inspect.FloatType():
                return self._float(kind)
            case inspect.StrType():
                return self._text(kind)
            case inspect.BytesType():
                return self._bytes(kind)
        return None

    def _count(self, kind: Any) -> int:
        most = MOST_ITEMS if kind.max_length is None else min(kind.max_length, MOST_ITEMS)
        return max(kind.min_length or 0, self._rng.choice((0, 1, 1, 2, 2, 3, most)))

    def _int(self, kind: inspect.IntType) -> int:
        least = kind.ge if kind.ge is not None else kind.gt + 1 if kind.gt is not None else -(1 << 62)
        most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 1 << 62
        value = self._rng.choice((*NUMBERS, least, most))
        return min(max(int(value), int(least)), int(most))

    def _float(self, kind: inspect.FloatType) -> float:
        edges = [edge for edge in (kind.ge, kind.gt, kind.le, kind.lt) if edge is not None]
        return float(self._rng.choice((*FLOATS, *edges, *edges)))

    def _text(self, kind: inspect.StrType) -> str:
        return self._rng.choice(self._pool.texts)[: kind.max_length]

    def _bytes(self, kind: inspect.BytesType) -> bytes:
        least, most = kind.min_length or 0, 100 if kind.max_length is None else kind.max_length
        fitting = [data for data in self._pool.data if least <= len(data) <= most]
        if fitting and self._rng.random() < 0.8:
            return self._rng.choice(fitting)
        return self._rng.randbytes(self._rng.choice((least, min(most, 300))))
