"""A volunteer who makes every mistake: each gets one sentence, nothing is lost, and in the end their peer helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.processes import LISTEN, Processes, processes, run_file
from tests.kit.tour import Shell, shells

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]


@pytest.mark.thorough
def test_a_volunteer_makes_every_mistake_and_helps_in_the_end(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = run_file(tmp_path)
    with processes(tmp_path) as started, shells(tmp_path, "volunteer") as (volunteer,):
        backbone = started.backbone("--config", str(file))
        addr = backbone.address()
        trainer = started.join("trainer", "trainer", file, addr)
        started.join("stage0", "stage", run_file(tmp_path, "limits: {stage: 0}\n", "stage0.yaml"), addr)
        options = f"--model {file} --bootstrap {addr} --listen {LISTEN}"
        they_mistype(volunteer, options)
        they_start_in_odd_folders(volunteer, options)
        they_have_the_wrong_files(volunteer, tmp_path, addr)
        they_help(started, volunteer, options)
        assert trainer.popen.poll() is None


def they_mistype(volunteer: Shell, options: str) -> None:
    volunteer.run("peerd join").one_sentence("say what to join: a line such as peerd://", code=2)
    volunteer.run(f"peerd join --role stagee {options}").one_sentence("did you mean stage?", code=2)
    volunteer.run("peerd join --role stage").one_sentence("needs a run file", code=2)
    volunteer.run("peerd join --role stage --model rnu.yaml").one_sentence("there is no file rnu.yaml", code=2)
    volunteer.run("peerd status").one_sentence("peerd", code=1)


def they_start_in_odd_folders(volunteer: Shell, options: str) -> None:
    """A folder of theirs holds what looks like parts of Python or of peerd."""
    folder = volunteer.home / "ansible"
    (folder / "roles").mkdir(parents=True)
    (folder / "roles" / "main.yml").write_text("- hosts: all\n")
    (folder / "platform.py").write_text("raise RuntimeError('not for you')\n")
    (folder / "trio").mkdir()
    assert volunteer.run("peerd --version", cwd=folder).code == 0
    volunteer.run(f"peerd join --role stagee {options}", cwd=folder).one_sentence("did you mean stage?", code=2)


def they_have_the_wrong_files(volunteer: Shell, folder: Path, addr: str) -> None:
    join = f"peerd join --bootstrap {addr} --listen {LISTEN}"
    lost = run_file(folder, name="lost.yaml")
    lost.write_text(lost.read_text().replace("text.txt", "no-such-text.txt"))
    volunteer.run(f"{join} --role trainer --model {lost}").one_sentence("no-such-text.txt", code=2)
    other = run_file(folder, name="other.yaml")
    text = other.read_text().replace("d_model: 16", "d_model: 32")
    other.write_text(text.replace("target_samples: 8", "target_samples: 12"))
    volunteer.run(f"{join} --role stage --model {other}").one_sentence("model.d_model", "batch.target_samples", code=2)


def they_help(started: Processes, volunteer: Shell, options: str) -> None:
    """Without their peer the run stands still, with it the run trains; a second process finds the place taken."""
    trainer = next(process for process in started.all if process.name == "trainer")
    trainer.wait_until(lambda: "stage 1 has no peers" in str(trainer.status()), "the trainer never said why it waits")
    helping = volunteer.start(f"peerd join --role stage {options} --data-dir mine")
    helping.wait_for("role.started role=stage")
    trainer.wait_until(lambda: int(trainer.role().get("step", 0)) >= 3, "nothing was trained")
    again = volunteer.run(f"peerd join --role stage {options} --data-dir mine")
    again.one_sentence("is in use by process", code=2)
    told = volunteer.run("peerd status --data-dir mine")
    assert told.code == 0
    assert "stage" in told.text
    assert helping.ctrl_c() == 0
    assert "Traceback" not in helping.said
