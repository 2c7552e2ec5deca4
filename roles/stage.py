"""Role `stage`: serves one pipeline stage."""

from __future__ import annotations

from typing import ClassVar

from peerd.core.errors import ConfigError
from peerd.model.stage.dry_run import try_layers
from peerd.pipeline.stage.member import StageMember
from peerd.run.runfile import RunFile


class StageRole(StageMember):
    """A member of a stage, chosen by need or set in the run file; see `StageMember`."""

    name: ClassVar[str] = "stage"
    needs_run: ClassVar[bool] = True

    @classmethod
    def check_run(cls, run: RunFile) -> None:
        """Check the run file before joining (`peerd.role.role.ChecksRun`): tries the layers of all stages."""
        if run.experts is not None:
            raise ConfigError("a run with experts has no stages to serve; allowed: --role trainer, expert, backbone")
        try_layers(run)
