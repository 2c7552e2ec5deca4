"""Exchange of one batch with experts: groups rows by expert into frames, and sorts the answers by sample.

All samples that chose the same expert are sent in one call (in several if `experts.max_batch` is smaller), encoded as
the run file sets. Synchronous and independent of the network: the caller of this class makes the calls. An exchange is
used once, by one thread at a time, in this order: `forward_asks`, `outputs`, `backward_asks`, `input_gradients`.

A malicious expert may answer with other rows, another shape or dtype, or values that are not finite. Its answer is
treated as missing, and `wrong` reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode, encode
from peerd.codec.policy import CodingPlan
from peerd.codec.tensors import TORCH_DTYPES, all_finite
from peerd.core.errors import ProtocolViolation, TooFewExperts
from peerd.experts.model.expert_mixture import ChosenColumns, choice_of
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.grid import Uid, grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile


@dataclass(slots=True)
class _Call:
    """One call to an expert. `slots`: for each of its samples, the slot of this expert among the sample's experts."""

    ask: ExpertCall
    samples: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    reply: ExpertReply | None = None  # to the forward, if valid


class Exchange:
    """The calls to experts for one batch. `came` [N, K] marks the outputs that have arrived."""

    def __init__(self, run: RunFile, chosen: Sequence[Sequence[Uid]], device: torch.device | str = "cpu") -> None:
        """`chosen`: the experts of each sample, best first. `device`: of samples, outputs and gradients."""
        self.wrong: list[str] = []  # invalid answers, with their senders
        self.stale = 0  # maximum over all experts of others' updates between a forward and its backward
        self._section = run.experts or ExpertsSection()
        self._dtype = TORCH_DTYPES[self._section.dtype]
        self._device = torch.device(device)
        self._input, self._output = sample_shapes(run)
        self._chosen = [uids[: self._section.top_k] for uids in chosen]
        choice = choice_of(self._chosen, grid_of(run).sides, self._section.top_k)
        self.choice = ChosenColumns(choice.columns.to(device), choice.taken.to(device))
        self.came = torch.zeros_like(self.choice.taken)
        self._calls: list[_Call] = []

    @property
    def samples(self) -> int:
        return len(self._chosen)

    def forward_asks(self, x: Tensor) -> list[ExpertCall]:
        """Calls for the outputs of samples [N, *input]; raises ValueError if they are not finite."""
        rows = self._outgoing(x, "samples")
        for uid, places in self._grouped().items():
            for part in torch.split(torch.tensor(places), self._section.max_batch):
                samples, slots = part.unbind(1)
                frame = self._frame(rows[samples.to(self._device)], "samples")
                self._calls.append(_Call(ExpertCall(uid, tuple(samples.tolist()), (frame,)), samples, slots))
        return [call.ask for call in self._calls]

    def outputs(self, replies: Sequence[ExpertReply | None]) -> Tensor:
        """Outputs [N, K, *output], zeros where none arrived; raises TooFewExperts if a sample has fewer than k_min."""
        shape = (*self.came.shape, *self._output)
        outputs = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for call, reply in zip(self._calls, replies, strict=True):
            values = self._values(call, reply, self._output)
            if values is not None:
                at = call.samples.to(self._device), call.slots.to(self._device)
                call.reply, outputs[at], self.came[at] = reply, values, True
        self._need_enough()
        return outputs

    def backward_asks(self, gradients: Tensor) -> list[ExpertCall]:
        """Calls that send the gradients of the outputs [N, K, *output] to the experts that answered."""
        rows, asks = self._outgoing(gradients, "gradients"), []
        for call in self._answered():
            assert call.reply is not None
            frame = self._frame(rows[call.samples.to(self._device), call.slots.to(self._device)], "gradients")
            asks.append(ExpertCall(call.ask.uid, call.ask.samples, (*call.ask.frames, frame), call.reply.served))
        return asks

    def input_gradients(self, replies: Sequence[ExpertReply | None]) -> Tensor:
        """Gradients [N, *input] of the samples, in float32; an expert without an answer counts as a constant."""
        parts = torch.zeros((*self.came.shape, *self._input), device=self._device)
        for call, reply in zip(self._answered(), replies, strict=True):
            values = self._values(call, reply, self._input)
            if values is not None and reply is not None:
                parts[call.samples.to(self._device), call.slots.to(self._device)] = values.float()
                self.stale = max(self.stale, reply.stale)
        return parts.sum(1)  # in the order of the slots, independent of the order of the calls

    # --- inside -------------------------------------------------------------------------------------------------

    def _grouped(self) -> dict[Uid, list[tuple[int, int]]]:
        found: dict[Uid, list[tuple[int, int]]] = {}
        for sample, uids in enumerate(self._chosen):
            for slot, uid in enumerate(uids):
                found.setdefault(uid, []).append((sample, slot))
        return found

    def _answered(self) -> list[_Call]:
        return [call for call in self._calls if call.reply is not None]

    def _outgoing(self, values: Tensor, what: str) -> Tensor:
        values = values.detach().to(self._dtype)
        if not all_finite(values):
            raise ValueError(f"the {what} for experts have values that are not finite as {self._section.dtype}")
        return values

    def _frame(self, rows: Tensor, what: str) -> TensorFrame:
        return encode(rows.contiguous(), CodingPlan(self._section.code), name=f"{what} for an expert")

    def _values(self, call: _Call, reply: ExpertReply | None, sample: tuple[int, ...]) -> Tensor | None:
        """A reply's tensor, or None if the reply is missing or invalid."""
        if reply is None:
            return None
        name, shape = f"the answer of expert {call.ask.uid}", (len(call.samples), *sample)
        try:
            return decode(reply.frame, shape, self._dtype, name=name, finite=True, device=self._device)
        except ProtocolViolation as error:
            self.wrong.append(f"{error} (host {reply.served.host[-8:]})")
            return None

    def _need_enough(self) -> None:
        found = self.came.sum(1).tolist()
        least = min(found, default=self._section.k_min)
        if least < self._section.k_min:
            asked = ", ".join(map(str, self._chosen[found.index(least)])) or "none, since none is alive"
            wrong = f": {'; '.join(self.wrong[:3])}" if self.wrong else ""
            needs = f"sample {found.index(least)} has {least} answers and needs {self._section.k_min}"
            raise TooFewExperts(f"{needs}; experts asked: {asked}{wrong}")
