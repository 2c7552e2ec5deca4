"""Records: one encoding, signatures that cover everything, a total order, and decoding that survives strangers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.ids import Key, PeerId
from peerd.core.keys import Keypair, verify
from peerd.core.limits import CLOCK_TOLERANCE_S, RECORD_SUFFIX_BYTES, RECORD_TTL_S, RECORD_VALUE_BYTES
from peerd.core.record import MAX_RECORD_BYTES, Record, Verifier

ALICE, BOB = Keypair.from_seed(b"a" * 32), Keypair.from_seed(b"b" * 32)
KEY = Key.of("run/stage/0")


def record(version: int = 1, value: bytes = b"value", suffix: bytes = b"", keypair: Keypair = ALICE) -> Record:
    return Record(KEY, keypair.peer_id, suffix, value, version, 1_000_000).signed(keypair)


records = st.builds(
    lambda key, suffix, value, version, expires_ms, tombstone: Record(
        Key(key), ALICE.peer_id, suffix, b"" if tombstone else value, version, expires_ms, tombstone
    ).signed(ALICE),
    key=st.binary(min_size=32, max_size=32),
    suffix=st.binary(max_size=RECORD_SUFFIX_BYTES),
    value=st.binary(max_size=200),
    version=st.integers(0, 2**63 - 1),
    expires_ms=st.integers(0, 2**48 - 1),
    tombstone=st.booleans(),
)


@given(records)
def test_a_record_comes_back_from_its_encoding_and_is_genuine(original: Record) -> None:
    decoded = Record.decode(original.encode())
    assert decoded == original
    assert decoded.encode() == original.encode()
    assert decoded.is_signed(verify)


@given(records, st.data())
def test_no_changed_byte_leaves_a_genuine_record(original: Record, data: st.DataObject) -> None:
    raw = bytearray(original.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = Record.decode(bytes(raw))
    except ProtocolViolation:
        return
    assert not decoded.is_signed(verify)


def test_a_record_cut_anywhere_or_with_trailing_bytes_is_refused() -> None:
    raw = record(suffix=b"suffix").encode()
    for size in range(len(raw)):
        with pytest.raises(ProtocolViolation):
            Record.decode(raw[:size])
    with pytest.raises(ProtocolViolation):
        Record.decode(raw + b"\0")


def test_the_largest_record_travels_and_a_larger_one_is_not_made() -> None:
    largest = record(value=b"v" * RECORD_VALUE_BYTES, suffix=b"s" * RECORD_SUFFIX_BYTES)
    assert len(largest.encode()) == MAX_RECORD_BYTES
    assert Record.decode(largest.encode()) == largest
    for bad in (
        replace(largest, value=b"v" * (RECORD_VALUE_BYTES + 1)),
        replace(largest, suffix=b"s" * (RECORD_SUFFIX_BYTES + 1)),
        replace(largest, version=-1),
        replace(largest, version=2**63),
        replace(largest, expires_ms=2**48),
        replace(largest, tombstone=True),
    ):
        with pytest.raises(LocalError):
            bad.signed(ALICE)


def test_a_record_cannot_be_signed_for_another_or_travel_unsigned() -> None:
    with pytest.raises(LocalError):
        replace(record(), publisher=BOB.peer_id).signed(ALICE)
    with pytest.raises(LocalError):
        replace(record(), signature=b"").encode()


def test_the_signature_binds_key_publisher_suffix_version_and_expiry() -> None:
    good = record(suffix=b"a")
    changed = [
        replace(good, key=Key.of("run/stage/1")),
        replace(good, publisher=BOB.peer_id),
        replace(good, suffix=b"b"),
        replace(good, value=b"other"),
        replace(good, version=2),
        replace(good, expires_ms=good.expires_ms + 1),
        replace(good, value=b"", tombstone=True),
        replace(good, suffix=b"", value=b"avalue"),  # bytes moved over a border
    ]
    assert good.is_signed(verify)
    assert not any(bad.is_signed(verify) for bad in changed)


def test_a_signature_made_for_something_else_is_not_one_for_a_record() -> None:
    good = record()
    content = good.encode()[:-64]
    assert not replace(good, signature=ALICE.sign(content)).is_signed(verify)


@given(st.lists(records, min_size=2, max_size=6))
def test_of_two_unequal_records_exactly_one_beats_the_other(many: list[Record]) -> None:
    for one in many:
        for other in many:
            if one._rank() == other._rank():
                assert not one.beats(other)
            else:
                assert one.beats(other) != other.beats(one)
    ordered = sorted(many, key=Record._rank)
    assert not any(one.beats(other) for one, other in pairwise(ordered))


def test_a_later_version_wins_and_at_equal_versions_the_withdrawal() -> None:
    first, second = record(1, b"zzz"), record(2, b"aaa")
    gone = Record(KEY, ALICE.peer_id, b"", b"", 1, 1_000, True).signed(ALICE)
    assert second.beats(first)
    assert gone.beats(first)
    assert second.beats(gone)


def test_timely_means_within_the_longest_lease_and_the_clocks_tolerance() -> None:
    wall = 1_000_000.0

    def due(offset_s: float) -> Record:
        return replace(record(), expires_ms=int((wall + offset_s) * 1000))

    assert due(1).is_timely(wall)
    assert due(1).is_live(wall)
    assert due(-CLOCK_TOLERANCE_S + 1).is_timely(wall)
    assert not due(-CLOCK_TOLERANCE_S + 1).is_live(wall)
    assert not due(-CLOCK_TOLERANCE_S - 1).is_timely(wall)
    assert due(RECORD_TTL_S + CLOCK_TOLERANCE_S).is_timely(wall)
    assert not due(RECORD_TTL_S + CLOCK_TOLERANCE_S + 1).is_timely(wall)


def test_the_verifier_checks_each_record_once_and_forgets_the_oldest() -> None:
    checked: list[bytes] = []

    def counting(peer: PeerId, data: bytes, signature: bytes) -> bool:
        checked.append(signature)
        return verify(peer, data, signature)

    verifier = Verifier(counting, remember=2)
    first, second, third = (record(version) for version in (1, 2, 3))
    forged = replace(first, value=b"forged")
    assert verifier.genuine(first)
    assert verifier.genuine(first)
    assert verifier.knows(first)
    assert len(checked) == 1
    assert not verifier.genuine(forged)
    assert not verifier.genuine(forged)
    assert not verifier.knows(forged)
    assert verifier.genuine(second)
    assert verifier.genuine(third)
    assert not verifier.knows(first)
