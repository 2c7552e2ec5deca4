"""Packed payloads: back byte for byte, small where bytes repeat, and no lie of a peer's is believed."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from peerd.codec.format.frame import LOSSLESS_CHUNK_BYTES, lossless_bounds
from peerd.codec.lossless import from_planes, pack, to_planes, unpack
from peerd.core.errors import ProtocolViolation

CHUNK = LOSSLESS_CHUNK_BYTES
STORED = 1 << 31


def packed_well(payload: bytes, itemsize: int) -> tuple[memoryview, list[str]]:
    """The payload packed, and what is wrong with that or with what it unpacks to."""
    packed = pack(memoryview(payload), itemsize)
    least, most = lossless_bounds(len(payload))
    raw = unpack(packed, len(payload), itemsize, name="x")
    right = {"size": least <= packed.nbytes <= most, "bytes": raw == payload, "read-only": not raw.readonly}
    return packed, [what for what, as_it_should in right.items() if not as_it_should]


def test_planes_are_the_first_bytes_then_the_second_ones() -> None:
    for itemsize, planes in [(1, b"abcdefgh"), (2, b"acegbdfh"), (4, b"aebfcgdh"), (8, b"abcdefgh")]:
        assert bytes(to_planes(memoryview(b"abcdefgh"), itemsize)) == planes
        target = np.zeros(8, dtype=np.uint8)
        from_planes(planes, itemsize, target)
        assert target.tobytes() == b"abcdefgh"


@given(items=st.integers(0, 300), itemsize=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99), noisy=st.booleans())
def test_any_payload_comes_back_byte_for_byte(items: int, itemsize: int, seed: int, noisy: bool) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(items * itemsize)
    _, wrong = packed_well(data if noisy else bytes(byte & 3 for byte in data), itemsize)
    assert wrong == []


@pytest.mark.parametrize("size", [CHUNK - 8, CHUNK, CHUNK + 8, 2 * CHUNK + 16])
def test_payloads_of_several_chunks_come_back(size: int) -> None:
    smooth = np.arange(size // 8, dtype=np.float64).tobytes()
    packed, wrong = packed_well(smooth, 8)
    assert wrong == []
    assert packed.nbytes < size / 2


def test_a_chunk_that_does_not_shrink_is_stored_and_its_neighbours_are_not() -> None:
    noise = random.Random(1).randbytes(CHUNK)
    packed, wrong = packed_well(bytes(CHUNK) + noise + bytes(8), 4)
    assert wrong == []
    (first,) = struct.unpack_from("<I", packed)
    assert first < 200
    (second,) = struct.unpack_from("<I", packed, 4 + first)
    assert second == STORED | CHUNK
    assert packed[8 + first :][:CHUNK] == noise


def test_threads_pack_at_once_each_with_its_own_tools() -> None:
    payload = np.arange(1 << 17, dtype=np.float32).tobytes()
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(bytes(pack(memoryview(payload), 4)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bytes(pack(memoryview(payload), 4))] * 4


# --- hostile payloads ----------------------------------------------------------------------------------------------


def chunk(data: bytes, flag: int = 0) -> bytes:
    return (len(data) | flag).to_bytes(4, "little") + data


def zstd(data: bytes, **settings: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **settings).compress(data)  # type: ignore[arg-type]


GOOD = zstd(bytes(1000))
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


def claiming(size: int, length: int = 1 << 17) -> bytes:
    """A small frame of `length` zeros that says it had `size` bytes."""
    honest = zstd(bytes(length))
    at = honest.index(length.to_bytes(4, "little"), 4)
    return honest[:at] + size.to_bytes(4, "little") + honest[at + 4 :]


def of_window(log2: int) -> bytes:
    """1000 zeros as one repeated byte, in a frame that wants a window of 2^log2."""
    header = struct.pack("<IBBH", 0xFD2FB528, 1 << 6, (log2 - 10) << 3, 1000 - 256)
    return header + (1000 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "packed chunk 0 is missing"),
        (b"\x05\x00\x00", "packed chunk 0 is missing"),
        (chunk(b""), "wrong length of 0 bytes"),
        (chunk(GOOD)[:-1], "wrong length"),
        (chunk(GOOD) + b"x", "1 bytes after its last packed chunk"),
        (chunk(GOOD) + chunk(GOOD), f"{len(GOOD) + 4} bytes after its last packed chunk"),
        (chunk(bytes(1000)), "wrong length of 1000 bytes"),
        (chunk(bytes(999), STORED), "wrong length of 999 bytes"),
        (chunk(bytes(1001), STORED), "wrong length of 1001 bytes"),
        (chunk(b"", STORED), "wrong length of 0 bytes"),
        (b"\xff\xff\xff\xff" + bytes(100), "wrong length of 2147483647 bytes"),
        (chunk(b"not zstandard at all"), "cannot be unpacked"),
        (chunk(GOOD[:-1]), "cannot be unpacked"),
        (chunk(GOOD + b"x"), "cannot be unpacked"),
        (chunk(GOOD + GOOD), "cannot be unpacked"),
        (chunk(zstd(bytes(1001))), "claims 1001 bytes; expected 1000"),
        (chunk(zstd(bytes(999))), "claims 999 bytes; expected 1000"),
        (chunk(zstd(b"")), "claims 0 bytes; expected 1000"),
        (chunk(claiming(1 << 30)), "claims 1073741824 bytes; expected 1000"),
        (chunk(zstd(bytes(1000), write_content_size=False)), "claims -1 bytes; expected 1000"),
        (chunk(SKIPPABLE + GOOD), "claims 0 bytes; expected 1000"),
    ],
)
def test_a_lie_about_lengths_or_contents_is_refused(packed: bytes, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=f"^the input.*{words}"):
        unpack(memoryview(packed), 1000, 4, name="the input")


def test_the_chunk_that_lies_is_named() -> None:
    packed = bytearray(pack(memoryview(bytes(2 * CHUNK + 1000)), 1))
    packed[-3] ^= 0xFF
    with pytest.raises(ProtocolViolation, match="x: packed chunk 2"):
        unpack(memoryview(packed), 2 * CHUNK + 1000, 1, name="x")


def test_a_frame_that_holds_more_or_less_than_it_claims_is_refused() -> None:
    for size in (CHUNK, CHUNK - 1, (1 << 17) - 1, (1 << 17) + 1):
        assert zstandard.frame_content_size(claiming(size)) == size
        with pytest.raises(ProtocolViolation, match="cannot be unpacked"):
            unpack(memoryview(chunk(claiming(size))), size, 1, name="x")


def held(job: Callable[[], object]) -> int:
    """The most bytes that `job` held at once, of what Python and numpy allocate."""
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolViolation):
            job()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_more_than_the_raw_payload_and_a_chunk_is_ever_held() -> None:
    bomb = memoryview(b"".join([chunk(zstd(bytes(CHUNK)))] * 3 + [chunk(claiming(1 << 30))]))
    assert held(lambda: unpack(bomb, 4 * CHUNK, 4, name="x")) < 5.5 * CHUNK
    assert held(lambda: unpack(bomb[:200], 4 * CHUNK, 4, name="x")) < 5.5 * CHUNK


def test_a_frame_cannot_make_us_hold_a_wide_window() -> None:
    """A whole frame is unpacked where it lies; a broken one would have its window allocated, were it allowed."""
    for log2 in (10, 20, 31):
        assert unpack(memoryview(chunk(of_window(log2))), 1000, 1, name="x") == bytes(1000)
        with pytest.raises(ProtocolViolation, match="too much memory" if log2 > 20 else "did not decompress"):
            unpack(memoryview(chunk(of_window(log2)[:-1])), 1000, 1, name="x")


@given(data=st.binary(max_size=200), raw_bytes=st.sampled_from([0, 8, 1000, CHUNK + 8]))
def test_no_bytes_at_all_raise_anything_but_a_protocol_violation(data: bytes, raw_bytes: int) -> None:
    for packed, size in ((data, raw_bytes), (chunk(GOOD[:6] + data), 1000)):
        try:
            found = unpack(memoryview(packed), size, 8, name="x")
        except ProtocolViolation:
            continue
        assert found.nbytes == size
