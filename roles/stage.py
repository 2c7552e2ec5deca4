"""Role `stage`: serves one pipeline stage."""

from __future__ import annotations

from typing import ClassVar

from peerd.training.stage.member import StageMember


class StageRole(StageMember):
    """Chooses its stage by need, or as the run file says; all else is what every member of a stage does."""

    name: ClassVar[str] = "stage"
    needs_run: ClassVar[bool] = True
