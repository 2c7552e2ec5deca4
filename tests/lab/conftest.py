"""Tests in this folder run in a network lab (scripts/lab), and are skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.lab import Lab, WideLab, why_not, why_not_wide


@pytest.fixture(autouse=True)
def _needs_a_lab() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="session")
def _needs_a_wide_lab() -> None:
    reason = why_not_wide()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def wide(_needs_a_wide_lab: None) -> Iterator[WideLab]:
    """A lab with routers and delays."""
    with WideLab() as lab:
        yield lab
