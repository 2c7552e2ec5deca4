"""peerd: pool computers over the internet to train neural networks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerd.core.version import VERSION

if TYPE_CHECKING:
    from peerd.library import AveragingOptimizer as AveragingOptimizer

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """`peerd.AveragingOptimizer` brings torch, which most of peerd does without: imported when it is asked for."""
    if name == "AveragingOptimizer":
        from peerd.library import AveragingOptimizer

        return AveragingOptimizer
    raise AttributeError(f"module 'peerd' has no attribute {name!r}")
