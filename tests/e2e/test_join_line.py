"""The line that a backbone prints, pasted elsewhere: with and without tokens, in real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from peerd.cli.cli import invoke
from tests.worlds.processes.processes import LISTEN, Process, processes

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]
RUN = """\
run: line
model: {d_model: 16, heads: 2, layers: 2, context: 16}
pipeline: {microbatch: 2}
batch: {target_samples: 8}
data: {holdout: 0.01, shuffle_buffer: 100}
evaluate: {every_steps: 0}
limits: {upload_mbit: 7}
"""


def line_of(backbone: Process) -> list[str]:
    backbone.wait_for("others join with: peerd join peerd://")
    found = re.search(r"others join with: peerd (join .*)", backbone.said)
    assert found is not None
    return found[1].split()


def test_a_volunteer_pastes_the_line_and_trains(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    with processes(tmp_path) as started:
        backbone = started.backbone("--config", str(file))
        guest = started.start("guest", *line_of(backbone), "--listen", LISTEN)
        assert guest.popen.wait(200) == 2
        assert "add --yes" in guest.said
        guest = started.start("guest", *line_of(backbone), "--yes", "--listen", LISTEN)
        guest.reaches(2)
        assert "joining as trainer, which this run needs" in guest.said
        assert guest.status()["limits"]["upload_mbit"] is None
        assert guest.end()[0] == 0
        again = started.start("guest", *line_of(backbone), "--listen", LISTEN)  # agreed to already
        again.wait_until(lambda: again.role().get("state") == "running", "it did not come back")
        assert again.end()[0] == 0


@pytest.mark.thorough
def test_a_run_with_tokens_gives_its_file_to_strangers_signed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    organizer, guest_dir = tmp_path / "organizer", tmp_path / "guest"
    ids = []
    for place in (organizer, guest_dir):
        assert invoke(["identity", "--data-dir", str(place), "--json"]) == 0
        ids.append(json.loads(capsys.readouterr().out)["peer_id"])
    file = tmp_path / "run.yaml"
    file.write_text(RUN + f"access: {{allow: tokens, organizer: {ids[0]}}}\n")
    issue = ["token", "issue", "--run", "line", "--peer", ids[1], "--roles", "trainer,stage"]
    assert invoke([*issue, "--data-dir", str(organizer)]) == 0
    token = capsys.readouterr().out.strip()
    with processes(tmp_path) as started:
        backbone = started.start("organizer", "backbone", "--config", str(file), "--listen", LISTEN)
        command, link, *rest = line_of(backbone)
        assert rest == ["--token", "FILE"]
        guest = started.start("guest", command, link, "--yes", "--listen", LISTEN)
        assert guest.popen.wait(200) == 2
        assert f"signed by its organizer {ids[0]}" in guest.said
        assert f"for a token for peer {ids[1]}" in guest.said
        guest = started.start("guest", command, link, "--yes", "--token", token, "--listen", LISTEN)
        guest.reaches(2)
        assert guest.end()[0] == 0
