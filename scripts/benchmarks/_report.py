"""Report of a benchmark: figures with their targets, shown as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `at_least` or `at_most` is its target, if it has one."""

    key: str  # its key in the JSON object
    text: str
    value: float
    unit: str = ""
    digits: int = 2
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def target_text(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:,g}"
        return "" if self.at_most is None else f"≤ {self.at_most:,g}"


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a benchmark."""

    title: str
    sections: Sequence[Sequence[Figure]]
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # more keys for the JSON object

    def as_json(self) -> dict[str, Any]:
        figures = [figure for section in self.sections for figure in section]
        found: dict[str, Any] = {figure.key: round(figure.value, 6) for figure in figures}
        found["targets_met"] = {figure.key: figure.met for figure in figures if figure.met is not None}
        return {**found, **self.extra}
