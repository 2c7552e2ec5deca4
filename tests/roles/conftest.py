"""The run of the tests in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.run.runfile import RunFile
from tests.worlds.roles.training import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run(tmp_path)
