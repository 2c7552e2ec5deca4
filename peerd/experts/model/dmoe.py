"""DMoE: a torch module whose experts run on other peers (Learning@home, section 3.1).

    layer = DMoE(run, layer=0, caller=caller)
    y = x + layer(x)
    loss = task_loss(y) + layer.balance_loss

The module's only parameters are those of the product-key gate: an expert's score is the sum of the scores of its
coordinates, and a beam search finds the best experts alive (`experts/rules/product_key_beam`). The module is
independent of the network: `caller` makes its calls, and blocks the thread until they end. Any number of threads may
run a forward at the same time. Experts update their weights during `backward`, in the order in which calls arrive.
Gradients flow to the input and the gate through the answers that arrived; an expert whose backward failed counts as a
constant.

A sample has the shape `experts.input`; the batch may have any number of axes before that. The gate sees the mean over a
sample's own axes except the last.

Shapes: N samples, K experts for each, G places in all dimensions of the grid together, D width.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from peerd.core.errors import ConfigError
from peerd.experts.model.blocks import seed_of
from peerd.experts.model.exchange import Exchange
from peerd.experts.model.expert_mixture import imbalance, mixed
from peerd.run.expert_network import ExpertCaller
from peerd.run.grid import Uid, grid_of, sample_shapes
from peerd.run.runfile import RunFile

_log = logging.getLogger(__name__)
_of_thread = threading.local()  # each layer's last balancing loss by thread, since threads run separate forwards


class DMoE(nn.Module):
    """Layer `layer` of a run's experts."""

    def __init__(self, run: RunFile, layer: int, caller: ExpertCaller) -> None:
        """The gate's initial weights depend on (run.seed, layer) alone; ConfigError if there is no such layer."""
        super().__init__()
        if run.experts is None:
            raise ConfigError("this run has no experts: its run file lacks the section experts")
        self.grid = grid_of(run)
        if not 0 <= layer < self.grid.layers:
            raise ConfigError(f"layer {layer} of experts: allowed: 0 to {self.grid.layers - 1}")
        self.layer = layer
        self._run, self._caller = run, caller
        self._input, self._output = sample_shapes(run)
        self.gate = nn.Linear(self._input[-1], sum(self.grid.sides), bias=False)
        generator = torch.Generator().manual_seed(seed_of(run.seed, Uid(layer, ()), "gate"))
        with torch.no_grad():
            start = torch.rand(self.gate.weight.shape, generator=generator) - 0.5
            self.gate.weight.copy_(start * math.sqrt(12.0 / self._input[-1]))

    @property
    def balance_loss(self) -> Tensor:
        """Load-balancing loss of the last forward in this thread, times `experts.balance`; add it to the loss."""
        losses: weakref.WeakKeyDictionary[DMoE, Tensor] = getattr(_of_thread, "losses", weakref.WeakKeyDictionary())
        found = losses.get(self)
        return found if found is not None else self.gate.weight.new_zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """The experts' weighted mean [..., *output] for samples [..., *input]; TooFewExperts if too few answer."""
        axes = len(self._input)
        if x.ndim <= axes or tuple(x.shape[-axes:]) != self._input:
            raise ValueError(
                f"layer {self.layer} of experts takes [..., {str(list(self._input))[1:]}, not {list(x.shape)}"
            )
        samples = x.reshape(-1, *self._input)
        scores_NG = self.scores(samples)
        chosen = self.choose(scores_NG)
        exchange = Exchange(self._run, chosen, x.device)
        replies = self._caller.forward(exchange.forward_asks(samples), exchange.samples)
        try:
            outputs = exchange.outputs(replies)
        finally:
            self._log_wrong(exchange)
        outputs = _Answers.apply(self, exchange, outputs, samples, _anchor(x))  # type: ignore[no-untyped-call]
        y = mixed(scores_NG, exchange.choice.columns, exchange.came, outputs.to(scores_NG.dtype))
        self._keep_balance(scores_NG)
        return y.to(x.dtype).view(*x.shape[:-axes], *self._output)

    def scores(self, samples: Tensor) -> Tensor:
        """Scores [N, G] of the grid's places, for samples [N, *input]; in float32 or wider."""
        pooled_ND = samples.flatten(1, -2).mean(1) if samples.ndim > 2 else samples
        scores_NG: Tensor = self.gate(pooled_ND.to(self.gate.weight.dtype))
        return scores_NG if scores_NG.dtype.itemsize > 2 else scores_NG.float()

    def choose(self, scores_NG: Tensor) -> list[list[Uid]]:
        """The best live experts of each sample."""
        parts = torch.split(scores_NG.detach().float().cpu(), list(self.grid.sides), 1)
        top_k = self._run.experts.top_k if self._run.experts is not None else 1
        return self._caller.choose(self.layer, [part.contiguous().numpy() for part in parts], top_k)

    def give_back(self, exchange: Exchange, gradients: Tensor) -> Tensor:
        """Send the outputs' gradients to the experts; returns the gradients of the samples."""
        replies = self._caller.backward(exchange.backward_asks(gradients))
        logged = len(exchange.wrong)
        found = exchange.input_gradients(replies)
        self._log_wrong(exchange, logged)
        return found

    def extra_repr(self) -> str:
        return f"layer={self.layer}, grid={list(self.grid.sides)}"

    def _keep_balance(self, scores_NG: Tensor) -> None:
        weight = self._run.experts.balance if self._run.experts is not None else 0.0
        if not hasattr(_of_thread, "losses"):
            _of_thread.losses = weakref.WeakKeyDictionary()
        loss = weight * imbalance(scores_NG, self.grid.sides) if weight else scores_NG.new_zeros(())
        _of_thread.losses[self] = loss

    def _log_wrong(self, exchange: Exchange, since: int = 0) -> None:
        for wrong in exchange.wrong[since:]:
            _log.warning("layer %d: ignored an expert's answer: %s", self.layer, wrong)


class _Answers(torch.autograd.Function):
    """The experts' outputs as a function of the samples sent to them."""

    @staticmethod
    def forward(ctx: Any, layer: DMoE, exchange: Exchange, outputs: Tensor, samples: Tensor, anchor: Tensor) -> Tensor:
        ctx.layer, ctx.exchange, ctx.dtype = layer, exchange, samples.dtype
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = ctx.layer.give_back(ctx.exchange, gradients[0])
        return None, None, None, found.to(ctx.dtype), None


def _anchor(x: Tensor) -> Tensor:
    """An empty tensor that requires gradients, so that backward reaches the experts even if the samples need none."""
    return torch.empty(0, device=x.device, requires_grad=True)
