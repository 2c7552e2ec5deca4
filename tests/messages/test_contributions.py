"""Pages of a conductor's counts: strictly decoded, and all of them fit into a publisher's share of a key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair, verify
from peerd.core.limits import COUNTED_ROWS, TOKEN_BYTES
from peerd.core.record import Record, Verifier
from peerd.dht.node.store import Store, Verdict
from peerd.messages.contributions import PAGE_SUFFIXES, CountedPage, CountedRow, counted_key, decode_counted
from peerd.messages.encoding import encode

MOST = (1 << 62) - 1
ROW = CountedRow(b"k" * 32, MOST, MOST)
FULL = CountedPage(MOST, MOST, MOST, [ROW] * COUNTED_ROWS, b"t" * TOKEN_BYTES)


def test_a_page_is_read_as_it_was_written() -> None:
    assert decode_counted(encode(FULL)) == FULL
    assert decode_counted(encode(CountedPage(1, 2, 3, []))) == CountedPage(1, 2, 3, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [ROW] * (COUNTED_ROWS + 1)},
        {"rows": [ROW] * 10_000},
        {"rows": [CountedRow(b"k" * 31, 1, 1)]},
        {"rows": [CountedRow(b"k" * 33, 1, 1)]},
        {"rows": [CountedRow(b"k" * 32, -1, 1)]},
        {"rows": [CountedRow(b"k" * 32, 1, MOST + 1)]},
        {"since_step": -1},
        {"step": MOST + 1},
        {"unlisted": -1},
        {"token": b"t" * (TOKEN_BYTES + 1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_page_beyond_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        decode_counted(encode(msgspec.structs.replace(FULL, **changes), 1 << 24))


def test_all_pages_of_a_conductor_fit_into_its_share_of_the_key() -> None:
    keys = Keypair.from_seed(b"c" * 32)
    store = Store(PeerId.from_public_key(b"o" * 32), Verifier(verify))
    value = encode(FULL)
    for version in (1, 2):  # when they are renewed as well
        for suffix in PAGE_SUFFIXES:
            record = Record(counted_key("tiny"), keys.peer_id, suffix, value, version, 1_300_000).signed(keys)
            assert store.offer(1000.0, record)[0] is Verdict.STORED
    assert len(store) == len(PAGE_SUFFIXES)
