"""The version of peerd, used by `peerd.__version__`, the agent string and `peerd --version`."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
