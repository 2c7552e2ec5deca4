"""peerd: pool computers over the internet to train neural networks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerd.core.version import VERSION

if TYPE_CHECKING:
    from peerd.library.averaging_optimizer import AveragingOptimizer as AveragingOptimizer
    from peerd.library.expert_peer import DMoE as DMoE
    from peerd.library.expert_peer import ExpertPeer as ExpertPeer
    from peerd.library.layerwise import Lamb as Lamb
    from peerd.library.layerwise import Lars as Lars

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Import the parts that need torch on first use, since most of peerd works without it."""
    if name == "AveragingOptimizer":
        from peerd.library.averaging_optimizer import AveragingOptimizer

        return AveragingOptimizer
    if name in ("DMoE", "ExpertPeer"):
        from peerd.library import expert_peer

        return getattr(expert_peer, name)
    if name in ("Lamb", "Lars"):
        from peerd.library import layerwise

        return getattr(layerwise, name)
    raise AttributeError(f"module 'peerd' has no attribute {name!r}")
