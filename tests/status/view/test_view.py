"""Status tables: what people see, whatever a daemon or strangers put into a snapshot."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from peerd.core.errors import PeerdError
from peerd.status.snapshot import StatusSnapshot, decode_status
from peerd.status.swarm_status import SwarmStatus
from peerd.status.view import status_view, watch_view
from peerd.status.view.status_view import render, render_swarm

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def shown(snapshot: dict[str, Any]) -> str:
    return plain_text(render(decode_status(snapshot, StatusSnapshot)))


def swarm_text(swarm: dict[str, Any]) -> str:
    return plain_text(render_swarm(decode_status(swarm, SwarmStatus)))


def plain_text(drawn: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(drawn)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def snapshot(**changes: Any) -> dict[str, Any]:
    stage_peer = {"peer": PEER, "step": 7, "held": 16, "samples_per_s": 12.5, "device": "cpu", "waits_for": ""}
    return {
        "version": "0.1.0",
        "uptime_s": 75.0,
        "data_dir": "/d",
        "peer": {"id": PEER, "addrs": [f"/ip4/192.0.2.1/tcp/31337/p2p/{PEER}"]},
        "roles": [{"role": "stage", "state": "running", "restarts": 1, "waits_for": "the conductor", "stage": 1}],
        "network": {"peers": [{}, {}], "streams": 3, "bytes_in": 1500, "bytes_out": 2_000_000, "in_per_s": 10.0},
        "dht": {"peers": 4, "bootstrap": [{"addr": "/ip4/1.2.3.4/tcp/5", "connected": False, "problem": "refused"}]},
        "swarm": {
            "run": "tiny",
            "step": 7,
            "loss": 3.25,
            "valid_loss": 3.5,
            "samples_per_s": 20.0,
            "tokens_per_s": 2560.0,
            "trainers": [{}],
            "stages": [{"stage": 0, "peers": [stage_peer]}, {"stage": 1, "peers": []}],
        },
        "events": [{"time": 0.0, "level": "warn", "name": "role.failed", "why": "x"}],
    } | changes


def test_bootstrap_addresses_in_reserve_are_told_as_such() -> None:
    rows = [("1.2.3.4", True, False), ("1.2.3.5", False, True), ("1.2.3.6", False, False)]
    told = [{"addr": a, "connected": c, "problem": None, "in_reserve": r} for a, c, r in rows]
    text = shown(snapshot(dht={"peers": 4, "bootstrap": told}))
    assert "bootstrap 1.2.3.4: connected" in text
    assert "bootstrap 1.2.3.5: in reserve" in text
    assert "bootstrap 1.2.3.6: connecting" in text


def test_a_relay_tells_what_it_carries() -> None:
    relay = {"circuits": 2, "reservations": 5, "carried_bytes": 3_000_000, "refused": 0}
    text = " ".join(shown(snapshot(reachability={"carries": relay})).split())
    assert "relay for others: 2 circuits, 5 reservations, 3.0 MB carried" in text
    assert "relay for others" not in shown(snapshot(reachability={"carries": None}))


def test_how_others_reach_this_peer_is_told_with_advice_and_ways() -> None:
    net = {"peers": [{"way": "direct"}, {"way": "punched"}, {"way": "direct"}, {"way": "relayed"}, {}]}
    advice = "only through relays: forward TCP port 31337 for full speed"
    reached = {"verdict": "symmetric", "advice": advice, "for_s": 65.0, "relays": [PEER, "x"], "carries": None}
    text = " ".join(shown(snapshot(network=net, reachability=reached)).split())
    assert "connections: 2 direct, 1 by hole punching, 1 over relays" in text
    assert f"{advice}, for 1 min 05 s" in text
    assert f"reached over the relays …{PEER[-8:]}, x" in text


def test_what_is_not_known_yet_is_told_without_since_when() -> None:
    reached = {"verdict": "unknown", "advice": "whether others can connect is not known yet: why", "for_s": 5.0}
    assert "not known yet: why\n" in shown(snapshot(reachability=reached)).replace(" \n", "\n")


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    relay = {"circuits": 1, "reservations": 1, "carried_bytes": 0}
    net = {"peers": [{"way": "relayed"}], "streams": 1}
    reached = {"carries": relay, "relays": [PEER]}
    text = " ".join(shown(snapshot(network=net, reachability=reached, dht={"peers": 1, "records_held": 1})).split())
    for part in (
        *("1 peer connected, 1 stream;", "1 circuit, 1 reservation, 0 B carried", "directory: 1 peer known"),
        *("1 record kept", f"reached over the relay …{PEER[-8:]}", " 1 trainer "),
    ):
        assert part in text


def test_each_address_is_called_what_it_is_to_those_who_connect() -> None:
    inside, outside = "/ip4/192.168.1.7/tcp/31337", "/ip4/81.2.3.4/tcp/40000"
    circuit = f"/ip4/45.0.0.1/tcp/4001/p2p/{PEER}/p2p-circuit"
    addrs = [f"{addr}/p2p/{PEER}" for addr in (outside, inside, circuit)]
    text = shown(snapshot(peer={"id": PEER, "addrs": addrs}, reachability={"proven": [outside]}))
    assert f"reachable at {addrs[0]}" in text
    assert f"listening on {addrs[1]}" in text
    assert "over a relay at /ip4/45.0.0.1/tcp/4001" in text


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "any moment"), (12.4, "in about 12 s"), (150.0, "in about 2 min 30 s")]
)
def test_the_next_step_is_foretold(seconds: float, words: str) -> None:
    role = {"role": "stage", "state": "running", "next_step_in_s": seconds}
    swarm = snapshot()["swarm"] | {"next_step_in_s": seconds}
    text = " ".join(shown(snapshot(roles=[role], swarm=swarm)).split())
    assert text.count(f"next step {words}") == 2
    assert f"next step {words}" in " ".join(swarm_text(swarm).split())
    still = swarm | {"standstill": {"why": "stage 1 has no peers", "for_s": 40.0}}
    assert "next step" not in swarm_text(still), "what stands still has no next step"


def test_each_post_of_a_role_has_a_row() -> None:
    posts = [{"stage": 0, "step": 8, "waits_for": None}, {"stage": 3, "step": 7, "waits_for": "the steps up to 8"}]
    role = {"role": "stage", "state": "running", "waits_for": "the steps up to 8", **posts[0], "posts": posts}
    rows = [line for line in shown(snapshot(roles=[role])).splitlines() if line.startswith("stage  running")]
    assert [re.split(" {2,}", line.strip())[2:] for line in rows] == [
        ["-", "stage 0, step 8"],
        ["the steps up to 8", "stage 3, step 7"],
    ]


def test_the_line_is_shown_with_its_limits_and_what_it_was_seen_to_carry() -> None:
    up = {"limit_mbit": 20.0, "measured_mbit": None, "now_mbit": 12.34}
    down = {"limit_mbit": None, "measured_mbit": 95.4, "now_mbit": 0.0}
    text = shown(snapshot(network={"line": {"up": up, "down": down}}))
    assert "internet: up 12.3 Mb/s now (limit 20); down 0 Mb/s now (up to 95.4 measured)" in text
    nothing = {"limit_mbit": None, "measured_mbit": None, "now_mbit": 0.0}
    assert "line:" not in shown(snapshot(network={"line": {"up": nothing, "down": nothing}}))


def test_a_snapshot_shows_this_daemon_and_the_swarm() -> None:
    text = shown(snapshot())
    for part in (
        *("up 1 min 15 s", "the conductor", "running (1 restart)", "stage 1", "2 peers connected, 3 streams"),
        *("in 1.5 kB", "out 2.0 MB", "run tiny: step 7, loss 3.250, validation 3.500, 20.0 samples/s, 2,560 tokens/s"),
        *("…4kx6nXTN", "12.5", "no peer", "bootstrap /ip4/1.2.3.4/tcp/5: refused", "role.failed why=x"),
        f"listening on /ip4/192.0.2.1/tcp/31337/p2p/{PEER}",
    ):
        assert part in text


def test_addresses_can_be_copied_from_a_narrow_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    status_view.show(snapshot(), swarm=False)
    assert f"listening on /ip4/192.0.2.1/tcp/31337/p2p/{PEER}\n" in capsys.readouterr().out


def test_an_almost_empty_snapshot_is_shown_too() -> None:
    assert "peerd" in shown({})
    silent = snapshot(swarm={"run": "x", "why": "the directory gave no answer"})
    assert "swarm: the directory gave no answer" in shown(silent)


def test_strangers_cannot_put_markup_on_the_screen() -> None:
    evil = snapshot()
    evil["swarm"]["stages"][0]["peers"][0]["waits_for"] = "[blink]boo[/blink]"
    assert "[blink]boo[/blink]" in shown(evil)


def test_watching_prints_one_object_per_line_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([None, None])

    def pause(seconds: float) -> None:
        if next(pauses, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(watch_view.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        watch_view.watch(snapshot, as_json=True, draw=watch_view.Watcher().draw)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["version"] for line in lines] == ["0.1.0"] * 3


def board(**changes: Any) -> dict[str, Any]:
    ann = {
        "peer": PEER,
        "name": "Ann",
        "samples": 12345,
        "brought": 480,
        "updates": 77,
        "bytes_aggregated": 2_000_000,
        "hours": 1.25,
        "since": 0,
    }
    bob = {"peer": PEER[:-1] + "M", "name": "", "samples": 10, "brought": 0, "updates": 0, "bytes_aggregated": 0}
    bob |= {"hours": 0.0, "since": 0}
    return snapshot()["swarm"] | {"contributions": [ann, bob]} | changes


def test_the_swarm_alone_is_shown_with_its_leader_board() -> None:
    text = swarm_text(board())
    lines = [line.split() for line in text.splitlines()]
    assert lines[-2][:8] == ["1", "Ann", "…4kx6nXTN", "12,345", "480", "77", "2.0", "MB"]
    assert lines[-1][:8] == ["2", "-", "…4kx6nXTM", "10", "0", "0", "0", "B"]
    assert "run tiny: step 7" in text
    assert "contributions by the peers' own figures" in text
    assert "no peer" in text
    assert "listening" not in text


def counted_board() -> dict[str, Any]:
    ann, bob = board()["contributions"]
    ann["counted"] = {"samples": 12000, "brought": 470}
    own = dict.fromkeys(("samples", "brought", "updates", "bytes_aggregated", "hours", "since"))
    eve = {"peer": PEER[:-1] + "P", "name": "", **own, "counted": {"samples": 0, "brought": 9}}
    counted = {"by": PEER, "since_step": 1234, "step": 5678, "unlisted": 0, "told_at": 1.0}
    return board(contributions=[ann, eve, bob | {"counted": None, "samples": 10**15}], counted=counted)


def test_the_leader_board_shows_the_conductors_counts_beside_each_peers_own_word() -> None:
    lines = swarm_text(counted_board()).splitlines()
    assert lines[-5] == "contributions counted by peer …4kx6nXTN since step 1,234, beside each peer's own figures"
    assert lines[-4].split() == [
        "name",
        "peer",
        "computed",
        "says",
        "brought",
        "says",
        "updates",
        "summed",
        "hours",
        "since",
    ]
    cells = [line.split() for line in lines[-3:]]
    assert cells[0][:9] == ["1", "Ann", "…4kx6nXTN", "12,000", "12,345", "470", "480", "77", "2.0"]
    assert cells[1] == ["2", "-", "…4kx6nXTP", "0", "-", "9", "-", "-", "-", "-", "-"]
    assert cells[2][:7] == ["3", "-", "…4kx6nXTM", "-", "1,000,000,000,000,000", "-", "0"]
    few = counted_board()
    few["counted"]["unlisted"] = 12
    assert "own figures; 12 peers with less left out" in swarm_text(few)


def test_the_watched_leader_board_shows_both_and_whose_count_it_is() -> None:
    picture = watch_view.Watcher().draw_swarm(counted_board())
    assert [line.plain for line in picture.events[::-1]] == [
        "1. Ann: 12,000 computed, 470 brought; says 12,345 computed, 480 brought, 77 updates of experts, "
        "2.0 MB summed, 1.2 hours",
        "2. …4kx6nXTP: 9 brought; says nothing",
        "3. …4kx6nXTM: not counted; says 1,000,000,000,000,000 computed, 0.0 hours",
    ]
    [[whose]] = picture.facts
    assert whose.plain == "contributions counted by peer …4kx6nXTN since step 1,234, beside each peer's own figures"
    picture = watch_view.Watcher().draw_swarm(board())
    assert picture.events[0].plain == "2. …4kx6nXTM: 10 computed, 0.0 hours"
    assert picture.facts[0][0].plain == "contributions by the peers' own figures"


def test_a_swarm_without_anything_to_show_says_why() -> None:
    assert "swarm: this daemon has not read the directory yet, or has no run" in swarm_text(status_view.swarm_of({}))
    assert status_view.swarm_of({"swarm": {"run": "x"}}) == {"run": "x"}
    evil = board(contributions=[{"name": "[red]boo[/red]", "peer": "x"}])
    assert "[red]boo[/red]" in swarm_text(evil)


def test_who_uses_more_than_half_of_something_is_shown() -> None:
    many = {"who": PEER, "has": 300, "of": 512}
    few = {"who": "10.0.0.1", "has": 10, "of": 4096}
    budgets = [
        {"means": "streams", "used": 310, "of": 16384, "peer": many, "place": few},
        {"means": "bytes being received", "used": 900_000_000, "of": 1_073_741_824},
        {"means": "calls", "used": 0, "of": 8192},
    ]
    found = shown(snapshot(budgets=budgets))
    assert f"…{PEER[-8:]}" in found
    assert "10.0.0.1" not in found
    assert "900.0 MB" in found
    assert "calls" not in found
    assert "fullest" not in shown(snapshot(budgets=budgets[2:]))


def test_faults_are_shown_with_the_last_place() -> None:
    places = [
        {"place": "peerd/wire/link/link.py:7", "count": 2, "ended": "a link", "error": "KeyError: [bold]3[/bold]"}
    ]
    found = shown(snapshot(faults={"count": 2, "last": "peerd/wire/link/link.py:7", "places": places}))
    told = "2 internal errors in peerd, the last at peerd/wire/link/link.py:7: KeyError: [bold]3[/bold]; please report"
    assert told in found
    assert "internal error" not in shown(snapshot(faults={"count": 0, "last": None, "places": []}))


def test_the_status_of_an_older_or_newer_daemon_is_shown_as_far_as_it_is_known() -> None:
    old = snapshot(swarm={"run": "tiny", "step": 7, "stages": [{"stage": 0, "peers": [{"peer": PEER}]}]}, network={})
    assert "run tiny: step 7" in shown(old)
    new = snapshot(rockets=[1], network={"peers": [{"way": "direct", "rockets": 3}], "rockets": {}})
    assert "connections: 1 direct" in shown(new)
    why = r"status of the daemon, peerd 0\.1\.0: Expected `int`, got `str` - at `\$\.network\.streams`"
    with pytest.raises(PeerdError, match=why):
        shown(snapshot(network={"streams": "three"}))
