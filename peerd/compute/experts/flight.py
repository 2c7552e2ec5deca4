"""Flight of one microbatch through trunk and experts and back: what is computed between two calls, and what is kept.

Synchronous; each method is one job of the device's worker, and whoever flies it makes the calls in between:

    scores = depart(); while scores: ask(chosen) -> calls -> go_on(replies) -> scores
    asks = turn();     while asks:   calls -> go_back(replies) -> asks

Experts get gradients of the microbatch's mean loss, as from a plain loop. Hostile input: replies that cannot be used
count as not come, and are named (`wrong`), by `exchange`. A sample with fewer answers than
`experts.k_min` is TooFewExperts, a microbatch whose parameters are gone Stale: then it has to begin again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peerd.compute.experts.era import Era
from peerd.compute.experts.exchange import Exchange
from peerd.compute.experts.trunk import Answers, Junction, TrunkModule
from peerd.core.experts.contract import ExpertAsk, ExpertReply
from peerd.core.experts.grid import Uid

Scores = list[np.ndarray]


@dataclass(slots=True)
class _Stop:
    """A junction that the microbatch has come through."""

    junction: Junction
    exchange: Exchange | None = None
    answers: Answers | None = None


class Flight:
    """See the module's header. `era` None: each segment with the parameters of when it is computed, for evaluation."""

    def __init__(self, trunk: TrunkModule, tokens: Tensor, targets: Tensor, era: Era | None) -> None:
        self._trunk, self._given = trunk, era
        self.tokens, self.targets = trunk.checked(tokens, targets)
        self.loss_sum = 0.0
        self.gradients: dict[int, Tensor] = {}  # of parameters, by number; all of them in the end
        self.wrong: list[str] = []  # replies that did not count, with whoever sent them
        self._stops: list[_Stop] = []
        self._after: Junction | None = None  # gradients at the junction whose backward calls are under way

    @property
    def era(self) -> Era:
        """The parameters that it is computed with."""
        return self._given or self._trunk.era

    @property
    def layer(self) -> int:
        """The layer of experts that it has come to."""
        return len(self._stops) - 1

    @property
    def samples(self) -> int:
        """Samples of each layer of experts."""
        return self._stops[-1].junction.scores.shape[0]

    # --- there --------------------------------------------------------------------------------------------------

    def depart(self) -> Scores:
        """The first segment; the scores of the first layer, as `ExpertNetwork.choose` takes them."""
        return self._arrive_at(self._trunk.depart(self.tokens, self.era))

    def ask(self, chosen: Sequence[Sequence[Uid]]) -> list[ExpertAsk]:
        """The calls for experts of each sample."""
        stop, trunk = self._stops[-1], self._trunk
        stop.exchange = Exchange(trunk.run, chosen, trunk.device)
        return stop.exchange.forward_asks(stop.junction.samples)

    def go_on(self, replies: Sequence[ExpertReply | None]) -> Scores | None:
        """The next segment, up to the next layer; None: that was the last, and the loss comes next."""
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
        """The loss, summed over the samples of text; the flight ends here."""
        stop = self._stops[-1]
        assert stop.answers is not None
        return self._trunk.final_loss(stop.junction, stop.answers, self.targets, self.era)

    # --- and back -----------------------------------------------------------------------------------------------

    def turn(self) -> list[ExpertAsk]:
        """The loss and the last segment's gradients; the backward calls of the last layer."""
        stop = self._stops[-1]
        assert stop.answers is not None
        found, self._after, back, self.loss_sum = self._trunk.turn(stop.junction, stop.answers, self.targets, self.era)
        self.gradients |= found
        return self._backward_asks(back)

    def go_back(self, replies: Sequence[ExpertReply | None]) -> list[ExpertAsk] | None:
        """The segment before; the backward calls of the layer where it begins, None at the start of all."""
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

    def _backward_asks(self, gradients: Tensor) -> list[ExpertAsk]:
        """Inputs and gradients for each expert whose answer counted."""
        exchange = self._stops[-1].exchange
        assert exchange is not None
        return exchange.backward_asks(gradients / self.tokens.shape[0])
