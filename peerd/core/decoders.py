"""Decoders from msgpack, JSON and plain values into msgspec types, built under a lock.

When msgspec first builds a decoder of a struct, it caches the fields' descriptions in the class. It publishes the cache
entry before it is complete, and releases the GIL meanwhile: a second thread that decodes the same struct, or one that
contains it, reads null pointers, and the process crashes. So all typed decoding of peerd uses this module, which builds
each type's first decoder under a lock. After that, any number of threads may decode the type.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_BUILDING = threading.Lock()
_BUILT: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The msgpack decoder of a type; decoding raises msgspec's errors."""
    built = _BUILT.get(kind)
    if built is None:
        with _BUILDING:
            built = _BUILT[kind] = msgspec.msgpack.Decoder(kind)
    return built


def from_json(raw: bytes | str, kind: type[T]) -> T:
    """Decode JSON into a value of this type. Raises msgspec.DecodeError."""
    decoder(kind)
    return msgspec.json.decode(raw, type=kind)


def convert(value: object, kind: type[T]) -> T:
    """Convert a value of dicts, lists and scalars to this type. Raises msgspec.ValidationError."""
    decoder(kind)
    return msgspec.convert(value, kind)
