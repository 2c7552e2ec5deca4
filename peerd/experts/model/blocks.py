"""Blocks: the modules of a run's experts, and their initial weights.

`ffn` and `ffn1` act on the last axis of a sample and have no residual; the calling layer adds its own. `transformer` is
a whole causal layer with residuals. `module:function` of a local file (or an installed module) is called with the run
and returns one torch module, which maps samples [S, *input] to [S, *output]; it computes in eval mode.

Initial weights are a pure function of (run.seed, uid), so every peer creates an expert with the same weights. Those of
the blocks here are drawn from integers with one multiplication, as in `model/stage/partition`, so that they are equal
on all machines.

Shapes: S samples, L tokens, D width, F units of a hidden layer.
"""

from __future__ import annotations

import hashlib
import math

import outcome
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerd.core.errors import ConfigError
from peerd.model.layers import Attention, RMSNorm
from peerd.run.contents import is_function
from peerd.run.grid import Uid, sample_shapes
from peerd.run.local_code import guarded
from peerd.run.runfile import ExpertsSection, RunFile
from peerd.run.user_code import find_function, torchs_random_numbers

NORM_EPS = 1e-5  # torch's default


class FeedForward(nn.Module):
    """Feed-forward D - F - F - D with layer norm and ReLU after each hidden layer (Learning@home, section 4.1)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.up_norm = nn.LayerNorm(hidden, NORM_EPS)
        self.across = nn.Linear(hidden, hidden)
        self.across_norm = nn.LayerNorm(hidden, NORM_EPS)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_SD: Tensor) -> Tensor:
        h_SF = F.relu(self.up_norm(self.up(x_SD)))
        h_SF = F.relu(self.across_norm(self.across(h_SF)))
        y_SD: Tensor = self.down(h_SF)
        return y_SD


class ShallowFeedForward(nn.Module):
    """Feed-forward D - F - D with ReLU, as in a transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_SD: Tensor) -> Tensor:
        y_SD: Tensor = self.down(F.relu(self.up(x_SD)))
        return y_SD


class TransformerExpert(nn.Module):
    """Pre-norm transformer layer: causal attention, then feed-forward D - F - D."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.feed_norm = RMSNorm(width)
        self.feed = ShallowFeedForward(width, hidden)

    def forward(self, x_SLD: Tensor) -> Tensor:
        x_SLD = x_SLD + self.attention(self.attention_norm(x_SLD))
        y_SLD: Tensor = x_SLD + self.feed(self.feed_norm(x_SLD))
        return y_SLD


def build_block(run: RunFile, uid: Uid) -> nn.Module:
    """The block of expert `uid` on the CPU, in float32, with initial weights; ConfigError if it cannot be built."""
    section = _section(run)
    if is_function(section.block):
        return _own(run, uid)
    module = _outline(run, section).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_start(run.seed, uid, name, parameter.shape))
    return module.eval()


def block_outline(run: RunFile) -> nn.Module:
    """Build a block on the meta device, without memory. A user's own block that fails there is built with values."""
    section = _section(run)
    if not is_function(section.block):
        return _outline(run, section)
    with torch.device("meta"):
        shapes = outcome.capture(_own, run, Uid(0, ()))
    if isinstance(shapes, outcome.Value):
        return shapes.value
    if not isinstance(shapes.error, ConfigError):
        raise shapes.error
    return _own(run, Uid(0, ()))


def try_block(run: RunFile) -> None:
    """Run one sample through a block, forward and backward; raises ConfigError if it does not fit the run file."""
    block, (into, out) = _section(run).block, sample_shapes(run)
    module = build_block(run, Uid(0, (0,) * len(_section(run).grid)))
    x = torch.zeros((1, *into), requires_grad=True)
    y = guarded(lambda: module(x), f"experts.block {block} failed on a sample {list(into)}")
    if not isinstance(y, Tensor) or tuple(y.shape) != (1, *out):
        found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ConfigError(f"experts.block {block} returns {found} for a batch of 1; expected {[1, *out]}")
    if not y.requires_grad:
        raise ConfigError(f"experts.block {block} returns an output without gradients")
    guarded(y.sum().backward, f"experts.block {block} failed backward")


def seed_of(seed: int, uid: Uid, name: str = "") -> int:
    """Seed of a random stream that is specific to this expert and name."""
    digest = hashlib.sha256(f"peerd start {seed} expert {uid} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _section(run: RunFile) -> ExpertsSection:
    if run.experts is None:
        raise ConfigError("this run has no experts: its run file lacks the section experts")
    return run.experts


def _outline(run: RunFile, section: ExpertsSection) -> nn.Module:
    into, _ = sample_shapes(run)
    width = into[-1]
    hidden = section.hidden or 4 * width
    if section.block == "transformer" and (width % section.heads or width // section.heads % 2):
        raise ConfigError(f"experts.heads is {section.heads}; allowed: divisors of {width} with an even quotient")
    with torch.device("meta"):
        if section.block == "ffn":
            return FeedForward(width, hidden)
        if section.block == "ffn1":
            return ShallowFeedForward(width, hidden)
        return TransformerExpert(width, section.heads, hidden)


def _start(seed: int, uid: Uid, name: str, shape: torch.Size) -> Tensor:
    """Initial value: gains 1, biases 0, matrices uniform with a standard deviation of 1 / sqrt(fan-in)."""
    if name.endswith((".gain", "norm.weight")):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_of(seed, uid, name))
    return (torch.rand(shape, generator=generator) - 0.5) * math.sqrt(12.0 / shape[1])


def _own(run: RunFile, uid: Uid) -> nn.Module:
    block = _section(run).block
    function = find_function(block, "experts.block", "ffn, ffn1, transformer, or ", run.line)
    with torchs_random_numbers(seed_of(run.seed, uid)):
        module = guarded(lambda: function(run), f"experts.block {block} failed")
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise ConfigError(f"experts.block {block} must return a torch.nn.Module that has parameters")
    return module.float().eval()
