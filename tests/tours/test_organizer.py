"""An organizer with one cheap server and three volunteers at home: from a run file to a model that writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.lab import WideLab, why_not_wide
from tests.worlds.processes.tour import Running, Shell

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]

RUN = """\
run: stories
model: {d_model: 16, heads: 2, layers: 2, context: 16}
pipeline: {stages: 2, microbatch: 4}
batch: {target_samples: 16}
evaluate: {every_steps: 10, samples: 8}
checkpoint: {every_steps: 5}
access: {allow: tokens, organizer: %s}
"""
HOMES = [("ann", "port-restricted"), ("bob", "symmetric"), ("cleo", "full-cone")]


def test_an_organizer_with_three_volunteers_behind_routers_gets_a_model_out(tmp_path: Path) -> None:
    reason = why_not_wide()
    if reason is not None:
        pytest.skip(reason)
    tmp_path.chmod(0o700)
    with WideLab(delay_ms=10) as lab:
        organizer = Shell(tmp_path / "organizer", lab.host("organizer").popen)
        volunteers = [Shell(tmp_path / name, lab.host(name, kind).popen) for name, kind in HOMES]
        try:
            tour(organizer, volunteers)
        finally:
            for shell in (organizer, *volunteers):
                shell.close()


def tour(organizer: Shell, volunteers: list[Shell]) -> None:
    own = identity(organizer)
    (organizer.home / "run.yaml").write_text(RUN % own)
    backbone = organizer.start("peerd backbone --config run.yaml --data-dir me")
    link = backbone.wait_for(r"peerd join (peerd://\S+)")[1]
    joined = [
        join(organizer, shell, link, role)
        for shell, role in zip(volunteers, ("stage", "stage", "trainer"), strict=True)
    ]
    for running in joined:
        running.wait_for("role.started")
    wait_for_step(organizer, backbone, 12)
    assert joined[2].ctrl_c() == 0  # the trainer goes, and comes back without a word about tokens or run files
    again = volunteers[2].start(f"peerd join {link} --role trainer --data-dir me --yes")
    again.wait_for("role.started")
    wait_for_step(organizer, backbone, 30)
    told = organizer.run("peerd status --swarm --data-dir me").text
    assert {"Ann", "Bob", "Cleo"} <= set(re.findall(r"[A-Z][a-z]+", told))
    for running in (again, *joined[:2], backbone):
        assert running.ctrl_c() == 0
        assert "Traceback" not in running.said
    assert organizer.run("peerd export --backbone me --out model").code == 0
    written = organizer.run('peerd generate --from model --tokens 40 "def "')
    assert written.code == 0
    assert "\ndef " in f"\n{written.text}"


def identity(shell: Shell) -> str:
    """What `peerd identity` tells: a volunteer sends it to the organizer."""
    found = re.search(r"12D3Koo\w+", shell.run("peerd identity --data-dir me").text)
    assert found is not None
    return found[0]


def join(organizer: Shell, shell: Shell, link: str, role: str) -> Running:
    """The organizer issues a token, and the volunteer pastes the line with it."""
    peer, name = identity(shell), shell.home.name.title()
    issued = organizer.run(f"peerd token issue --run stories --peer {peer} --roles {role} --name {name} --data-dir me")
    token = re.search(r"^peerd-token-\S+$", issued.text, re.MULTILINE)
    assert token is not None
    return shell.start(f"peerd join {link} --role {role} --token {token[0]} --data-dir me --yes")


def wait_for_step(organizer: Shell, backbone: Running, step: int) -> None:
    """Until the swarm, as the backbone sees it, has made it."""

    def reached() -> bool:
        told: dict[str, Any] = json.loads(organizer.ask("peerd status --json --data-dir me").text)
        return int(told["swarm"].get("step") or 0) >= step

    backbone.until(reached, f"step {step} was never made", patience_s=120)
