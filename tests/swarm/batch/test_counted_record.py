"""The record of a conductor's counts: published while it conducts, read by the next one, and harmless when hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import trio
from trio.testing import MockClock

from peerd.core.errors import Unreachable
from peerd.core.ids import Key, PeerId
from peerd.core.limits import COUNTED_ROWS
from peerd.core.record import Record
from peerd.dht.dht import Dht
from peerd.messages.contributions import CountedPage, CountedRow, counted_key, decode_counted
from peerd.messages.encoding import encode
from peerd.rpc.rpc_types import AccessGuard
from peerd.swarm.batch.counted_record import CountedRecord, read_counted
from peerd.swarm.batch.counted_work import CountedWork, PeerWork


def peer(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


OWN, BEFORE, EARLIER, LIAR = map(peer, range(1, 5))


def record(by: PeerId, page: CountedPage | bytes, suffix: bytes = b"0", version: int = 1) -> Record:
    value = page if isinstance(page, bytes) else encode(page)
    return Record(counted_key("tiny"), by, suffix, value, version, 10**9)


def page(*rows: tuple[PeerId, int, int], since: int = 5, step: int = 9, unlisted: int = 0) -> CountedPage:
    return CountedPage(
        since, step, unlisted, [CountedRow(p.public_key, computed, brought) for p, computed, brought in rows]
    )


@dataclass
class Directory:
    """Has some records to read, and notes what is put, and when."""

    records: list[Record] = field(default_factory=list)
    puts: list[tuple[float, bytes, CountedPage]] = field(default_factory=list)
    fails: bool = False
    answer_s: float = 0.0

    async def get(self, key: Key, *, most_bytes: int) -> list[Record]:
        await trio.sleep(self.answer_s)
        if self.fails:
            raise Unreachable("nobody is there")
        return [one for one in self.records if one.key == key]

    async def put(self, key: Key, value: bytes, *, ttl_s: float, suffix: bytes, stays: bool) -> int:
        await trio.lowlevel.checkpoint()
        assert (key, ttl_s, stays) == (counted_key("tiny"), 300.0, True)
        if self.fails:
            raise Unreachable("nobody is there")
        self.puts.append((trio.current_time(), suffix, decode_counted(value)))
        return 1

    def pages(self) -> list[CountedPage]:
        return [page for _, _, page in self.puts]


class OneName:
    """A gate that lets in one token."""

    token = b"ours"

    def named(self, peer: PeerId, token: bytes, *roles: str) -> str | None:
        assert roles == ("stage",)
        return "Ann" if token == self.token else None


GATE = cast(AccessGuard, OneName())


def counts(directory: Directory, gate: AccessGuard | None = None) -> CountedRecord:
    return CountedRecord("tiny", cast(Dht, directory), gate)


def worked(*peers: PeerId, step: int = 1) -> CountedWork:
    work = CountedWork(samples=2)
    work.batch_closed({f"{one.text}/0": len(peers) - place for place, one in enumerate(peers)}, {})
    work.step_made(step)
    return work


def until(at: float) -> Callable[[], bool]:
    return lambda: trio.current_time() < at


# --- publishing -------------------------------------------------------------------------------------------------------


async def test_counts_are_published_while_the_tenure_lasts(autojump_clock: MockClock) -> None:
    directory, work = Directory(), CountedWork(samples=1)
    now = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counts(directory).keep, work, [], until(now + 50))
        await trio.sleep(10)
        work.batch_closed({f"{OWN}/0": 3}, {LIAR.text: [1]})
        work.step_made(4)
    assert [(at - now, suffix) for at, suffix, _ in directory.puts] == [(20, b"0"), (40, b"0")]
    assert directory.pages()[0] == CountedPage(
        3, 4, 0, [CountedRow(OWN.public_key, 3, 0), CountedRow(LIAR.public_key, 0, 1)]
    )


async def test_many_peers_take_several_pages_and_the_least_have_none(autojump_clock: MockClock) -> None:
    directory, peers = Directory(), [peer(number) for number in range(1, 502)]
    work = worked(*peers)
    await counts(directory, GATE).publish(work)
    assert [suffix for _, suffix, _ in directory.puts] == [b"0", b"1", b"2", b"3", b"4"]
    listed = [row for one in directory.pages() for row in one.rows]
    assert [row.public_key for row in listed] == [one.public_key for one in peers[: 5 * COUNTED_ROWS]]
    assert {(one.unlisted, one.token) for one in directory.pages()} == {(501 - 5 * COUNTED_ROWS, b"ours")}
    table = read_counted(OWN, [record(OWN, one, str(i).encode(), i) for i, one in enumerate(directory.pages())], GATE)
    assert table is not None
    assert table.of == {one: work.of[one.text] for one in peers[: 5 * COUNTED_ROWS]}


async def test_a_directory_that_fails_costs_one_publication(autojump_clock: MockClock) -> None:
    directory = Directory(fails=True)
    now = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counts(directory).keep, worked(OWN), [BEFORE], until(now + 30))
        await trio.sleep(10)
        directory.fails = False
    assert len(directory.puts) == 1


# --- going on from the conductor before -------------------------------------------------------------------------------


async def kept(
    directory: Directory, work: CountedWork, *before: PeerId, gate: AccessGuard | None = None
) -> CountedWork:
    """The counts after the tenure's first publication."""
    now = trio.current_time()
    await counts(directory, gate).keep(work, before, until(now + 15))
    return work


