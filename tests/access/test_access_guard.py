"""Calls between peers of a run with tokens, over real hosts in a simulated network: who gets in, who does not, why."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import pytest
import trio

from peerd.access.access_guard import Present, Presented
from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Refused, RemoteError, Untrusted
from peerd.core.ids import PeerId
from peerd.core.limits import ACCESS_TOLD
from peerd.messages.encoding import Empty, encode
from peerd.messages.progress import (
    Joiner,
    KeptCheckpoints,
    StageProgress,
    encode_progress,
    joining_key,
    kept_key,
    stage_key,
)
from peerd.messages.swarm import Position
from peerd.messages.token import revoked_key
from peerd.role.run_services import RunServices
from peerd.screen.units import known
from peerd.status.swarm_view import swarm_view
from peerd.swarm.contributions import ContributionOf, ContributionTally
from peerd.swarm.directory import Directory
from peerd.swarm.stage_choice import Arrival
from tests.worlds.network.members import (
    NOW,
    ORGANIZER,
    STRANGER,
    Club,
    Member,
    Papers,
    in_club,
    revoked,
    run_file,
    token,
)


async def refused(caller: Member, callee: Member, method: str = "other/1/ask") -> str:
    """Why a call is turned away by its callee; the handler has not seen it."""
    before = list(callee.called)
    with pytest.raises(Refused) as caught:
        await caller.ask(callee, method)
    assert callee.called == before
    return str(caught.value)


@in_club
async def test_members_call_each_other_after_one_exchange_of_tokens(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2)
    for _ in range(3):
        await a.ask(b)
        await b.ask(a)
    assert b.called == [(a.id, "other/1/ask")] * 3
    assert (a.access.status()["calls_refused"], a.access.status()["members_met"]) == (0, 2)
    shown = a.rpc.status()["served"]["access/1/present"]["calls"]
    assert shown == 1


@pytest.mark.parametrize(
    ("papers", "why"),
    [
        (lambda peer: Papers(), "no token was shown"),
        (lambda peer: Papers(token(STRANGER.peer_id)), f"the token shown is that of peer {STRANGER.peer_id.short}"),
        (lambda peer: Papers(token(peer, expires=NOW - 7200)), "the token shown expired 2 h ago"),
        (lambda peer: Papers(token(peer, run="other")), "the token shown is for run other"),
        (lambda peer: Papers(token(peer, by=STRANGER)), "the token shown is not signed by this run's organizer"),
        (lambda peer: Papers(token(peer)[:-1] + b"\x11"), "the token shown is not signed by this run's organizer"),
        (lambda peer: Papers(token(peer)[:-1]), "the data shown is not a token"),
        (lambda peer: Papers(b"garbage"), "the data shown is not a token"),
        (lambda peer: Papers(token(peer, number=7)), "the token shown was revoked by the organizer"),
    ],
    ids=["none", "another's", "expired", "another run's", "forged", "changed", "cut off", "garbage", "revoked"],
)
@in_club
async def test_a_peer_without_a_token_of_its_own_is_refused_and_named_and_the_others_go_on(
    club: Club, papers: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="peerd.access"):
        a = await club.start(lambda peer: Papers(token(peer, number=1), [revoked(3, 7)]), run_file())
        b = await club.member(number=2)
        bad = await club.start(papers, run_file())
        for method in ("other/1/ask", "stage/6/forward", "swarm/6/member"):
            told = await refused(bad, a, method)
            assert told.startswith("no valid token for run tiny: ")
            assert why in told
            assert f"ask the organizer ({ORGANIZER.peer_id.short}) for one" in told
        with pytest.raises(Untrusted, match="no valid token for run tiny"):
            await b.ask(bad)
        assert bad.called == []
        assert b.dht.status()["peers"] == 1  # the directory has not taken it in, either
        await a.ask(b)
        await b.ask(a)
        named = [record.getMessage() for record in caplog.records if str(bad.id) in record.getMessage()]
        assert any(why in line for line in named)


@in_club
async def test_calls_of_a_peer_that_shows_no_token_are_refused_whatever_they_are(club: Club) -> None:
    a = await club.member()
    outsider = await club.start(lambda peer: Papers())
    for method in ("stage/6/forward", "average/2/part", "other/1/ask"):
        assert "none was shown that is valid now" in await refused(outsider, a, method)
    waits = outsider.dht.status()["waits_for"]  # shown to its user, who has a run file without `access`
    assert waits.startswith(f"bootstrap {a.node.full_addr}: it refuses us: no valid token for run tiny")
    frame = TensorFrame("uint8", (1 << 20,), bytes(1 << 20))
    with pytest.raises(Refused, match="no valid token"):
        await outsider.rpc.call(a.id, "other/1/ask", Empty(), Empty, frames=[frame], timeout_s=20)
    with pytest.raises(Refused, match="no valid token"):
        async with outsider.rpc.stream(a.id, "other/1/ask", Empty(), timeout_s=20) as parts:
            await parts.receive(Empty)
    assert a.dht.status()["peers"] == 0
    assert a.access.refused >= 5
    assert a.called == []


@in_club
async def test_a_token_is_good_for_its_roles_only(club: Club) -> None:
    stage, trainer = await club.member("stage", number=1), await club.member("trainer", number=2)
    await trainer.ask(stage, "stage/6/forward")
    await trainer.ask(stage, "swarm/6/trainer")
    told = await refused(trainer, stage, "stage/6/commit")
    assert "stage/6/commit is for stage; the token shown allows trainer" in told
    assert "is for aux, stage;" in await refused(trainer, stage, "swarm/6/member")
    assert "average/2/part is for aux, stage" in await refused(trainer, stage, "average/2/part")
    with pytest.raises(Untrusted, match="stage/6/commit is served by stage; its token allows trainer"):
        await stage.ask(trainer, "stage/6/commit")
    assert trainer.called == []
    await stage.ask(trainer)


@in_club
async def test_microbatches_are_handed_over_by_those_whose_tokens_say_so(club: Club) -> None:
    roles = ("stage", "stage", "trainer", "trainer", "backbone")
    first, second, trainer, other, backbone = [await club.member(role, number=n) for n, role in enumerate(roles, 1)]
    await trainer.ask(first, "handover/2/pass")
    await first.ask(second, "handover/2/pass")
    await first.ask(trainer, "handover/2/relay")
    assert "pass is for stage, trainer; the token shown allows backbone" in await refused(
        backbone, first, "handover/2/pass"
    )
    assert "relay is for stage; the token shown allows trainer" in await refused(trainer, other, "handover/2/relay")
    with pytest.raises(Untrusted, match="handover/2/pass is served by stage; its token allows trainer"):
        await first.ask(trainer, "handover/2/pass")
    with pytest.raises(Untrusted, match="handover/2/relay is served by trainer; its token allows stage"):
        await first.ask(second, "handover/2/relay")
    assert trainer.called == [(first.id, "handover/2/relay")]
    outsider = await club.start(lambda peer: Papers())
    assert "no valid token for run tiny" in await refused(outsider, first, "handover/2/pass")


@in_club
async def test_the_book_knows_who_has_shown_a_token_that_counts(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2)
    outsider = await club.start(lambda peer: Papers())
    await refused(outsider, a, "other/1/ask")
    await b.ask(a)
    assert [a.host.book.is_member(each.id.text) for each in (b, outsider, a)] == [True, False, True]


@in_club
async def test_without_a_pipeline_a_trainer_is_the_one_stage_too(club: Club) -> None:
    a, b = [await club.member("trainer", number=n, run=run_file(stages=1)) for n in (1, 2)]
    methods = ["stage/6/forward", "stage/6/commit", "swarm/6/member", "average/2/part"]
    for method in methods:
        await a.ask(b, method)
    assert b.called == [(a.id, method) for method in methods]


@in_club
async def test_a_token_that_expires_ends_the_calls_and_a_new_one_lets_them_go_on(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2, expires=NOW + 100)
    await b.ask(a)
    await trio.sleep(100)
    assert "the token shown expired 0 s ago" in await refused(b, a)
    assert b.access.waits_for().startswith("a new token: the token shown expired")
    b.papers.mine = token(b.id, number=3)
    await trio.sleep(60)  # the file is read again
    await b.ask(a)
    await a.ask(b)


@in_club
async def test_a_peer_whose_token_expired_waits_for_a_new_one_and_says_since_when(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2, expires=NOW + 100)
    await b.ask(a)
    await trio.sleep(150)
    services = RunServices(run_file(), b.host, b.rpc, b.dht, b.node.clock)
    with trio.move_on_after(30):
        await services.view.settled()
    waits = services.view.waits_for()
    print(waits)
    at = datetime.fromtimestamp(NOW + 100, UTC)
    assert waits.startswith("a new token: the token shown expired ")
    assert f"({at:%Y-%m-%d %H:%M} UTC); ask the organizer ({ORGANIZER.peer_id.short})" in waits
    with trio.move_on_after(5):
        await services.following.ask("swarm/6/member", Empty, Empty, 1.0)
    assert services.following.waits_for == b.access.waits_for(), "it is no lack of peers"
    b.papers.mine = token(b.id, number=3)
    with trio.fail_after(60):  # the file is read again
        await services.view.settled()


@in_club
async def test_a_revocation_spreads_through_the_directory_and_from_peer_to_peer(club: Club) -> None:
    a, b, bad = [await club.member(number=n) for n in (1, 2, 7)]
    await bad.ask(a)
    await bad.ask(b)
    await a.ask(b)
    a.papers.lists.append(revoked(1, 7))
    await a.access.look(a.dht)
    assert "was revoked by the organizer" in await refused(bad, a)
    await a.ask(b)  # brings the list along
    assert b.papers.kept == [revoked(1, 7)]
    assert "was revoked by the organizer" in await refused(bad, b)
    assert bad.access.waits_for() == "a new token: the token shown was revoked by the organizer"


@in_club
async def test_the_organizers_own_peer_needs_no_token_and_publishes_the_list(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2)
    organizer = await club.start(lambda peer: Papers(), run_file(), keypair=ORGANIZER)
    for method in ("stage/6/commit", "stage/6/forward"):
        await organizer.ask(a, method)
    await a.ask(organizer, "stage/6/forward")
    await b.ask(a)
    organizer.papers.lists.append(revoked(5, 2))
    await trio.sleep(60)  # what the README promises
    (record,) = await a.dht.get(revoked_key("tiny"))
    assert (record.publisher, record.value) == (ORGANIZER.peer_id, revoked(5, 2))
    assert "was revoked" in await refused(b, a)


@in_club
async def test_an_older_or_forged_list_changes_nothing(club: Club) -> None:
    a = await club.start(lambda peer: Papers(token(peer), [revoked(3, 7)]), run_file())
    bad = await club.start(
        lambda peer: Papers(token(peer, number=7), [revoked(2)]), run_file()
    )  # a genuine list of yesterday, replayed
    assert "was revoked" in await refused(bad, a)
    forged = Present("tiny", token(bad.id, number=7), revoked(9, by=STRANGER))
    for message in (forged, Present("tiny", token(bad.id, number=7), b"garbage")):
        answer = await bad.rpc.call(a.id, "access/1/present", message, Presented, timeout_s=20)
        assert "was revoked" in answer.body.why
    assert (a.access.roll.revoked_number, a.papers.kept) == (3, [revoked(3, 7)])
    assert bad.access.roll.revoked_number == 3  # it learns it, like it or not
    again = Papers(token(a.id), [], a.papers.kept)
    assert await again.revoked() == [revoked(3, 7)]  # nor does a restart forget it


@in_club
async def test_who_claims_in_the_directory_to_serve_counts_only_with_a_token_for_that(club: Club) -> None:
    open_backbone = await club.start(lambda peer: Papers())  # knows no tokens: everyone may write there
    a = await club.member("stage", number=1)
    trainer = await club.member("trainer", number=2)
    outsider = await club.start(lambda peer: Papers())
    told = StageProgress(0, 1.0, 0, 0, 0.0, "cpu", "", "", [])
    mine = Directory("tiny", 2, a.host, a.dht, a.rpc.gate)
    await mine.announce(told)
    for liar, shown in ((outsider, b""), (outsider, a.access.token), (trainer, trainer.access.token)):
        record = StageProgress(0, 0.0, 0, 0, 0.0, "cpu", "", "", [], shown)
        await liar.dht.put(stage_key("tiny", 0), encode_progress(record), ttl_s=60)
        assert list(await mine.refresh()) == [(a.id, 0)]
    assert len(await Directory("tiny", 2, outsider.host, outsider.dht).refresh()) == 3  # they do stand there
    assert open_backbone.dht.status()["records_held"] >= 3
    keeper = await club.member("backbone", number=3)
    places = [Position(7, b"x")]
    await Directory("tiny", 2, keeper.host, keeper.dht, keeper.rpc.gate).announce_kept(places)
    for liar, shown in ((outsider, keeper.access.token), (trainer, trainer.access.token)):
        await liar.dht.put(kept_key("tiny"), encode(KeptCheckpoints([Position(1 << 40, b"")], [], shown)), ttl_s=60)
    await mine.refresh()
    assert mine.kept == {keeper.id: places}
    assert mine.keepers(places[0]) == [keeper.id]
    now = a.node.clock.wall()
    await outsider.dht.put(joining_key("tiny"), encode(Joiner(now - 0.1)), ttl_s=60)
    assert await mine.arrivals(now) == [], "a stranger has no place in the line"
    await mine.announce_arrival(now - 0.1, [1], takes=0)
    assert await mine.arrivals(now) == [Arrival(now - 0.1, a.id.text, (1,), 0)]
    with pytest.raises(RemoteError):
        await a.ask(open_backbone, "stage/6/forward")


@in_club
async def test_a_peer_that_was_started_anew_is_shown_the_token_again(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2)
    await a.ask(b)
    b.access.roll.forget(a.id)  # as after a start that the other side has not noticed
    await a.ask(b)
    assert b.called == [(a.id, "other/1/ask")] * 2
    assert b.rpc.status()["served"]["access/1/present"]["calls"] == 2


@in_club
async def test_many_calls_at_once_make_one_exchange(club: Club) -> None:
    a, b = await club.member(number=1), await club.member(number=2)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(a.ask, b)
    assert b.rpc.status()["served"]["access/1/present"]["calls"] == 1
    assert len(b.called) == 50


@in_club
async def test_a_clock_that_is_far_off_is_corrected_although_tokens_look_expired_to_it(club: Club) -> None:
    members = [await club.member(number=n) for n in (1, 2, 3)]
    late = await club.start(lambda peer: Papers(token(peer, number=4)), run_file(), skew_s=5000.0)
    await trio.sleep(60)
    for member in members:
        await late.ask(member)
        await member.ask(late)
    assert [caller for caller, _ in late.called] == [member.id for member in members]
    assert all(len(member.called) == 1 for member in members)


@in_club
async def test_the_log_names_refused_peers_but_cannot_be_flooded(club: Club, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="peerd.access"):
        a, outsider = await club.member(), await club.start(lambda peer: Papers())
        caplog.clear()
        for _ in range(100):
            await refused(outsider, a)
        lines = [record.getMessage() for record in caplog.records if str(outsider.id) in record.getMessage()]
        (line,) = [line for line in lines if "other/1/ask" in line]
        assert "its call of other/1/ask was refused: no valid token for run tiny" in line


@in_club
async def test_many_identities_without_a_token_make_a_few_lines_a_minute(
    club: Club, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = [PeerId.from_public_key(number.to_bytes(32, "big")) for number in range(3 * ACCESS_TOLD)]
    with caplog.at_level(logging.WARNING, logger="peerd.access"):
        a = await club.member()
        for told in (ACCESS_TOLD, ACCESS_TOLD):
            assert [a.access.named(peer, b"", "stage") for peer in crowd] == [None] * len(crowd)
            assert len(caplog.records) == told
            caplog.clear()
            await trio.sleep(60)
        assert a.access.named(crowd[0], b"", "stage") is None
        assert caplog.records == []  # it was named already


@pytest.mark.slow
@in_club
async def test_the_leader_board_shows_members_under_their_signed_names(club: Club) -> None:
    await club.start(lambda peer: Papers())
    ann, bob = await club.member(number=1), await club.member(number=2, name="Bob")
    liar = await club.start(lambda peer: Papers())
    for peer, role, samples in ((ann, "trainer", 10), (ann, "stage", 5), (bob, "stage", 30)):
        tally = ContributionTally(ContributionOf("tiny", role), peer.dht, peer.node.clock, peer.rpc.gate)
        tally.add(samples=samples, bytes_aggregated=100)
        await trio.sleep(120)
        await tally.publish()
    lie = ContributionTally(
        ContributionOf("tiny", "stage"), liar.dht, liar.node.clock, ann.rpc.gate
    )  # with Ann's token
    lie.add(samples=1000)
    await lie.publish()
    swarm = await swarm_view(bob.dht, run_file(), bob.rpc.gate)
    shown = ("name", "peer", "samples", "brought", "updates", "bytes_aggregated")
    board = [tuple(getattr(row, key) for key in shown) for row in swarm.contributions]
    assert board == [("Bob", bob.id.text, 30, 0, 0, 100), ("Ann", ann.id.text, 5, 10, 0, 200)]
    assert [round((known(row.hours) or 0) * 3600) for row in swarm.contributions] == [120, 120]
    ours = await swarm_view(liar.dht, run_file())  # whoever checks no tokens is told anything
    assert ours.contributions[0].samples == 1000
    assert ours.contributions[0].name == ""
