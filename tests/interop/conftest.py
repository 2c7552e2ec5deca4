"""Ends the foreign peers that the interoperability tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds.processes.foreign import end_shared


@pytest.fixture(scope="session", autouse=True)
def _shared_foreign_peers() -> Iterator[None]:
    yield
    end_shared()
