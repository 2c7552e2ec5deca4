"""The hint at a GPU that nobody uses, in `peerd doctor` and before a role that computes starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.cli.doctor import idle_gpu
from peerd.cli.doctor.machine_checks import device_checks


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the driver would list GPUs."""
    monkeypatch.setattr(idle_gpu, "GPUS", tmp_path)
    return tmp_path


def test_a_gpu_that_is_left_idle_is_told_of_once_and_only_where_there_is_one(gpus: Path) -> None:
    assert idle_gpu.idle_gpu("cpu") == ""
    (gpus / "0000:3b:00.0").mkdir()
    assert idle_gpu.idle_gpu("cpu") == "this machine has an NVIDIA GPU; with --device cuda, peerd computes on it"
    assert idle_gpu.idle_gpu("cuda:0") == ""


def test_a_machine_without_the_driver_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(idle_gpu, "GPUS", tmp_path / "nothing")
    assert idle_gpu.idle_gpu("cpu") == ""


def test_doctor_tells_of_it(gpus: Path) -> None:
    (gpus / "0000:3b:00.0").mkdir()
    device = next(found for found in device_checks("cpu") if found.check == "device")
    assert "--device cuda" in device.advice
