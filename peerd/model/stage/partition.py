"""The model of a run as a list of layers, its division into stages, and its initial parameters.

A model is a list of embedding, blocks and head; each stage is a slice of that list. A parameter is named by its place
in the whole model (`block3.feed.up.weight`), so the names of all stages together are those of the whole model. Its
initial value is a pure function of (run.seed, name): the bits are the same for any division and on any machine. Values
are drawn from integers with one multiplication, without logarithms, whose results differ between machines.

In a run with experts, the last blocks have a gate instead of a feed-forward of their own (`experts/model/trunk`).

A user's own model, `model.kind: module:function`, is a list of layers returned by a function in a local Python file (or
an installed module). configs/README.md documents its contract; `dry_run.py` tries it. Layers may have buffers. They run
in eval mode, except torch's batch norms, which train with the statistics of a microbatch (see `stage_module`). The list
is cut into stages of equal length. Initial values are those that the function creates under a fixed seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peerd.core.errors import ConfigError
from peerd.data.tokenizer import load_vocabulary
from peerd.model.layers import Block, Embedding, ExpertBlock, Head
from peerd.model.shapes.model_shapes import even_parts, first_with_experts, stage_spans
from peerd.run.grid import grid_of
from peerd.run.local_code import guarded
from peerd.run.runfile import RunFile
from peerd.run.user_code import find_function, torchs_random_numbers

DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}
EMBEDDING_STD: Final = 0.5  # measured on configs/tiny.yaml: with 0.02 the loss falls later, 1.0 is no better
HEAD_STD: Final = 0.02  # small, so that the first loss is log(V) and no initial bias has to be unlearnt


class ModelPiece(nn.Module):
    """Consecutive layers of the model, applied in order; a shared layer is applied several times.

    `recomputes`: training keeps only the inputs of all layers but the last, and computes each layer again in the
    backward, with the same random numbers: the same bits, in more time and less memory. `offload`, if set, computes the
    output instead, with parameters kept in host memory.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module, int]]) -> None:
        """`layers`: name in the whole model, module, number of times that it is applied."""
        super().__init__()
        self.recomputes = False
        self.offload: Callable[[Tensor], Tensor] | None = None
        self.steps = tuple((name, times) for name, _, times in layers)
        for name, module, _ in layers:
            self.add_module(name, module)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers in the order in which they are applied; a shared layer appears several times."""
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
        return layers[-1](x) if layers else x  # not recomputed: its backward follows at once


def whole_model(run: RunFile) -> ModelPiece:
    """All stages as one module with initial parameters, from int64 [B, L] to [B, L, V]."""
    return build(run, range(run.pipeline.stages))


def build(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """Consecutive stages as one module on the CPU, in the run's dtype, with initial parameters."""
    if not all(0 <= stage < run.pipeline.stages for stage in stages):
        raise ConfigError(f"stage {max(stages)} does not exist: the run has stages 0 to {run.pipeline.stages - 1}")
    piece = _own(run, stages) if run.model.kind != "gpt" else _gpt(run, stages)
    return piece.eval()


def spans(run: RunFile) -> list[range]:
    """The blocks of each stage of a gpt."""
    return stage_spans(run, load_vocabulary(run.model.vocab).size)


def outline(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """Like `build`, on the meta device: shapes without values or memory."""
    if run.model.kind == "gpt":
        return _gpt_outline(run, stages)
    with torch.device("meta"):
        return build(run, stages)


def _gpt_outline(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    m, vocab = run.model, load_vocabulary(run.model.vocab).size
    layers: list[tuple[str, nn.Module, int]] = []
    with torch.device("meta"):  # allocates no memory and draws no random numbers
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
    """Initial value of a parameter in fp32: gains are 1, matrices uniform with a standard deviation by their role."""
    if name.endswith(".gain"):
        return torch.ones(shape)
    if name == "embed.table":
        std = EMBEDDING_STD
    elif name == "head.out.weight":
        std = HEAD_STD
    else:
        std = 1.0 / math.sqrt(shape[1])
    if name.endswith((".attention.out.weight", ".feed.down.weight")):
        std /= math.sqrt(2 * run.model.layers)  # 2 * layers of these outputs are added to the residual (GPT-2)
    digest = hashlib.sha256(f"peerd start {run.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return (torch.rand(shape, generator=generator) - 0.5) * (std * math.sqrt(12.0))


def own_layers(run: RunFile) -> list[nn.Module]:
    """The layers that the user's function returns, in the run's dtype; see the module header."""
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
    """Indices of the layers of each stage, for `count` layers in all."""
    return even_parts(count, run.pipeline.stages)


def _own(run: RunFile, stages: Sequence[int]) -> ModelPiece:
    """The user's layers of the given stages."""
    modules = own_layers(run)
    parts = own_parts(run, len(modules))
    layers = [(f"layer{index}", modules[index], 1) for stage in stages for index in parts[stage]]
    return ModelPiece(layers)
