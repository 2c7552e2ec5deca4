"""Experts in this process: the reference for measuring a network of experts.

Every expert of the grid is in this process, created at its first call. Each call is one job: an expert makes one update
per call, like a host that merges no calls. `choose` is exact, while a beam search over a network with dead experts may
not be. Any number of threads may call at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from peerd.core.errors import TooFewExperts
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.run.expert_network import ExpertCall, ExpertReply, ServedBy
from peerd.run.grid import Uid, grid_of
from peerd.run.runfile import ExpertsSection, RunFile

HOST = "local"

Answers = Callable[[ExpertCall], bool]  # False: this call fails


def _always(_: ExpertCall) -> bool:
    return True


class LocalExperts:
    """Implements `ExpertCaller`. `experts` are those called so far."""

    def __init__(self, run: RunFile, device: str = "cpu", answers: Answers = _always) -> None:
        """`answers` decides for each call whether it succeeds."""
        self.experts: dict[Uid, HostedExpert] = {}
        self.dead: set[Uid] = set()  # experts that are never chosen
        self.stale: list[int] = []  # per backward: number of updates since its forward
        self._run, self._device, self._answers = run, device, answers
        self._section = run.experts or ExpertsSection()
        self._grid = grid_of(run)
        self._lock = threading.Lock()

    def expert(self, uid: Uid) -> HostedExpert:
        """An expert of the grid, created if needed; raises ValueError if the grid has none with this uid."""
        if uid not in self.experts:
            if not self._grid.is_expert(uid):
                raise ValueError(f"{uid} is no expert of a grid of {list(self._grid.sides)}")
            self.experts[uid] = HostedExpert(self._run, uid, self._device)
        return self.experts[uid]

    def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        whole = np.zeros((len(scores[0]), 1), np.float32)
        for part in scores:  # sums over the grid's dimensions, in the order of the experts' numbers
            whole = (whole[:, :, None] + part[:, None, :]).reshape(len(part), -1)
        for uid in self.dead:
            if uid.layer == layer:
                whole[:, self._grid.number(uid) % self._grid.places] = -np.inf
        best = np.argsort(-whole, axis=1, kind="stable")[:, :k]
        first = layer * self._grid.places
        return [
            [self._grid.uid(first + int(n)) for n in row if whole[sample, n] > -np.inf]
            for sample, row in enumerate(best)
        ]

    def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        replies = [self._forward(ask) for ask in asks]
        counts = [0] * samples
        for ask, reply in zip(asks, replies, strict=True):
            for sample in ask.samples if reply is not None else ():
                counts[sample] += 1
        for sample, count in enumerate(counts):
            if count < self._section.k_min:
                asked = ", ".join(str(ask.uid) for ask in asks if sample in ask.samples) or "none, since none is alive"
                raise TooFewExperts(f"sample {sample} has {count} answers; experts asked: {asked}")
        return replies

    def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        return [self._backward(ask) for ask in asks]

    def _forward(self, ask: ExpertCall) -> ExpertReply | None:
        with self._lock:
            if not self._answers(ask):
                return None
            expert = self.expert(ask.uid)
            (frame,) = expert.forward([ask.frames[0]])
            return ExpertReply(frame, ServedBy(HOST, 0, expert.version))

    def _backward(self, ask: ExpertCall) -> ExpertReply | None:
        with self._lock:
            expert = self.expert(ask.uid)
            stale = expert.version - (ask.served.version if ask.served is not None else 0)
            refused = 0 <= self._section.most_stale < stale
            if refused or not self._answers(ask):
                return None
            (frame,) = expert.backward([(ask.frames[0], ask.frames[1])])
            self.stale.append(stale)
            return ExpertReply(frame, ServedBy(HOST, 0, expert.version), stale)