async def test_a_new_conductor_goes_on_from_the_counts_of_the_one_before(autojump_clock: MockClock) -> None:
    lie = record(LIAR, page((LIAR, 10**15, 10**15), since=0))
    directory = Directory([lie, record(BEFORE, page((OWN, 10, 3), (EARLIER, 4, 0)))], answer_s=8.0)
    work = await kept(directory, worked(OWN, step=12), BEFORE, OWN)  # a step was made meanwhile
    assert work.of == {OWN.text: PeerWork(12, 3), EARLIER.text: PeerWork(4, 0)}
    assert (work.since_step, work.step) == (5, 12)
    assert directory.pages()[0].since_step == 5


async def test_where_the_last_conductor_published_nothing_the_one_before_it_counts(autojump_clock: MockClock) -> None:
    directory = Directory([record(EARLIER, page((OWN, 7, 0))), record(OWN, page((OWN, 1, 0)))])
    work = await kept(directory, CountedWork(samples=1), BEFORE, EARLIER, OWN)
    assert work.of == {OWN.text: PeerWork(7, 0)}


async def test_without_a_record_counting_begins_anew(autojump_clock: MockClock) -> None:
    directory = Directory([record(LIAR, page((LIAR, 10**15, 0), since=0)), record(BEFORE, b"\xc1 nonsense")])
    work = await kept(directory, worked(OWN, step=12), BEFORE, OWN)
    assert work.of == {OWN.text: PeerWork(2, 0)}
    assert work.since_step == 11


async def test_in_a_run_with_tokens_only_a_members_counts_are_gone_on_from(autojump_clock: MockClock) -> None:
    told = page((OWN, 7, 0))
    directory = Directory([record(BEFORE, told)])
    assert (await kept(directory, CountedWork(samples=1), BEFORE, gate=GATE)).of == {}
    directory = Directory([record(BEFORE, msgspec.structs.replace(told, token=b"ours"))])
    assert (await kept(directory, CountedWork(samples=1), BEFORE, gate=GATE)).of == {OWN.text: PeerWork(7, 0)}


# --- reading what strangers publish -----------------------------------------------------------------------------------


def test_pages_that_cannot_be_read_cost_their_rows_alone() -> None:
    unreadable = list[Record]()
    told: Any = page((OWN, 1, 2))
    many = msgspec.structs.replace(told, rows=told.rows * 200)
    bad = [record(BEFORE, b"\xc1", b"1"), record(BEFORE, many, b"2"), record(BEFORE, b"", b"3")]
    table = read_counted(BEFORE, [record(BEFORE, told), *bad], None, unreadable)
    assert table is not None
    assert table.of == {OWN: PeerWork(1, 2)}
    assert unreadable == bad
    assert read_counted(BEFORE, bad, None) is None


def test_pages_of_others_and_under_other_suffixes_are_not_looked_at() -> None:
    unreadable = list[Record]()
    others = [record(LIAR, b"\xc1"), record(LIAR, page((LIAR, 9, 9))), record(BEFORE, page((LIAR, 9, 9)), b"77")]
    assert read_counted(BEFORE, others, None, unreadable) is None
    assert unreadable == []


def test_a_peer_that_is_named_twice_counts_once() -> None:
    older, newer = page((OWN, 1, 1), (EARLIER, 4, 4)), page((OWN, 2, 0), (OWN, 3, 3))
    for records in ([record(BEFORE, older, b"1", 1), record(BEFORE, newer, b"0", 2)],):
        for order in (records, records[::-1]):
            table = read_counted(BEFORE, order, None)
            assert table is not None
            assert table.of == {OWN: PeerWork(2, 0), EARLIER: PeerWork(4, 4)}


def test_pages_from_before_it_counted_anew_are_left_out() -> None:
    stale, fresh = page((EARLIER, 4, 4), since=5), page((OWN, 2, 0), since=70, step=71)
    table = read_counted(BEFORE, [record(BEFORE, stale, b"1", 1), record(BEFORE, fresh, b"0", 2500)], None)
    assert table is not None
    assert (table.since_step, table.step, table.told_at, table.of) == (70, 71, 2.5, {OWN: PeerWork(2, 0)})
