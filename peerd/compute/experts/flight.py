"""Flight of one microbatch through trunk and experts and back: what is computed between two calls, and what is kept.

Synchronous; each method is one job of the device's worker, and whoever flies it makes the calls in between:

    scores = depart(); while scores: ask(chosen) -> calls -> go_on(replies) -> scores
    asks = turn();     while asks:   calls -> go_back(replies) -> asks

Rows of all samples that chose one expert travel in one call, in as many as `experts.max_batch` makes necessary. Experts
get gradients of the microbatch's mean loss, as from a plain loop. Hostile input: replies of another shape or dtype,
and such with values that are not finite, count as not come, and are named (`wrong`). A sample with fewer answers than
`experts.k_min` is TooFewExperts, a microbatch whose parameters are gone Stale: then it has to begin again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peerd.compute.codec.frames import from_frame, to_frame
from peerd.compute.experts.trunk import Answers, Era, Junction, TrunkModule
from peerd.compute.tensors import TORCH_DTYPES, all_finite
from peerd.core.errors import ProtocolViolation, TooFewExperts
from peerd.core.experts.contract import ExpertAsk, ExpertReply
from peerd.core.experts.grid import Uid
from peerd.core.frame import TensorFrame

Scores = list[np.ndarray]


@dataclass(slots=True)
class _Call:
    """One call of a junction: `slots` tells, for each of its samples, which of the sample's experts this one is."""

    ask: ExpertAsk
    samples: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    reply: ExpertReply | None = None  # to the forward, if it counts


@dataclass(slots=True)
class _Stop:
    """A junction that the microbatch has come through."""

    junction: Junction
    calls: list[_Call] = field(default_factory=list)
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
        places = self._grouped(chosen)
        columns = torch.zeros(self.samples, trunk.section.top_k, len(trunk.sides), dtype=torch.int64)
        offsets = torch.tensor([sum(trunk.sides[:i]) for i in range(len(trunk.sides))])
        for uid, found in places.items():
            rows = torch.tensor(found)
            columns[rows[:, 0], rows[:, 1]] = offsets + torch.tensor(uid.at)
            for part in torch.split(rows, trunk.section.max_batch):
                samples, slots = part.unbind(1)
                ask = ExpertAsk(uid, tuple(samples.tolist()), (self._frame(stop.junction.samples[samples]),))
                stop.calls.append(_Call(ask, samples, slots))
        shape = (*columns.shape[:2], *trunk.sample_shape)
        outputs = torch.zeros(shape, dtype=trunk.dtype, device=trunk.device)
        came = torch.zeros(columns.shape[:2], dtype=torch.bool)
        stop.answers = Answers(outputs, columns.to(trunk.device), came.to(trunk.device))
        return [call.ask for call in stop.calls]

    def go_on(self, replies: Sequence[ExpertReply | None]) -> Scores | None:
        """The next segment, up to the next layer; None: that was the last, and the loss comes next."""
        stop = self._stops[-1]
        answers = self._take(stop, replies)
        if self.layer == self._trunk.layers - 1:
            return None
        return self._arrive_at(self._trunk.go_on(self.layer + 1, stop.junction, answers, self.era))

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
        for call, reply in zip(_answered(stop), replies, strict=True):
            gradient = self._values(call, reply)
            if gradient is not None:
                after.samples.index_add_(0, call.samples.to(gradient.device), gradient * self.tokens.shape[0])
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

    def _grouped(self, chosen: Sequence[Sequence[Uid]]) -> dict[Uid, list[tuple[int, int]]]:
        """Samples by expert, each with the expert's place among the sample's."""
        found: dict[Uid, list[tuple[int, int]]] = {}
        for sample, uids in enumerate(chosen):
            for slot, uid in enumerate(uids[: self._trunk.section.top_k]):
                found.setdefault(uid, []).append((sample, slot))
        return found

    def _frame(self, values: Tensor) -> TensorFrame:
        section = self._trunk.section
        if not all_finite(values):
            raise ValueError(f"what goes to layer {self.layer} of experts has values that are not finite")
        return to_frame(values.to(TORCH_DTYPES[section.dtype]), section.code)

    def _take(self, stop: _Stop, replies: Sequence[ExpertReply | None]) -> Answers:
        """Put the replies to a forward where they belong."""
        answers = stop.answers
        assert answers is not None
        for call, reply in zip(stop.calls, replies, strict=True):
            values = self._values(call, reply)
            if values is not None:
                call.reply = reply
                answers.outputs[call.samples, call.slots] = values
                answers.came[call.samples, call.slots] = True
        least = int(answers.came.sum(1).min())
        if least < self._trunk.section.k_min:
            wrong = f": {'; '.join(self.wrong[-3:])}" if self.wrong else ""
            raise TooFewExperts(f"a sample of layer {self.layer} has {least} answers that can be used{wrong}")
        return answers

    def _values(self, call: _Call, reply: ExpertReply | None) -> Tensor | None:
        """A reply's tensor, in the dtype of the run; None where there is none that can be used."""
        if reply is None:
            return None
        trunk, name = self._trunk, f"the reply of expert {call.ask.uid}"
        shape = (len(call.samples), *trunk.sample_shape)
        try:
            values = from_frame(reply.frame, shape, TORCH_DTYPES[trunk.section.dtype], name=name, finite=True)
        except ProtocolViolation as error:
            self.wrong.append(f"{error} (host {reply.served.host[-8:]})")
            return None
        return values.to(trunk.device, trunk.dtype)

    def _backward_asks(self, gradients: Tensor) -> list[ExpertAsk]:
        """Inputs and gradients for each expert whose answer counted."""
        asks = []
        for call in _answered(self._stops[-1]):
            assert call.reply is not None
            rows = gradients[call.samples, call.slots] / self.tokens.shape[0]
            frames = (*call.ask.frames, self._frame(rows))
            asks.append(ExpertAsk(call.ask.uid, call.ask.samples, frames, call.reply.served))
        return asks


def _answered(stop: _Stop) -> list[_Call]:
    return [call for call in stop.calls if call.reply is not None]
