"""Experts in the test's own process behind `ExpertNetwork`: exact choice, gradients by torch, failures on demand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import trio
from torch import Tensor, nn

from peerd.codec.frames import from_frame, to_frame
from peerd.core.errors import TooFewExperts
from peerd.run.expert_network import ExpertCall, ExpertReply, ServedBy
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile

HOST = "12D3KooWexperthost"


def feed_forward(width: int, number: int) -> nn.Sequential:
    """An expert with weights by its number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + number)
        return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class NearExperts:
    """See the module's header. `lr` 0: they learn nothing. `spoil`: what becomes of a reply, None: it never comes."""

    def __init__(self, run: RunFile, lr: float = 0.0, delay_s: float = 0.0) -> None:
        self._section = run.experts or ExpertsSection()
        self._grid, self._lr, self._delay_s = grid_of(run), lr, delay_s
        uids = [self._grid.uid(n) for n in range(self._grid.layers * self._grid.places)]
        self.experts = {uid: feed_forward(run.model.d_model, self._grid.number(uid)) for uid in uids}
        self.dead: set[Uid] = set()
        self.spoil: Callable[[str, ExpertCall, ExpertReply], ExpertReply | None] = lambda verb, ask, reply: reply
        self.calls: Counter[str] = Counter()
        self.updates: Counter[Uid] = Counter()
        self.waiting, self.most_waiting = 0, 0  # forwards under way

    def status(self) -> dict[str, object]:
        return {"calls": self.calls.total()}

    def chosen(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        places = list(itertools.product(*map(range, self._grid.sides)))
        live = [place for place in places if Uid(layer, place) not in self.dead]
        found = []
        for sample in range(len(scores[0])):
            total = {at: sum(float(part[sample, c]) for part, c in zip(scores, at, strict=True)) for at in live}
            found.append([Uid(layer, at) for at in sorted(live, key=lambda at: -total[at])[:k]])
        return found

    async def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        await trio.sleep(self._delay_s)
        return self.chosen(layer, scores, k)

    async def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        self.waiting += 1
        self.most_waiting = max(self.waiting, self.most_waiting)
        await trio.sleep(self._delay_s)
        self.waiting -= 1
        replies = [self._reply("forward", ask) for ask in asks]
        came = Counter(i for ask, reply in zip(asks, replies, strict=True) if reply is not None for i in ask.samples)
        if any(came[sample] < self._section.k_min for sample in range(samples)):
            raise TooFewExperts(f"a sample has too few answers of {sorted({str(ask.uid) for ask in asks})}")
        return replies

    async def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        await trio.sleep(self._delay_s)
        return [self._reply("backward", ask) for ask in asks]

    def _reply(self, verb: str, ask: ExpertCall) -> ExpertReply | None:
        self.calls[verb] += 1
        x = from_frame(ask.frames[0]).clone()
        assert x.shape[0] == len(ask.samples) <= self._section.max_batch
        if verb == "forward":
            with torch.no_grad():
                answer: Tensor = self.experts[ask.uid](x)
        else:
            assert ask.served is not None
            answer = self._update(ask.uid, x, from_frame(ask.frames[1]))
        served = ServedBy(HOST, 1, self.updates[ask.uid])
        stale = self.updates[ask.uid] - 1 - ask.served.version if ask.served is not None else 0
        return self.spoil(verb, ask, ExpertReply(to_frame(answer), served, stale))

    def _update(self, uid: Uid, x: Tensor, gradient: Tensor) -> Tensor:
        expert, x = self.experts[uid], x.requires_grad_()
        parameters: list[Any] = list(expert.parameters())
        own, *found = torch.autograd.grad(expert(x), [x, *parameters], gradient)
        with torch.no_grad():
            for parameter, one in zip(parameters, found, strict=True):
                parameter -= self._lr * one
        self.updates[uid] += 1
        return own
