"""A process without peerd that tests share: importing torch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.exporting import Alone, process_without_peerd


@pytest.fixture(scope="session")
def _process() -> Iterator[Alone]:
    with process_without_peerd() as ask:
        yield ask


@pytest.fixture(scope="module")  # so that the tests of a file run where it is
def alone(_process: Alone) -> Alone:
    return _process
