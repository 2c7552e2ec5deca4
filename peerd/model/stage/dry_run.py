"""Dry run of a user's own model before joining: reports the first faulty layer in one sentence.

Two samples of the run's context pass through all layers of all stages in order, and a gradient back through each layer.
Every peer runs all layers, whichever stage it will serve, so all peers report the same. The gpt model is not tried,
since it is known to work. Each layer is freed after its turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peerd.codec.tensors import dtype_name
from peerd.core.errors import ConfigError
from peerd.data.tokenizer import load_vocabulary
from peerd.model.stage.partition import DTYPES, own_layers, own_parts
from peerd.run.contents import is_function, source_of
from peerd.run.local_code import guarded
from peerd.run.runfile import RunFile
from peerd.run.user_code import torchs_random_numbers


@dataclass(frozen=True, slots=True)
class _Shape:
    """Expected sizes of a tensor, and the names of its dimensions for messages."""

    sizes: tuple[int, ...]
    names: str


def try_layers(run: RunFile) -> None:
    """Raise ConfigError for the first of the user's layers that cannot be trained, with its input and output."""
    if run.model.kind == "gpt":
        return
    layers = own_layers(run)
    _need_own_parameters(run, layers)
    vocab, width = load_vocabulary(run.model.vocab).size, run.model.d_model
    samples = 2 if run.model.context != 2 else 3  # different sizes, so that swapped dimensions are noticed
    tokens = torch.arange(vocab - 1, vocab - 1 - samples * run.model.context, -1) % vocab  # highest token first
    x = tokens.view(samples, run.model.context)
    between = _Shape((*x.shape, width), "samples, model.context, model.d_model")
    last = _Shape((*x.shape, vocab), "samples, model.context, tokens of the vocabulary")
    with torchs_random_numbers():
        for index in range(len(layers)):
            layer, layers[index] = layers[index], nn.Identity()
            expected = last if index == len(layers) - 1 else between
            x = _try(_name(run, index, layer), layer, x, expected, DTYPES[run.model.dtype])


def try_layers_if_here(run: RunFile) -> None:
    """Like `try_layers`, for a peer that computes no layers: does nothing if it lacks the file with the layers."""
    if is_function(run.model.kind) and source_of(run.model.kind) is not None:
        try_layers(run)


def _try(name: str, layer: nn.Module, x: Tensor, expected: _Shape, dtype: torch.dtype) -> Tensor:
    """Run one layer forward and backward; returns its output, detached."""
    got = f"{name} got {_form(x)}"
    given = x.detach().clone().requires_grad_(x.is_floating_point())
    y = guarded(lambda: layer(given), f"{got} and failed")
    if not isinstance(y, Tensor):
        raise ConfigError(f"{got} and returned {type(y).__name__}; expected a tensor")
    if tuple(y.shape) != expected.sizes or y.dtype != dtype:
        wanted = f"{list(expected.sizes)} {dtype_name(dtype)} ({expected.names})"
        raise ConfigError(f"{got} and returned {_form(y)}; expected {wanted}")
    if not torch.isfinite(y).all():
        raise ConfigError(f"{got} and returned values that are not finite")
    if not torch.equal(x, given.detach()):
        raise ConfigError(f"{got} and changed it; a layer must not modify its input")
    again = guarded(lambda: layer(x.detach().clone()), f"{got} a second time and failed")
    if not torch.equal(again, y):
        raise ConfigError(f"{got} twice and returned different values; its output must depend on the input alone")
    inputs = [given] if given.requires_grad else []
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not inputs and not parameters:
        return y  # such as a one-hot code of the tokens
    if not y.requires_grad:
        raise ConfigError(f"{got}, and no gradient flows back through it")
    found = guarded(
        lambda: torch.autograd.grad(y.sum(), [*inputs, *parameters], allow_unused=True), f"{got}; its backward failed"
    )
    if inputs and found[0] is None:
        raise ConfigError(f"{got}, and no gradient flows back to its input")
    if not all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in found):
        raise ConfigError(f"{got}, and its gradient is not finite")
    return y.detach()


def _need_own_parameters(run: RunFile, layers: list[nn.Module]) -> None:
    """Raise ConfigError unless each parameter is trainable and belongs to one stage only."""
    stages = {index: stage for stage, part in enumerate(own_parts(run, len(layers))) for index in part}
    holder: dict[int, int] = {}
    for index, layer in enumerate(layers):
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        for own, parameter in parameters.items():
            if not parameter.requires_grad:
                raise ConfigError(f"{_name(run, index, layer)}: {own} cannot be trained (requires_grad is False)")
            first = holder.setdefault(id(parameter), index)
            if stages[first] != stages[index]:
                other = _name(run, first, layers[first])
                raise ConfigError(f"{_name(run, index, layer)} shares {own} with {other} of another stage")


def _name(run: RunFile, index: int, layer: nn.Module) -> str:
    return f"model.kind {run.model.kind}: layer {index} ({type(layer).__name__})"


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
