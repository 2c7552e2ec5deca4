"""Pieces of received data: the buffers that a stream's inbox is made of, and up to which size they are joined."""

from __future__ import annotations

from typing import Final

MERGE_BYTES: Final = 16 * 1024  # small pieces are joined up to this size, so that a piece per byte costs nothing

Piece = bytes | bytearray | memoryview
