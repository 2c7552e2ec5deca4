"""One DHT node, fed by hand: what it asks, what it answers, and what it makes of lies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TypeVar

import pytest

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_CONTACTS_PER_REPLY, DHT_KEYS_PER_CALL, DHT_LARGE_BYTES, DHT_TAGS_PER_CALL
from peerd.core.record import Record, Verifier
from peerd.dht.node import messages as q
from peerd.dht.node.kademlia import Kademlia
from peerd.dht.node.query_pool import LargeRecords
from peerd.dht.node.routing_table import Contact, place
from peerd.dht.node.store import Verdict
from tests.worlds.simulation.heapsim import EPOCH_S, StandInSigner, stand_in_verify

O = TypeVar("O")  # noqa: E741
KEY = Key.of("key")
ALICE = StandInSigner(b"a" * 32)
HELLO = q.Hello((b"\x04\x08\x08\x08\x08\x06\x0f\xa1",))


def signer(number: int) -> StandInSigner:
    return StandInSigner(number.to_bytes(32, "big"))


def contact(number: int) -> Contact:
    return Contact(signer(number).peer_id, (bytes([4, 9, number % 250, 1, 1, 6, 15, 161]),))


def node(neighbours: int = 0, *, client: bool = False) -> Kademlia:
    """A node that knows contact(1), contact(2), ..."""
    kad = Kademlia(signer(0), Verifier(stand_in_verify), random.Random(1))
    kad.node.clock_ahead_s = EPOCH_S
    kad.addrs = () if client else contact(0).addrs
    for number in range(1, neighbours + 1):
        kad.node.neighbours.welcome(0.0, contact(number))
    kad.settled(0.0)
    return kad


def record(
    by: StandInSigner = ALICE, key: Key = KEY, version: int = 1, suffix: bytes = b"", **changes: object
) -> Record:
    made = Record(key, by.peer_id, suffix, b"value", version, round((EPOCH_S + 600) * 1000))
    return replace(made, **changes).signed(by)  # type: ignore[arg-type]


def of_kind(outputs: list[q.Output], kind: type[O]) -> list[O]:
    return [output for output in outputs if isinstance(output, kind)]


def serve(kad: Kademlia, request: q.Request, asker: int = 99, now: float = 1.0) -> q.Reply:
    (response,) = of_kind(kad.handle(now, q.Asked(7, contact(asker).peer, request)), q.Respond)
    assert response.token == 7
    return response.reply


def test_a_get_asks_the_nearest_and_ends_with_verified_records() -> None:
    kad = node(neighbours=10, client=True)
    asks = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    nearest = sorted(range(1, 11), key=lambda n: contact(n).place ^ place(KEY))
    assert [ask.contact.peer for ask in asks] == [contact(n).peer for n in nearest[:4]]
    done: list[q.GetDone] = []
    for ask in asks:
        done += of_kind(kad.handle(0.1, q.Answered(ask.id, q.Found(((record(),),), ()))), q.GetDone)
    assert [d.records for d in done] == [{KEY: [record()]}]
    assert done[0].why == "the nearest 3 peers have answered"


def test_keys_that_go_to_the_same_peer_go_in_one_message() -> None:
    kad = node(neighbours=3, client=True)
    keys = tuple(Key.of(str(n)) for n in range(DHT_KEYS_PER_CALL + 1))
    asks = of_kind(kad.handle(0.0, q.Get(1, keys)), q.Ask)
    assert len(asks) == 6  # two messages for each of three peers
    assert all(isinstance(ask.request, q.Find) and len(ask.request.keys) <= DHT_KEYS_PER_CALL for ask in asks)


def test_a_key_that_two_look_ups_want_goes_once_into_a_message_and_both_get_its_records() -> None:
    """Two look-ups of one key: a message that had it twice would be answered once, and later keys get other records."""
    kad = node(neighbours=5, client=True)
    (lost, *others) = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    others += of_kind(kad.handle(0.0, q.Get(2, (KEY,))), q.Ask)[1:]
    (ask,) = of_kind(kad.handle(0.1, q.Lost(lost.contact.peer)), q.Ask)  # both turn to the next one
    assert isinstance(ask.request, q.Find)
    assert ask.request.keys == (KEY,)
    outputs = []
    for one in (ask, *others):
        outputs += kad.handle(0.2, q.Answered(one.id, q.Found(((record(),),), ())))
    assert of_kind(outputs, q.BlamePeer) == []
    assert [(done.op, done.records) for done in of_kind(outputs, q.GetDone)] == [(n, {KEY: [record()]}) for n in (1, 2)]


def test_keys_that_had_no_room_in_the_answer_are_asked_again() -> None:
    kad = node(neighbours=1, client=True)
    keys = (Key.of("1"), Key.of("2"), Key.of("3"))
    (ask,) = of_kind(kad.handle(0.0, q.Get(1, keys)), q.Ask)
    (again,) = of_kind(kad.handle(0.1, q.Answered(ask.id, q.Found(((),), ()))), q.Ask)
    assert isinstance(again.request, q.Find)
    assert again.request.keys == keys[1:]
    (done,) = of_kind(kad.handle(0.2, q.Answered(again.id, q.Found(((), ()), ()))), q.GetDone)
    assert done.records == {key: [] for key in keys}


def test_a_large_record_that_the_asker_has_is_named_and_not_sent_again() -> None:
    """Anybody may fill a key with large records; each reading of it would cost every reader all of them again."""
    large = replace(record(), value=b"v" * 16_000, signature=b"").signed(ALICE)
    small, later = record(signer(50)), replace(record(version=2), value=b"w" * 16_000, signature=b"").signed(ALICE)
    holder, reader = node(), node(neighbours=1, client=True)
    for held in (large, small):
        holder.node.store.offer(EPOCH_S, held)

    def read() -> tuple[q.Found, list[Record]]:
        (ask,) = of_kind(reader.handle(1.0, q.Get(1, (KEY,), 1 << 16)), q.Ask)
        found = serve(holder, ask.request)
        assert isinstance(found, q.Found)
        (done,) = of_kind(reader.handle(1.0, q.Answered(ask.id, found)), q.GetDone)
        return found, done.records[KEY]

    assert set(read()[0].records[0]) == {large, small}
    found, records = read()
    assert (found.records, found.named) == (((small,),), ((large.tag,),))
    assert set(records) == {large, small}
    holder.node.store.offer(EPOCH_S, later)
    found, records = read()
    assert (set(found.records[0]), found.named) == ({small, later}, ())
    assert set(records) == {small, later}


def test_of_too_many_records_that_a_reader_has_the_largest_are_named() -> None:
    """Else records of half a kibibyte, which strangers put under the first key, would leave later keys without."""
    first, second = KEY, Key.of("other")
    many = [replace(record(signer(n)), value=b"v" * 600, signature=b"").signed(signer(n)) for n in range(300)]
    large = replace(record(key=second), value=b"v" * 16_000, signature=b"").signed(ALICE)
    reader = node(neighbours=1, client=True)
    reader._work._large.keep(first, many)
    reader._work._large.keep(second, [large])
    (ask,) = of_kind(reader.handle(1.0, q.Get(1, (first, second), 1 << 16)), q.Ask)
    assert isinstance(ask.request, q.Find)
    assert len(ask.request.has) == DHT_TAGS_PER_CALL
    assert large.tag in ask.request.has


def test_a_holder_whose_records_all_readers_have_looks_for_no_copies() -> None:
    large = replace(record(), value=b"v" * 16_000, signature=b"").signed(ALICE)
    holder = node(neighbours=5)
    holder.node.store.offer(EPOCH_S, large)
    for asker in range(60, 70):
        serve(holder, q.Find((KEY,), True, None, 1 << 16, 3600, (large.tag,)), asker)
    assert holder.node.counts.copied == 0
    for asker in range(60, 70):
        serve(holder, q.Find((Key.of("elsewhere"),), True, None, 1 << 16, 3600), asker)
    assert holder.node.counts.copied == 1


def test_a_tag_is_of_one_record_whatever_its_publisher_signs() -> None:
    """A publisher can choose most of a signature. If two records shared a tag, honest holders would be blamed."""
    one, other = (replace(record(), value=bytes([n]) * 600, signature=b"s" * 64) for n in range(2))
    assert one.signature == other.signature
    assert one.tag != other.tag


def test_a_tag_that_stands_under_another_key_is_no_record_of_this_one_and_no_lie() -> None:
    keys = (KEY, Key.of("other"))
    large = replace(record(), value=b"v" * 600, signature=b"").signed(ALICE)
    reader = node(neighbours=1, client=True)
    (ask,) = of_kind(reader.handle(1.0, q.Get(1, (KEY,), 1 << 16)), q.Ask)
    reader.handle(1.0, q.Answered(ask.id, q.Found(((large,),), ())))
    (ask,) = of_kind(reader.handle(1.0, q.Get(2, keys, 1 << 16)), q.Ask)
    outputs = reader.handle(1.0, q.Answered(ask.id, q.Found(((), ()), (), None, ((large.tag,), (large.tag,)))))
    assert of_kind(outputs, q.BlamePeer) == []
    assert of_kind(outputs, q.GetDone)[0].records == {keys[0]: [large], keys[1]: []}


def test_what_nobody_holds_any_more_is_not_read_from_memory() -> None:
    large = replace(record(), value=b"v" * 16_000, signature=b"").signed(ALICE)
    reader = node(neighbours=1, client=True)
    for found, expected in ((q.Found(((large,),), ()), [large]), (q.Found(((),), ()), [])):
        (ask,) = of_kind(reader.handle(1.0, q.Get(1, (KEY,), 1 << 16)), q.Ask)
        (done,) = of_kind(reader.handle(1.0, q.Answered(ask.id, found)), q.GetDone)
        assert done.records[KEY] == expected


def test_of_large_records_so_much_is_remembered() -> None:
    large = LargeRecords()
    made = [replace(record(key=Key.of(str(n))), value=b"v" * 16_000, signature=b"").signed(ALICE) for n in range(100)]
    for one in made:
        large.keep(one.key, [one])
    assert DHT_LARGE_BYTES - 17_000 < large.bytes_kept <= DHT_LARGE_BYTES
    assert large.of(made[0].key, EPOCH_S) == []
    assert large.of(made[-1].key, EPOCH_S) == [made[-1]]
    assert large.of(made[-1].key, EPOCH_S + 601) == [], "it has expired"


@pytest.mark.parametrize(
    "lie",
    [
        q.Found(((replace(record(), value=b"forged"),),), ()),
        q.Found(((record(key=Key.of("another key")),),), ()),
        q.Found(((),), (), None, ((b"16 bytes, untold",),)),
        q.Found((), ()),
        q.Found(((), ()), ()),
        q.PongReply(None),
        q.Stored(((Verdict.STORED, 1),)),
    ],
)
def test_whoever_lies_is_named_dropped_and_not_asked_again_for_a_while(lie: q.Reply) -> None:
    kad = node(neighbours=2, client=True)
    asks = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    outputs = kad.handle(0.1, q.Answered(asks[0].id, lie))
    assert [blame.peer for blame in of_kind(outputs, q.BlamePeer)] == [asks[0].contact.peer]
    assert asks[0].contact.peer not in kad.node.neighbours.table
    outputs = kad.handle(0.2, q.Answered(asks[1].id, q.Found(((record(),),), ())))
    assert of_kind(outputs, q.GetDone)[0].records == {KEY: [record()]}
    again = of_kind(kad.handle(1.0, q.Get(2, (KEY,))), q.Ask)
    assert [ask.contact.peer for ask in again] == [asks[1].contact.peer]
    kad.handle(2.0, q.Asked(1, asks[0].contact.peer, q.Ping(HELLO)))
    assert asks[0].contact.peer not in kad.node.neighbours.table


def test_a_connection_that_closes_drops_its_peer_from_consideration_at_once() -> None:
    kad = node(neighbours=1, client=True)
    (ask,) = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    (done,) = of_kind(kad.handle(0.1, q.Lost(ask.contact.peer)), q.GetDone)
    assert done.why == "none of the known peers answered"
    assert kad.handle(0.2, q.Answered(ask.id, q.Found(((record(),),), ()))) == []
    assert of_kind(kad.handle(0.3, q.Get(2, (KEY,))), q.Ask) == []
    pings = [ask for ask in of_kind(kad.wake(6.0), q.Ask) if isinstance(ask.request, q.Ping)]
    assert [ping.contact.peer for ping in pings] == [ask.contact.peer]  # it may be back
    kad.handle(6.1, q.Answered(pings[0].id, q.PongReply(HELLO)))
    assert len(of_kind(kad.handle(6.2, q.Get(3, (KEY,))), q.Ask)) == 1


def test_a_connection_that_closes_ends_all_that_one_task_had_asked_there() -> None:
    kad = node(neighbours=1, client=True)
    keys = tuple(Key.of(f"key {number}") for number in range(DHT_KEYS_PER_CALL + 1))
    asks = of_kind(kad.handle(0.0, q.Get(1, keys)), q.Ask)
    assert [len(ask.request.keys) for ask in asks if isinstance(ask.request, q.Find)] == [DHT_KEYS_PER_CALL, 1]
    (done,) = of_kind(kad.handle(0.1, q.Lost(asks[0].contact.peer)), q.GetDone)
    assert done.records == {key: [] for key in keys}


def test_a_peer_that_stays_silent_loses_its_seat_but_is_remembered_when_nobody_is_left() -> None:
    kad = node(neighbours=1, client=True)
    peer, now = contact(1).peer, 0.0
    kad.handle(now, q.Lost(peer))
    pings = 0
    while now < 60.0:
        now = max(now + 0.01, kad.wake_at(now))
        for ask in of_kind(kad.wake(now), q.Ask):
            pings += isinstance(ask.request, q.Ping)
            kad.handle(now, q.AskFailed(ask.id))
    assert peer not in kad.node.neighbours.table
    assert 2 <= pings <= 6  # ever less often
    (ask,) = of_kind(kad.handle(1000.0, q.Met(contact(1))), q.Ask)
    kad.handle(1000.1, q.Answered(ask.id, q.PongReply(HELLO)))
    assert peer in kad.node.neighbours.table


def test_a_put_places_the_record_on_the_nearest_peers_and_counts_them() -> None:
    kad = node(neighbours=12, client=True)
    outputs = kad.handle(0.0, q.Put(1, KEY, b"", b"value", 60.0))
    holders: list[PeerId] = []
    done: list[q.PutDone] = []
    while not done:
        asks, outputs = of_kind(outputs, q.Ask), []
        assert asks
        for ask in asks:
            if isinstance(ask.request, q.StoreRecords):
                holders.append(ask.contact.peer)
                reply: q.Reply = q.Stored(((Verdict.STORED, ask.request.records[0].version),))
            else:
                reply = q.Found(((),), ())
            outputs += kad.handle(0.1, q.Answered(ask.id, reply))
        done = of_kind(outputs, q.PutDone)
    nearest = sorted(range(1, 13), key=lambda n: contact(n).place ^ place(KEY))[:8]
    assert holders == [contact(n).peer for n in nearest]
    assert done[0].peers == 8
    again = of_kind(kad.handle(1.0, q.Put(2, KEY, b"", b"other", 60.0)), q.Ask)
    assert [type(ask.request) for ask in again] == [q.StoreRecords] * 8  # the place is known: no search


def test_what_was_put_is_got_at_once_whatever_others_say() -> None:
    kad = node(neighbours=1, client=True)
    kad.handle(0.0, q.Put(1, KEY, b"", b"first", 60.0))
    kad.handle(0.0, q.Put(2, KEY, b"", b"second", 60.0))
    kad.handle(0.1, q.Get(3, (KEY,)))
    (done,) = of_kind(kad.handle(0.2, q.Stop(3)), q.GetDone)
    assert [r.value for r in done.records[KEY]] == [b"second"]
    assert done.why == "the deadline passed"
    kad.handle(0.3, q.Withdraw(4, KEY))
    kad.handle(0.3, q.Get(5, (KEY,)))
    (done,) = of_kind(kad.handle(0.4, q.Stop(5)), q.GetDone)
    assert done.records[KEY] == []


def test_a_later_version_from_before_a_restart_is_outbid() -> None:
    kad = node(neighbours=1, client=True)
    kad.node.neighbours.found_near(0.0, KEY, [contact(1)])
    (ask,) = of_kind(kad.handle(0.0, q.Put(1, KEY, b"", b"value", 60.0)), q.Ask)
    assert isinstance(ask.request, q.StoreRecords)
    held = ask.request.records[0].version + 1_000_000
    outputs = kad.handle(0.1, q.Answered(ask.id, q.Stored(((Verdict.STALE, held),))))
    (again,) = of_kind(outputs, q.Ask)
    assert isinstance(again.request, q.StoreRecords)
    assert again.request.records[0].version > held
    outputs = kad.handle(0.2, q.Answered(again.id, q.Stored(((Verdict.STORED, 0),))))
    assert of_kind(outputs, q.PutDone)[0].peers == 1


def test_the_nearest_peer_that_lacked_a_record_gets_a_copy_once() -> None:
    kad = node(neighbours=3, client=True)
    asks = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    outputs: list[q.Output] = []
    for index, ask in enumerate(asks):
        held = () if index == 0 else (record(version=index),)
        outputs += kad.handle(0.1, q.Answered(ask.id, q.Found((held,), ())))
    (gift,) = of_kind(outputs, q.Ask)
    assert gift.contact.peer == asks[0].contact.peer
    assert gift.request == q.StoreRecords((record(version=2),), None)
    asks = of_kind(kad.handle(1.0, q.Get(2, (KEY,))), q.Ask)
    for ask in asks:
        outputs = kad.handle(1.1, q.Answered(ask.id, q.Found(((),), ())))
        assert of_kind(outputs, q.Ask) == []


def test_a_newcomer_near_our_keys_is_given_what_it_should_hold() -> None:
    kad = node()
    kad.node.store.offer(EPOCH_S, record())
    outputs = kad.handle(1.0, q.Asked(1, contact(5).peer, q.Ping(HELLO)))
    assert of_kind(outputs, q.Respond) == [q.Respond(1, q.PongReply(q.Hello(kad.addrs)))]
    assert kad.wake_at(1.0) == 1.0
    (gift,) = [ask for ask in of_kind(kad.wake(1.0), q.Ask) if isinstance(ask.request, q.StoreRecords)]
    assert gift.contact.peer == contact(5).peer
    assert isinstance(gift.request, q.StoreRecords)
    assert gift.request.records == (record(),)


def test_a_client_enters_nobodys_table_and_keeps_nothing_for_others() -> None:
    kad = node()
    serve(kad, q.Ping(q.Hello(())))
    assert len(kad.node.neighbours.table) == 0
    client = node(neighbours=1, client=True)
    (ask,) = of_kind(client.handle(0.0, q.Met(contact(2))), q.Ask)
    assert ask.request == q.Ping(q.Hello(()))


def test_hearsay_does_not_enter_the_table() -> None:
    kad = node(neighbours=1, client=True)
    (ask,) = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    outputs = kad.handle(0.1, q.Answered(ask.id, q.Found(((),), tuple(contact(n) for n in range(2, 60)))))
    assert len(of_kind(outputs, q.Ask)) > 0
    assert len(kad.node.neighbours.table) == 1


def test_an_answer_names_bounded_contacts_and_never_the_asker() -> None:
    kad = node(neighbours=60)
    reply = serve(kad, q.Find(tuple(Key.of(str(n)) for n in range(DHT_KEYS_PER_CALL)), False), asker=7)
    assert isinstance(reply, q.Found)
    assert len(reply.contacts) <= DHT_CONTACTS_PER_REPLY
    assert contact(7).peer not in {c.peer for c in reply.contacts}
    reply = serve(kad, q.Find((KEY,), False), asker=7)
    assert isinstance(reply, q.Found)
    assert len(reply.contacts) == 20


def test_a_flood_of_large_keys_is_answered_in_bounded_pieces() -> None:
    kad = node()
    keys = [Key.of(str(n)) for n in range(8)]
    for key in keys:
        for number in range(12):
            big = replace(record(signer(100 + number), key), value=b"v" * 16_000, signature=b"")
            kad.node.store.offer(EPOCH_S, big.signed(signer(100 + number)))
    reply = serve(kad, q.Find(tuple(keys), True))
    assert isinstance(reply, q.Found)
    assert len(reply.records) == 1
    assert len(reply.records[0]) == 12


def test_after_a_forged_record_nothing_more_of_that_sender_is_looked_at() -> None:
    kad = node()
    forged = replace(record(version=2), value=b"forged")
    reply = serve(kad, q.StoreRecords((record(suffix=b"1"), forged, record(suffix=b"2"))))
    assert isinstance(reply, q.Stored)
    assert [verdict for verdict, _ in reply.verdicts] == [Verdict.STORED, Verdict.FORGED, Verdict.FORGED]
    reply = serve(kad, q.StoreRecords((record(suffix=b"3"),)))
    assert isinstance(reply, q.Stored)
    assert reply.verdicts == ((Verdict.FORGED, 0),)
    assert len(kad.node.store) == 1


def test_records_that_belong_to_nearer_peers_are_refused() -> None:
    kad = node(neighbours=40)
    far = max((Key.of(str(n)) for n in range(50)), key=lambda key: place(key) ^ contact(0).place)
    reply = serve(kad, q.StoreRecords((record(key=far),)))
    assert isinstance(reply, q.Stored)
    assert reply.verdicts == ((Verdict.FAR, 0),)


def test_records_that_claim_too_long_a_lease_are_not_believed_by_readers() -> None:
    kad = node(neighbours=1, client=True)
    (ask,) = of_kind(kad.handle(0.0, q.Get(1, (KEY,))), q.Ask)
    eternal = record(expires_ms=round((EPOCH_S + 1e6) * 1000))
    expired = record(suffix=b"x", expires_ms=round((EPOCH_S - 1) * 1000))
    outputs = kad.handle(0.1, q.Answered(ask.id, q.Found(((eternal, expired),), ())))
    assert of_kind(outputs, q.GetDone)[0].records == {KEY: []}
    assert of_kind(outputs, q.BlamePeer) == []  # clocks may differ


def test_own_records_are_offered_again_before_they_expire() -> None:
    kad = node(neighbours=1, client=True)
    now, last, versions = 0.0, 0.0, set()
    todo = kad.handle(now, q.Put(1, KEY, b"", b"value", 3 * 3600.0))
    while now < 3 * 3600.0:
        while todo:
            ask = todo.pop(0)
            if not isinstance(ask, q.Ask):
                continue
            if isinstance(ask.request, q.StoreRecords):
                assert now - last <= 301.0  # the holders may have left
                last = now
                versions.add(ask.request.records[0].version)
                reply: q.Reply = q.Stored(((Verdict.STORED, 0),) * len(ask.request.records))
            else:
                reply = q.Found(((),), ()) if isinstance(ask.request, q.Find) else q.PongReply(None)
            todo += kad.handle(now, q.Answered(ask.id, reply))
        now = max(now, kad.wake_at(now))
        todo = kad.wake(now)
    assert len(versions) >= 3
