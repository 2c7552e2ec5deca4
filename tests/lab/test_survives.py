"""A swarm behind routers goes on when a relay dies, a router forgets its mappings, or a line is down for 20 s.

Peers call each other all the time; every call has a deadline. Times are those of the lab: what is asserted is that no
call lasts longer than it may, and that calls succeed again soon after the world is in order again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from scripts.benchmarks._matrix import Swarm
from scripts.lab import Kind, WideLab
from scripts.waiting import eventually

PERIOD_S = 0.25  # between calls
TIMEOUT_S = 5.0  # of a call
LATE_S = 2.0  # what a busy machine may add
CALM_S = 3.0  # of calls that all succeed
KINDS: dict[str, Kind] = {"home": "port-restricted", "flat": "port-restricted", "deep": "symmetric", "open": "none"}
PAIRS = [("home", "flat"), ("home", "deep"), ("deep", "flat"), ("open", "home"), ("flat", "open")]

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def chatting(_needs_a_wide_lab: None) -> Iterator[Swarm]:
    """Four peers that call each other, behind relays of which one is to spare: what one test breaks is whole again."""
    with WideLab(delay_ms=10) as wide:
        made = Swarm(wide, dht=True)
        made.add({name: wide.host(name, kind) for name, kind in KINDS.items()})
        assert set(made.settled()) == set(KINDS)
        for caller, called in PAIRS:
            made.chat(caller, called, period_s=PERIOD_S, timeout_s=TIMEOUT_S)
        yield made


@pytest.fixture
def swarm(chatting: Swarm) -> Swarm:
    """All calls have succeeded for a while."""
    assert calm(chatting, 20) is not None
    return chatting


def calm(swarm: Swarm, most_s: float) -> float | None:
    """Wait until no call has failed for CALM_S and each pair has made several: after how long; None: never."""
    began = time.monotonic()

    def is_calm() -> bool:
        recent = [swarm.chats(pair, time.monotonic() - CALM_S) for pair in PAIRS]
        good = all(len(calls) >= 4 and all(error is None for _, _, error in calls) for calls in recent)
        return good and time.monotonic() - began >= CALM_S

    return time.monotonic() - began - CALM_S if eventually(is_calm, most_s) else None


def kept_deadlines(swarm: Swarm) -> bool:
    """True when each call ended in time, with any result, and none is under way past its deadline."""
    calls = [call for pair in PAIRS for call in swarm.chats(pair, 0.0)]
    last = [swarm.chats(pair, 0.0)[-1] for pair in PAIRS]
    limit = TIMEOUT_S + LATE_S
    now = time.monotonic()
    return all(took <= limit for _, took, _ in calls) and all(now - began - took <= limit for began, took, _ in last)


def test_calls_go_on_when_a_router_has_forgotten_all_its_mappings(swarm: Swarm) -> None:
    router = swarm.members["home"].host.router
    assert router is not None
    router.forget()
    assert calm(swarm, 90) is not None
    assert kept_deadlines(swarm)
    # Each side dials while the other may: whose packet finds the way through decides what the link is called.
    there = [swarm.members[name] for name in ("home", "flat")]
    assert swarm.way_within("home", "flat", ("punched", "direct"), 60), [member.where() for member in there]


def test_calls_go_on_after_a_line_was_down_for_20_seconds(swarm: Swarm) -> None:
    swarm.members["home"].host.line.cut(20)
    cut_s = time.monotonic()
    cut = eventually(lambda: swarm.chats(("home", "flat"), cut_s), 2 * (TIMEOUT_S + LATE_S))
    assert cut
    assert all(error is not None for _, _, error in cut), cut
    assert calm(swarm, 90) is not None
    assert kept_deadlines(swarm)


def test_calls_and_places_on_relays_survive_a_relay_that_is_killed(swarm: Swarm) -> None:
    before = swarm.members["home"].where()
    deep = swarm.members["deep"].peer
    assert before["ways"][deep] == "relayed"
    (relay,) = [each for each in swarm.relays if each.peer in before["remotes"][deep]]
    relay.host.kill()
    swarm.relays.remove(relay)
    assert calm(swarm, 60) is not None
    assert kept_deadlines(swarm)
    living = {each.peer for each in swarm.relays}
    assert set(swarm.settled(["home", "flat", "deep"], 30, living)) == {"home", "flat", "deep"}
