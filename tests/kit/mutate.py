"""A seeded mutator of byte strings, and the harness that feeds a parser with what it makes.

Every input follows from (seed, index) alone, so a failure names both and can be run again by itself. Besides the usual
damage (bit flips, cuts, insertions, doubled and spliced parts) it writes what hurts parsers of binary protocols: huge
varints, huge big-endian lengths, long runs of one byte, zeros where a length was.
"""

from __future__ import annotations

import contextlib
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence

from peerd.core.errors import ProtocolViolation

Parse = Callable[[bytes], object]

SLOWEST_CPU_S = 1.0  # one input; a parser that loops on hostile bytes takes longer, a busy machine does not
MEMORY_GROWTH_BYTES = 96 << 20  # of the whole process, over all inputs
INPUT_BYTES_MAX = 1 << 16  # mutated inputs do not grow beyond it

_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x20, 0xC1, 0xDD, 0xC9)
_NUMBERS = [
    *(
        value.to_bytes(size, "big")
        for size in (2, 4, 8)
        for value in (0, 1, (1 << 8 * size - 1) - 1, (1 << 8 * size) - 1)
    ),
    (0x8000).to_bytes(4, "big"),
    (256 * 1024 + 1).to_bytes(4, "big"),
    (1 << 31).to_bytes(4, "big"),
    (1 << 40).to_bytes(8, "big"),
    (65535).to_bytes(2, "big"),
]
_VARINTS = [
    b"\x80\x80\x80\x80\x01",  # 2^28
    b"\xff\xff\xff\xff\x0f",  # 2^32 - 1
    b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # 2^63 - 1
    b"\xff" * 9 + b"\x01",  # 2^64 - 1
    b"\xff" * 16,  # never ends
    b"\x80\x00",  # padded zero
]


def _flip_bit(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(_BYTES)


def _cut_end(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _cut_inside(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 17)]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 17))


def _insert_run(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = bytes([rng.choice(_BYTES)]) * rng.choice((4, 64, 300, 1100))


def _double(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.choice((4, 16, 64, 256))]
    data[start:start] = part * rng.choice((1, 1, 2, 8))


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _append(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    data += rng.choice(corpus)


def _write_number(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    number = rng.choice(_NUMBERS)
    at = rng.randrange(len(data) + 1)
    data[at : at + len(number)] = number


def _write_varint(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.randrange(3)] = rng.choice(_VARINTS)


_MUTATIONS = [
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _cut_end,
    _cut_inside,
    _insert,
    _insert_run,
    _double,
    _splice,
    _append,
    _write_number,
    _write_number,
    _write_varint,
    _write_varint,
]


def mutated(corpus: Sequence[bytes], seed: int, index: int) -> bytes:
    """The input number `index` of this seed: an entry of `corpus` after one to four mutations."""
    rng = random.Random(seed << 32 | index)
    data = bytearray(corpus[index % len(corpus)])
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(_MUTATIONS)(rng, data, corpus)
    return bytes(data[:INPUT_BYTES_MAX])


def fuzz(
    parse: Parse,
    corpus: Sequence[bytes],
    count: int,
    seed: int = 1,
    also_allowed: tuple[type[Exception], ...] = (),
) -> str:
    """Feed `parse` with `count` mutated inputs: it returns or raises ProtocolViolation, soon and in little memory.

    Returns what went wrong first, and with which input; "" when nothing did.
    """
    before = peak_bytes()
    for index in range(count):
        data = mutated(corpus, seed, index)
        start = time.process_time()
        try:
            parse(data)
        except (ProtocolViolation, *also_allowed):
            pass
        except Exception as error:  # whatever it is, it is the finding
            traceback.print_exception(error)  # pytest shows it beside the failure
            return f"{error!r} for input {index} of seed {seed}: {data[:200].hex()}"
        if (took_s := time.process_time() - start) > SLOWEST_CPU_S:
            return f"{took_s:.1f} CPU seconds for input {index} of seed {seed}: {data[:200].hex()}"
    grown = peak_bytes() - before
    if grown >= MEMORY_GROWTH_BYTES:
        return f"memory grew by {grown >> 20} MiB over {count} inputs of seed {seed}"
    return ""


def accepts(parse: Parse, data: bytes, allowed: tuple[type[Exception], ...] = ()) -> bool:
    """Does it take this input? False for a ProtocolViolation; any other error but the `allowed` ones is raised."""
    try:
        parse(data)
    except allowed:
        return True
    except ProtocolViolation:
        return False
    return True


def worst_allocation(parse: Parse, corpus: Sequence[bytes], count: int, seed: int = 2) -> tuple[int, int]:
    """(bytes, index) of the input during which `parse` held the most memory beyond what was held before it."""
    worst = (0, 0)
    tracemalloc.start()
    try:
        for index in range(count):
            data = mutated(corpus, seed, index)
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(Exception):  # `fuzz` judges what is raised
                parse(data)
            worst = max(worst, (tracemalloc.get_traced_memory()[1] - held, index))
    finally:
        tracemalloc.stop()
    return worst


def peak_bytes() -> int:
    """The most memory that this process ever had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
