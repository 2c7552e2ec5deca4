"""Pieces of received data: the buffer types in a stream's inbox, and the size up to which they are merged."""

from __future__ import annotations

from typing import Final

MERGE_BYTES: Final = 16 * 1024  # small pieces are merged up to this size, so that one-byte pieces cost little

Piece = bytes | bytearray | memoryview
