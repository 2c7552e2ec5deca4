"""Members of averaging rounds are killed, or hang, in every phase: the others end in time, name them, and go on."""

from __future__ import annotations

import hashlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_processes import soon, step_of
from tests.kit.amount import few, thorough
from tests.kit.averagers import PHASES, Averager, averagers, expected, order
from tests.kit.processes import Process, processes, run_file

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.alone, pytest.mark.timeout(600)]

SENDER_TIMEOUT_S = 2.0
STEPS = 60
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


@pytest.mark.parametrize("victim", [pytest.param(0, id="the conductor"), thorough(2, id="another")])
@pytest.mark.thorough
def test_a_replica_is_killed_in_mid_step_and_nothing_is_lost(tmp_path: Path, victim: int) -> None:
    """Three replicas of a whole model, real peers; the first one conducts."""
    extra = f"averaging: {{sender_timeout_s: {SENDER_TIMEOUT_S}}}\noptimizer: {{total_steps: {STEPS}}}\n"
    file = run_file(tmp_path, extra)
    text = file.read_text().replace("stages: 2", "stages: 1").replace("target_samples: 8", "target_samples: 128")
    file.write_text(text)
    with processes(tmp_path) as started:
        backbone = started.backbone("--config", str(file))
        peers = [started.join("replica-0", "trainer", file, backbone.address())]
        peers[0].wait_for("role.started")
        peers += [started.join(f"replica-{i}", "trainer", file, backbone.address()) for i in (1, 2)]
        for peer in peers[1:]:
            peer.wait_for("checkpoint.saved ")  # it has the state, and makes steps of its own
        usual_s = time_of_steps(peers[1])
        killed = peers.pop(victim)
        killed.popen.kill()
        taken_s = time_of_steps(peers[1])
        assert taken_s < SENDER_TIMEOUT_S + 2.0 + 2 * usual_s
        for peer in peers:  # they end by themselves, after the last step
            assert peer.popen.wait(200) == 0, peer.said
            assert re.search(r"finished .* lost=0\b", peer.said), peer.said
        first, second = (checkpoints(peer) for peer in peers)
        both = first.keys() & second.keys()
        assert both  # the newest few: the last step's end may overtake one of them
        assert {name: first[name] for name in both} == {name: second[name] for name in both}
        assert not [peer.name for peer in (*peers, backbone) if "Traceback" in peer.said]


def time_of_steps(peer: Process) -> float:
    """The time until the step under way has ended, and one more."""
    before = step_of(peer)
    return soon(lambda: step_of(peer) >= before + 2, "no step is made", 60.0)


def checkpoints(peer: Process) -> dict[str, str]:
    """The tensors of each checkpoint that is left: their digest by the step's name."""
    found = peer.data_dir.rglob("step-*.safetensors")
    return {path.name.split(".")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
