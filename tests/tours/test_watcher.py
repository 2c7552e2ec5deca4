"""A watcher: how far the run is, who is there, why it stands still, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.waiting import eventually
from tests.worlds.processes.processes import LISTEN, processes, run_file
from tests.worlds.processes.tour import Shell, shells

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]


@pytest.mark.thorough
def test_a_watcher_sees_a_loss_its_reason_and_the_recovery(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = run_file(tmp_path)
    with processes(tmp_path) as started, shells(tmp_path, "watcher") as (watcher,):
        addr = started.backbone("--config", str(file)).address()
        trainer = watcher.start(
            f"peerd join --role trainer --model {file} --bootstrap {addr} --listen {LISTEN} --data-dir trainer"
        )
        peers = []
        for stage in (0, 1):
            pinned = run_file(tmp_path, f"limits: {{stage: {stage}}}\n", f"stage{stage}.yaml")
            peers.append(started.join(f"stage{stage}", "stage", pinned, addr))
        assert eventually(lambda: step(watcher) >= 4, 60), trainer.said
        first = watcher.run("peerd status --data-dir trainer").text
        assert "stands still" not in first
        assert "stage" in first

        peers[1].popen.kill()  # the only peer of stage 1
        seen: list[str] = []

        def says_why() -> bool:
            seen.append(watcher.ask("peerd status --data-dir trainer").text)
            return "stands still" in seen[-1].splitlines()[0] and "stage 1 has no peers" in seen[-1].splitlines()[0]

        assert eventually(says_why, 60), seen[-1]
        watcher.run("peerd status --data-dir trainer")
        still = told(watcher)
        assert still["swarm"]["samples_per_s"] == 0
        before = int(still["swarm"]["step"])

        newcomer = started.join("newcomer", "stage", file, addr)
        assert eventually(lambda: step(watcher) >= before + 3, 90), trainer.said
        assert "stands still" not in watcher.run("peerd status --data-dir trainer").text
        newcomer.wait_for('stage.chosen role=stage stage=1 why="it has no peer"')
        # What the loss cost is a warning; it cost nothing if the backbone had just fetched the last step.
        kept = f"checkpoint.fetched role=stage stage=0 step={before}"
        lost = "stage 1 was lost with its last peer: the swarm goes back from step"
        said = (lost, kept)
        peers[0].wait_until(lambda: any(text in peers[0].said for text in said), "it never said what was lost")
        assert "Traceback" not in trainer.said


def told(watcher: Shell) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(watcher.ask("peerd status --json --data-dir trainer").text)
    return found


def step(watcher: Shell) -> int:
    """The run's step, as the trainer's daemon tells it."""
    if not (watcher.home / "trainer" / "events.jsonl").exists():
        return 0
    said = watcher.ask("peerd status --json --data-dir trainer")
    return int(json.loads(said.text)["swarm"].get("step") or 0) if said.code == 0 else 0
