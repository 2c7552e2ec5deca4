"""Members of averaging rounds are killed, or hang, in every phase: the others end in time, name them, and go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kit.amount import few
from tests.worlds.processes.averagers import PHASES, Averager, averagers, expected, order

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.alone, pytest.mark.timeout(600)]

SENDER_TIMEOUT_S = 2.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
PART = {  # of the victim: senders, helpers, shares; the victim is the last of all
    "node": (3, 0, (1 / 3, 1 / 3, 1 / 3)),
    "client": (3, 0, (0.5, 0.5, 0.0)),
    "helper": (2, 1, (0.25, 0.25, 0.5)),
}


def lose_one(peers: list[Averager], part: str, phase: str, number: int) -> tuple[list[Averager], list[dict[str, Any]]]:
    """One attempt in which the last of the peers is lost; the others and how they ended."""
    senders, _, shares = PART[part]
    how = {**order(peers[:senders], peers[senders:], shares, 1), "patience_s": SENDER_TIMEOUT_S}
    victim, others = peers[-1], peers[:-1]
    for child in others:
        child.tell(**how)
    victim.tell(**how, phase=phase, signal=number)
    halted = victim.hear()["halted"]
    ended = [child.hear() for child in others]
    for answer in ended:
        answer["after_s"] = answer["end"] - halted
    return others, ended


def assert_goes_on_without(others: list[Averager]) -> None:
    """A second attempt gives the right sum, the same bits for all."""
    how = order(others, [], [1 / len(others)] * len(others), 2)
    for child in others:
        child.tell(**how, patience_s=30.0)
    assert [child.hear().get("digest") for child in others] == [expected(len(others))] * len(others)
    assert not [child.said for child in others if "Traceback" in child.said]


LOST = [
    *(("node", phase) for phase in PHASES),
    *(("client", phase) for phase in ("before", "sending")),
    *(("helper", phase) for phase in ("before", "reducing", "answer")),
]


@pytest.mark.parametrize(
    ("part", "phase", "number"),
    few(
        [(*lost, number) for lost in LOST for number in SIGNALS],
        ("node", "sending", signal.SIGKILL),
        ("node", "answer", signal.SIGSTOP),
    ),
    ids=lambda told: told.name if isinstance(told, signal.Signals) else told,
)
def test_a_member_is_lost_in_a_phase_and_the_others_end_in_time(
    tmp_path: Path, part: str, phase: str, number: signal.Signals
) -> None:
    with averagers(tmp_path, 3) as peers:
        others, ended = lose_one(peers, part, phase, number)
        first = min(ended, key=lambda answer: float(answer["end"]))
        assert first["lost"] == [peers[-1].peer], ended
        for answer in ended:
            limit_s = SENDER_TIMEOUT_S + 2.0
            if number == signal.SIGKILL and (part, phase) != ("client", "before"):
                limit_s = SENDER_TIMEOUT_S  # its connections are closed: nobody has to wait for silence
            assert answer["lost"] == [peers[-1].peer], ended
            assert answer["after_s"] < limit_s + answer["late_s"], ended
        assert_goes_on_without(others)
