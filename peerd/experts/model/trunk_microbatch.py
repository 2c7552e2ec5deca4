"""Flight of one microbatch through trunk and experts and back: the computations between calls, and their state.

Synchronous; each method is one job of the device's worker, and its caller makes the calls in between:

    scores = depart(); while scores: ask(chosen) -> calls -> go_on(replies) -> scores
    asks = turn();     while asks:   calls -> go_back(replies) -> asks

Experts receive gradients of the microbatch's mean loss, as in a plain loop. Malicious input: `exchange` treats invalid
replies as missing, and reports them (`wrong`). A sample with fewer answers than `experts.k_min` raises TooFewExperts. A
microbatch whose parameters are gone raises Stale and must start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peerd.experts.model.earlier_parameters import Era
from peerd.experts.model.exchange import Exchange
from peerd.experts.model.trunk import Answers, Junction, TrunkModule
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.grid import Uid

Scores = list[np.ndarray]


@dataclass(slots=True)
class _Stop:
    """A junction that the microbatch has reached."""

    junction: Junction
    exchange: Exchange | None = None
    answers: Answers | None = None


class TrunkMicrobatch:
    """A microbatch in progress. With `era` None, for evaluation, each segment uses the then current parameters."""

    def __init__(self, trunk: TrunkModule, tokens: Tensor, targets: Tensor, era: Era | None) -> None:
        self._trunk, self._given = trunk, era
        self.tokens, self.targets = trunk.checked(tokens, targets)
        self.loss_sum = 0.0
        self.gradients: dict[int, Tensor] = {}  # of parameters, by number; complete at the end
        self.wrong: list[str] = []  # invalid replies, with their senders
        self._stops: list[_Stop] = []
        self._after: Junction | None = None  # gradients at the junction whose backward calls are in progress

    @property
    def era(self) -> Era:
        """The parameters with which the microbatch is computed."""
        return self._given or self._trunk.era

    @property
    def layer(self) -> int:
        """Number of the layer of experts that the microbatch has reached."""
        return len(self._stops) - 1

    @property
    def samples(self) -> int:
        """Number of samples for each layer of experts."""
        return self._stops[-1].junction.scores.shape[0]

    # --- forward ------------------------------------------------------------------------------------------------

    def depart(self) -> Scores:
        """Forward of the first segment; returns the scores of the first layer for `ExpertNetwork.choose`."""
        return self._arrive_at(self._trunk.depart(self.tokens, self.era))

    def ask(self, chosen: Sequence[Sequence[Uid]]) -> list[ExpertCall]:
        """The calls to the chosen experts of each sample."""
        stop, trunk = self._stops[-1], self._trunk
        stop.exchange = Exchange(trunk.run, chosen, trunk.device)
        return stop.exchange.forward_asks(stop.junction.samples)

    def go_on(self, replies: Sequence[ExpertReply | None]) -> Scores | None:
        """Forward of the next segment; returns the scores of the next layer, or None if only the loss is left."""
        stop, trunk = self._stops[-1], self._trunk
        exchange = stop.exchange
        assert exchange is not None
        try:
            outputs = exchange.outputs(replies)
        finally:
            self.wrong += exchange.wrong
            exchange.wrong.clear()
        answers = stop.answers = Answers(outputs.to(trunk.dtype), exchange.choice.columns, exchange.came)
        if self.layer == trunk.layers - 1:
            return None
        return self._arrive_at(trunk.go_on(self.layer + 1, stop.junction, answers, self.era))

    def loss(self) -> float:
        """The loss, summed over the samples of text; ends an evaluation."""
        stop = self._stops[-1]
        assert stop.answers is not None
        return self._trunk.final_loss(stop.junction, stop.answers, self.targets, self.era)

    # --- backward -----------------------------------------------------------------------------------------------

    def turn(self) -> list[ExpertCall]:
        """Compute the loss and the last segment's gradients; returns the backward calls of the last layer."""
        stop = self._stops[-1]
        assert stop.answers is not None
        found, self._after, back, self.loss_sum = self._trunk.turn(stop.junction, stop.answers, self.targets, self.era)
        self.gradients |= found
        return self._backward_asks(back)

    def go_back(self, replies: Sequence[ExpertReply | None]) -> list[ExpertCall] | None:
        """Backward of the previous segment; returns the backward calls of the layer where it begins, or None at the
        start.
        """
        stop, after = self._stops.pop(), self._after
        assert after is not None
        assert stop.exchange is not None
        gradients = stop.exchange.input_gradients(replies).to(after.samples.dtype)
        self.wrong += stop.exchange.wrong
        after = Junction(after.residual, gradients * self.tokens.shape[0], after.scores)
        if not self._stops:
            self.gradients |= self._trunk.arrive(self.tokens, after, self.era)
            return None
        before = self._stops[-1]
        assert before.answers is not None
        found, self._after, back = self._trunk.go_back(
            len(self._stops), before.junction, before.answers, after, self.era
        )
        self.gradients |= found
        return self._backward_asks(back)

    # --- inside -------------------------------------------------------------------------------------------------

    def _arrive_at(self, junction: Junction) -> Scores:
        self._stops.append(_Stop(junction))
        return [part.float().cpu().numpy() for part in torch.split(junction.scores, list(self._trunk.sides), 1)]

    def _backward_asks(self, gradients: Tensor) -> list[ExpertCall]:
        """Inputs and gradients for each expert whose answer was used."""
        exchange = self._stops[-1].exchange
        assert exchange is not None
        return exchange.backward_asks(gradients / self.tokens.shape[0])
