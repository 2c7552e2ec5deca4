"""The version of peerd, which `peerd.__version__`, the agent string and `peerd --version` tell."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
