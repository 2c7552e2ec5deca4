"""Record of the conductor's counts: published while a peer conducts, read by status commands and the next conductor.

The counts of a tenure (`swarm/batch/counted_work`) are published every PERIOD_S, peers with the most samples first,
on as many pages as a publisher may have under one key. The record outlives its tenure and its publisher by at most
_TTL_S, and the next conductor continues from its counts. A peer that conducts a second time, while the record of its
own predecessor still lives, continues from that older one. The reader chooses whose record counts; its content is the
conductor's own claim. Hostile input: pages of any content under any suffix. An unreadable page costs only its own rows;
pages of other publishers are not decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import COUNTED_ROWS, DIRECTORY_READ_BYTES
from peerd.core.record import Record
from peerd.dht.dht import Dht
from peerd.messages.contributions import PAGE_SUFFIXES, CountedPage, CountedRow, counted_key, decode_counted
from peerd.messages.encoding import encode
from peerd.rpc.rpc_types import AccessGuard
from peerd.swarm.batch.counted_work import CountedWork, PeerWork

_log = logging.getLogger("peerd.contributions")

PERIOD_S: Final = 20.0
_TTL_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class CountedTable:
    """One conductor's counts, as read from its record."""

    by: PeerId
    since_step: int
    step: int
    unlisted: int  # number of peers with counts too small for the record
    told_at: float  # corrected Unix time of the newest page
    of: dict[PeerId, PeerWork]


def read_counted(
    by: PeerId, records: Iterable[Record], gate: AccessGuard | None, unreadable: list[Record] | None = None
) -> CountedTable | None:
    """The counts that conductor `by` published under `counted_key`, or None if there are none.

    Pages older than the start of its current count are ignored. For a peer on several pages, the newest page counts.
    Records that are not valid pages are added to `unreadable`.
    """
    pages = list[tuple[int, bytes, CountedPage]]()
    for record in records:
        if record.publisher != by or record.suffix not in PAGE_SUFFIXES:
            continue
        try:
            page = decode_counted(record.value)
        except ProtocolViolation:
            if unreadable is not None:
                unreadable.append(record)
            continue
        if gate is None or gate.named(by, page.token, "stage") is not None:
            pages.append((record.version, record.suffix, page))
    if not pages:
        return None
    pages.sort(key=lambda page: page[:2], reverse=True)
    version, _, newest = pages[0]
    of: dict[PeerId, PeerWork] = {}
    for _, _, page in pages:
        if page.since_step == newest.since_step:
            for row in page.rows:
                of.setdefault(PeerId.from_public_key(row.public_key), PeerWork(row.computed, row.brought))
    return CountedTable(by, newest.since_step, newest.step, newest.unlisted, version / 1000, of)


class CountedRecord:
    """Publishes the counts of this peer's tenures in one run."""

    def __init__(self, run: str, dht: Dht, gate: AccessGuard | None) -> None:
        self._key, self._dht, self._gate = counted_key(run), dht, gate

    async def keep(self, work: CountedWork, before: Iterable[PeerId], lasts: Callable[[], bool]) -> None:
        """Continue from the previous conductor's counts, and publish ours while the tenure `lasts`.

        `before`: conductors that may have a record, the latest first; the first one that has a record is used.
        """
        await self._go_on(work, before)
        while lasts():
            await self.publish(work)
            await trio.sleep(PERIOD_S)

    async def publish(self, work: CountedWork) -> None:
        """Publish the current counts. A directory that fails is no error."""
        try:
            for suffix, page in zip(PAGE_SUFFIXES, self._pages(work), strict=False):
                await self._dht.put(self._key, encode(page), ttl_s=_TTL_S, suffix=suffix, stays=True)
        except RemoteError as error:
            _log.info("the counts of contributions could not be published: %s", error)

    def _pages(self, work: CountedWork) -> list[CountedPage]:
        """The pages to publish. Empty before the first step."""
        if work.since_step is None:
            return []
        token = self._gate.token if self._gate is not None else b""
        largest = work.largest(len(PAGE_SUFFIXES) * COUNTED_ROWS)
        rows = [CountedRow(PeerId.parse(peer).public_key, *counted) for peer, counted in largest]
        unlisted = len(work.of) - len(rows)
        return [
            CountedPage(work.since_step, work.step, unlisted, rows[at : at + COUNTED_ROWS], token)
            for at in range(0, max(1, len(rows)), COUNTED_ROWS)
        ]

    async def _go_on(self, work: CountedWork, before: Iterable[PeerId]) -> None:
        """Add the counts of the previous conductor, if its record can be read."""
        try:
            records = await self._dht.get(self._key, most_bytes=DIRECTORY_READ_BYTES)
        except RemoteError as error:
            _log.info("the counts of the previous conductor could not be read: %s", error)
            return
        tables = (read_counted(by, records, self._gate) for by in before)
        table = next((table for table in tables if table is not None), None)
        if table is None:
            return
        work.go_on_from(table.since_step, table.step, ((peer.text, counted) for peer, counted in table.of.items()))
        _log.info(
            "continuing the counts of each peer's work by the previous conductor %s, which begin at step %d",
            table.by.short,
            table.since_step,
        )
