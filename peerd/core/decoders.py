"""Decoders of typed data, built one at a time: from msgpack, JSON and plain values into msgspec's types.

msgspec notes in a struct's class what its fields are when a decoder of it is first built. It publishes the note before
it is complete, and releases the interpreter meanwhile: a second thread that decodes the same struct, or one that
contains it, reads null pointers, and the process dies. So every typed decoding of ours comes through here, and the
first of each type holds a lock. Once built a type may be decoded by any number of threads.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_BUILDING = threading.Lock()
_BUILT: dict[Any, msgspec.msgpack.Decoder[Any]] = {}  # one per type that the program decodes


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The decoder of a type from msgpack; its errors are msgspec's."""
    built = _BUILT.get(kind)
    if built is None:
        with _BUILDING:
            built = _BUILT[kind] = msgspec.msgpack.Decoder(kind)
    return built


def from_json(raw: bytes | str, kind: type[T]) -> T:
    """The value of this type that a JSON text holds; msgspec.DecodeError where it holds none."""
    decoder(kind)
    return msgspec.json.decode(raw, type=kind)


def convert(value: object, kind: type[T]) -> T:
    """A plain value as this type; msgspec.ValidationError where it does not fit."""
    decoder(kind)
    return msgspec.convert(value, kind)
