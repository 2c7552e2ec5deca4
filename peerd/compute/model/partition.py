"""The model of a run as a list of layers, its cut into stages, and its starting parameters.

A model is embedding, blocks, head; stage s is a slice of that list. Every parameter is named by its place in the
whole model (`block3.feed.up.weight`), so the names of all stages together are the names of the whole, and its
starting value is a pure function of (run.seed, name): whatever the cut, whoever computes it, the bits are the same.
Values are drawn from whole numbers and one multiplication, without logarithms, so that machines agree too.

In a run with experts, its last blocks have no feed-forward of their own but a gate (`compute/experts/trunk`).

A model of one's own, `model.kind: module:function`, is a list of layers that a function in a local Python file (or an
installed module) returns; the contract stands in configs/README.md, `dry_run.py` tries it. Layers may have buffers, and
run in eval mode, but for torch's batch norms, which train by the statistics of a microbatch (see `stage_module`). The
list is cut into stages of equal length. Starting values are what the function makes, under a seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peerd.compute.model.layers import Block, Embedding, ExpertBlock, Head
from peerd.compute.tokenizer import load_vocabulary
from peerd.compute.user_code import find_function, torchs_random_numbers
from peerd.core.errors import ConfigError
from peerd.core.experts.grid import grid_of
from peerd.core.model.model_shapes import even_parts, first_with_experts, stage_spans
from peerd.core.run.runfile import RunFile
from peerd.local_code import guarded

DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}
EMBEDDING_STD: Final = 0.5  # measured on configs/tiny.yaml: 0.02 learns later, 1.0 no better
HEAD_STD: Final = 0.02  # small, so that the first loss is log(V) and no better-than-random guess must be unlearnt


class ModelPiece(nn.Module):
    """Consecutive layers of the model, applied in order; a shared layer is applied several times.

    `recomputes`: of a forward for a backward only the inputs of all layers but the last are kept, and each layer is
    computed again in the backward, with the same random numbers: the same bits, in more time and less memory.
    `offload` computes the output instead, where the parameters are in the machine's memory.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module, int]]) -> None:
        """`layers`: name in the whole model, module, how many times it is applied."""
        super().__init__()
        self.recomputes = False
        self.offload: Callable[[Tensor], Tensor] | None = None
        self.steps = tuple((name, times) for name, _, times in layers)
        for name, module, _ in layers:
            self.add_module(name, module)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers as they are applied, one after the other."""
        return [self.get_submodule(name) for name, times in self.steps for _ in range(times)]

    def forward(self, x: Tensor) -> Tensor:
        if self.offload is not None:
            return self.offload(x)
        layers = self.layers
        for layer in layers[:-1]:
            if self.recomputes and torch.is_grad_enabled() and x.is_floating_point():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return layers[-1](x) if layers else x  # its backward comes at once


def whole_model(run: RunFile) -> ModelPiece:
    """The composition of all stages as one module, with their starting parameters: int64 [B, L] to [B, L, V]."""
    return build(run, range(run.pipeline.stages))


def build(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """The given consecutive stages as one module on the CPU, in the dtype of the run, ready to compute."""
    if not all(0 <= stage < run.pipeline.stages for stage in stages):
        raise ConfigError(f"stage {max(stages)} does not exist: the run has stages 0 to {run.pipeline.stages - 1}")
    piece = _own(run, stages) if run.model.kind != "gpt" else _gpt(run, stages)
    return piece.eval()


def spans(run: RunFile) -> list[range]:
    """Blocks of each stage of a gpt."""
    return stage_spans(run, load_vocabulary(run.model.vocab).size)


def outline(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """As `build`, with shapes in place of values: it takes no memory."""
    if run.model.kind == "gpt":
        return _gpt_outline(run, stages)
    with torch.device("meta"):
        return build(run, stages)


def _gpt_outline(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    m, vocab = run.model, load_vocabulary(run.model.vocab).size
    layers: list[tuple[str, nn.Module, int]] = []
    with torch.device("meta"):  # no memory and no random numbers until the values below
        for stage in stages:
            if stage == 0:
                layers.append(("embed", Embedding(vocab, m.d_model), 1))
            blocks = spans(run)[stage]
            if m.share_layers:
                layers.append((f"block{blocks.start}", Block(m.d_model, m.heads), len(blocks)))
            else:
                layers += [(f"block{index}", _block(run, index), 1) for index in blocks]
            if stage == run.pipeline.stages - 1:
                layers.append(("head", Head(m.d_model, vocab), 1))
    return ModelPiece(layers).to(DTYPES[m.dtype])


def _block(run: RunFile, index: int) -> nn.Module:
    if index < first_with_experts(run):
        return Block(run.model.d_model, run.model.heads)
    return ExpertBlock(run.model.d_model, run.model.heads, sum(grid_of(run).sides))


def _gpt(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    piece = _gpt_outline(run, stages).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in piece.named_parameters():
            parameter.copy_(_start(name, parameter.shape, run))
    return piece


def _start(name: str, shape: torch.Size, run: RunFile) -> Tensor:
    """Starting value of a parameter, fp32: gains 1, matrices uniform with a standard deviation that suits them."""
    if name.endswith(".gain"):
        return torch.ones(shape)
    if name == "embed.table":
        std = EMBEDDING_STD
    elif name == "head.out.weight":
        std = HEAD_STD
    else:
        std = 1.0 / math.sqrt(shape[1])
    if name.endswith((".attention.out.weight", ".feed.down.weight")):
        std /= math.sqrt(2 * run.model.layers)  # each of 2 * layers sums adds to the residual (GPT-2)
    digest = hashlib.sha256(f"peerd start {run.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return (torch.rand(shape, generator=generator) - 0.5) * (std * math.sqrt(12.0))


def own_layers(run: RunFile) -> list[nn.Module]:
    """The layers that the user's function returns, in the dtype of the run; see the file's header."""
    kind = run.model.kind
    function = find_function(kind, "model.kind", "gpt, or ", run.line)
    with torchs_random_numbers(run.seed):
        modules = guarded(lambda: function(run), f"model.kind {kind} failed")
    if not isinstance(modules, list) or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(f"model.kind {kind} must return a list of torch.nn.Module, one per layer")
    if len(modules) < run.pipeline.stages:
        raise ConfigError(f"model.kind {kind} returns {len(modules)} layers for {run.pipeline.stages} stages")
    return [module.to(DTYPES[run.model.dtype]).eval() for module in modules]


def own_parts(run: RunFile, count: int) -> list[range]:
    """The layers of each stage, of `count`."""
    return even_parts(count, run.pipeline.stages)


def _own(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """The user's layers of some stages."""
    modules = own_layers(run)
    parts = own_parts(run, len(modules))
    layers = [(f"layer{index}", modules[index], 1) for stage in stages for index in parts[stage]]
    return ModelPiece(layers)
